"""Knows the hosts that the stages run on, and puts the reports of all stages on one clock.

A stage reports times of its own host's clock. The supervisor sends by how much the clock of each host differs
from the head's clock (`process.pipe_hosts`), and the reports are shifted by that here. A trace then shows
events of all hosts in their order, and the links between hosts can be watched (`engine.core.link_watch`).
Used by `engine.core.core_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.batch import StageSpans
from penstock.engine.core.link_watch import LinkWatch
from penstock.process.child import LinkJudged
from penstock.process.config import HostLink
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts


class PipeWatch:
    """Knows the hosts of the stages as reported by the supervisor, and which links between them are slow."""

    def __init__(self) -> None:
        self._told = NO_PIPE_HOSTS
        self._links = LinkWatch()

    def note(self, hosts: PipeHosts) -> None:
        """Take the supervisor's newest report of the hosts.

        A link that has changed, or that no stage uses any more, does not count as slow any longer.
        """
        self._told = hosts
        self._links.lay(hosts)

    def shown(self) -> list[PipeHosts]:
        """Return the hosts for clients to show, with the reduced speeds of slow links, in a list of one.

        The list is empty if the supervisor has sent no hosts, as on a single host.
        """
        if not self._told.stages:
            return []
        slow = self._links.slow
        return [
            msgspec.structs.replace(self._told, links=[_as_found(link, slow) for link in self._told.links])
        ]

    def follow(self, reports: Callable[[], Sequence[StageSpans]]) -> list[LinkJudged]:
        """Learn from the stages' reports, and return the links that have become slow, or are well again.

        To be called about once a second.

        Args:
            reports: returns the stages' reports.
        """
        if not self._told.links:
            return []
        return self._links.follow(self.aligned(reports()))

    def aligned(self, reports: Sequence[StageSpans]) -> list[StageSpans]:
        """Return the reports with the shifts that put their times on the clock of the core's host."""
        if not self._told.stages:
            return list(reports)
        return [
            msgspec.structs.replace(report, shift_ns=self._told.clock_of(report.stage).offset_ns)
            for report in reports
        ]


def _as_found(link: HostLink, slow: Mapping[tuple[str, str], float]) -> HostLink:
    """Return the link with the reduced speed of each direction that was found to be slow."""
    one, other = link.hosts
    return msgspec.structs.replace(
        link,
        reduced_bytes_per_s_out=slow.get((one, other), 0.0),
        reduced_bytes_per_s_in=slow.get((other, one), 0.0),
    )
