"""Where the stages of the core are, and what follows from it: one clock for what all of them report.

A stage reports instants of its own host's clock. The supervisor tells by how much that of each host differs
from the head's (`process.pipe_hosts`), and here the reports are shifted by it, so that a trace shows what
followed what. Used by `engine.core.core_server`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.batch import StageSpans
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts


class PipeWatch:
    """What is known of the hosts of the pipe.

    Attributes:
        hosts: as the supervisor has told them last.
    """

    def __init__(self) -> None:
        self.hosts = NO_PIPE_HOSTS

    def note(self, hosts: PipeHosts) -> None:
        """Take what the supervisor tells."""
        self.hosts = hosts

    def told(self) -> list[PipeHosts]:
        """Return what a client must know; nothing on one host."""
        return [self.hosts] if self.hosts.stages else []

    def aligned(self, reports: Sequence[StageSpans]) -> list[StageSpans]:
        """Return the reports of all stages in the head's time."""
        if not self.hosts.stages:
            return list(reports)
        return [
            msgspec.structs.replace(report, shift_ns=self.hosts.clock_of(report.stage).offset_ns)
            for report in reports
        ]
