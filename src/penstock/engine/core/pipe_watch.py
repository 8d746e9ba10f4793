"""Keeps the hosts of the stages, and puts what all stages report on one clock.

A stage reports instants of its own host's clock. The supervisor tells by how much that of each host differs
from the head's (`process.pipe_hosts`), and here the reports are shifted by it, so that a trace shows what
followed what, and the links between the hosts can be watched (`engine.core.link_watch`). Used by
`engine.core.core_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.batch import StageSpans
from penstock.engine.core.link_watch import LinkWatch
from penstock.process.child import LinkJudged
from penstock.process.config import HostLink
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts


class PipeWatch:
    """The known facts about the hosts of the pipe."""

    def __init__(self) -> None:
        self._told = NO_PIPE_HOSTS
        self._links = LinkWatch()
        self._slow: dict[tuple[str, str], float] = {}  # bytes per second, by sender and receiver

    def note(self, hosts: PipeHosts) -> None:
        """Take what the supervisor says. If links have changed, nothing is known yet of the new ones."""
        if hosts.links != self._told.links:
            self._slow.clear()
        self._told = hosts
        self._links.lay(hosts)

    def shown(self) -> list[PipeHosts]:
        """Return what a client must know; nothing on one host."""
        if not self._told.stages:
            return []
        return [msgspec.structs.replace(self._told, links=list(map(self._as_found, self._told.links)))]

    def follow(self, reports: Callable[[], Sequence[StageSpans]]) -> list[LinkJudged]:
        """Return the links that have become slow, or are well again; to be called each second or so."""
        if not self._told.links:
            return []
        judged = self._links.follow(self.aligned(reports()))
        for link in judged:
            self._slow.pop((link.sender, link.receiver), None)
            if link.is_slow:
                self._slow[link.sender, link.receiver] = link.bytes_per_s
        return judged

    def aligned(self, reports: Sequence[StageSpans]) -> list[StageSpans]:
        """Return the reports of all stages in the head's time."""
        if not self._told.stages:
            return list(reports)
        return [
            msgspec.structs.replace(report, shift_ns=self._told.clock_of(report.stage).offset_ns)
            for report in reports
        ]

    def _as_found(self, link: HostLink) -> HostLink:
        one, other = link.hosts
        return msgspec.structs.replace(
            link,
            reduced_bytes_per_s_out=self._slow.get((one, other), 0.0),
            reduced_bytes_per_s_in=self._slow.get((other, one), 0.0),
        )
