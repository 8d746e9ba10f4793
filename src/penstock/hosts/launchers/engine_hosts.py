"""The interface of an object that brings the hosts of an engine together; executor backends implement it.

    hosts = open_hosts(engine, voices)    begins (`hosts.launchers.backends`) without waiting
    hosts.gather(lifelines)               waits until all hosts are there
    hosts.hosts                           the hosts on which the supervisor plans and starts ranks
    hosts.admit()                         when one of `hosts.sources` is readable
    hosts.tend(now)                       each second
    hosts.close()

Used by `engine.supervisor.supervisor`, which uses nothing else of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.config.engine import EngineConfig
from penstock.hosts.local import LocalHost
from penstock.hosts.logs.head_log import ShowLine
from penstock.hosts.rank_host import Hosts
from penstock.process.readiness import Waitable

Tell = Callable[[str], None]  # one line for the user


def _show_nothing(host: str, process: str, line: str) -> None:
    """Drop a log line."""


class Voices(NamedTuple):
    """The functions by which a backend speaks to the user.

    Attributes:
        tell: takes a line.
        warn: takes a warning.
        show: takes a log line of a worker, with the names of its host and process.
    """

    tell: Tell
    warn: Tell
    show: ShowLine = _show_nothing


class EngineHosts(Protocol):
    """The hosts of one engine. All calls come from one thread, which must outlive the ranks."""

    @property
    def hosts(self) -> Hosts:
        """The hosts that ranks may run on; before `gather` has returned, some may be missing."""
        ...

    @property
    def sources(self) -> Sequence[Waitable]:
        """The objects to poll: one is readable when `admit` has work. From `gather` on they stay the same."""
        ...

    def gather(self, lifelines: Sequence[Waitable]) -> None:
        """Wait until all hosts that the engine needs are there.

        Args:
            lifelines: objects to poll; one becomes readable when nobody waits for the engine any more.

        Raises:
            UnavailableError: a lifeline has become readable.
            PenstockError: the hosts cannot be brought together.
        """
        ...

    def admit(self) -> None:
        """Take in the hosts that have connected since the last call, for the first time or again."""
        ...

    def tend(self, now: float) -> None:
        """Send each host a sign of life, and check that the host still gives one.

        Args:
            now: monotonic seconds.
        """
        ...

    def close(self) -> None:
        """Close all hosts. The supervisor must have ended their ranks before."""
        ...


class MakeHosts(Protocol):
    """An executor backend: a class, or a function, that makes the hosts of an engine.

    Attributes:
        supports_pp: whether the ranks may be several stages of a pipeline.
    """

    supports_pp: bool

    def __call__(self, engine: EngineConfig, voices: Voices) -> EngineHosts: ...


class OneHost:
    """The hosts of an engine that runs on this host alone. Implements `EngineHosts`.

    Args:
        hosts: a collection of this host alone; made here if it is left out.
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        self.hosts = hosts or Hosts(LocalHost())
        self.sources: Sequence[Waitable] = ()

    def gather(self, lifelines: Sequence[Waitable]) -> None:
        """Do nothing, since the only host is there."""

    def admit(self) -> None:
        """Do nothing, since no other host can come."""

    def tend(self, now: float) -> None:
        """Do nothing, since the only host is the head itself."""

    def close(self) -> None:
        self.hosts.close()
