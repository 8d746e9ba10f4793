"""The hosts over which a pipe runs now, with the measured paths between them and the offsets of their clocks.

The supervisor sends them to the core (`process.control`), and the core to its clients (`engine.ipc`),
whenever something has changed. With a single host nothing is sent.
"""

from __future__ import annotations

import msgspec

from penstock.process.config import HostLink


class HostClock(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between the monotonic clock of a host and that of the head (`trace.host_clock`).

    Attributes:
        host: name of the host.
        offset_ns: nanoseconds to add to a time of the host's clock, to get the time of the head's clock.
        error_ns: the most by which `offset_ns` may be wrong, in either direction.
    """

    host: str
    offset_ns: int
    error_ns: int


class PipeHosts(msgspec.Struct, frozen=True, kw_only=True, tag="pipe_hosts"):
    """The hosts of one pipe, as of now.

    Attributes:
        stages: the host of each stage; empty if the supervisor has sent nothing.
        links: network paths between the hosts, as measured.
        clocks: clocks of the hosts, without hosts whose clock is not known.
        token_bytes: bytes that cross from stage to stage for each token.
    """

    stages: list[str] = []
    links: list[HostLink] = []
    clocks: list[HostClock] = []
    token_bytes: int = 0

    def clock_of(self, stage: int) -> HostClock:
        """Return the clock of the stage's host; if it is not known, a clock with offset 0."""
        host = self.stages[stage] if stage < len(self.stages) else ""
        unknown = HostClock(host=host, offset_ns=0, error_ns=0)
        return next((clock for clock in self.clocks if clock.host == host), unknown)


NO_PIPE_HOSTS = PipeHosts()
