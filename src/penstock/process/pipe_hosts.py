"""The hosts over which a pipe runs now, with the known ways and clocks between them.

The supervisor tells the core (`process.control`), and the core its clients (`engine.ipc`), whenever there is
something new. On one host nothing is told.
"""

from __future__ import annotations

import msgspec

from penstock.process.config import HostLink


class HostClock(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between the monotonic clock of a host and that of the head (`trace.host_clock`).

    Attributes:
        host: its name.
        offset_ns: nanoseconds to add to an instant of its clock to have it in the head's time.
        error_ns: error that this may have, in either direction.
    """

    host: str
    offset_ns: int
    error_ns: int


class PipeHosts(msgspec.Struct, frozen=True, kw_only=True, tag="pipe_hosts"):
    """The hosts of one pipe, as of now.

    Attributes:
        stages: the host of each stage; empty where nothing was told.
        links: ways between the hosts, as measured.
        clocks: clocks of the hosts whose clock is known.
        token_bytes: bytes that cross from stage to stage for each token.
    """

    stages: list[str] = []
    links: list[HostLink] = []
    clocks: list[HostClock] = []
    token_bytes: int = 0

    def clock_of(self, stage: int) -> HostClock:
        """Return the clock of the stage's host; one without an offset where it is not known."""
        host = self.stages[stage] if stage < len(self.stages) else ""
        unknown = HostClock(host=host, offset_ns=0, error_ns=0)
        return next((clock for clock in self.clocks if clock.host == host), unknown)


NO_PIPE_HOSTS = PipeHosts()
