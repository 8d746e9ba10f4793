"""The interface of a starter: it lets some other program start the workers that a head waits for.

    starter.start(wanted)     called once, when workers can join
    starter.attend()          called when one of `starter.sources` is readable
    starter.failure           the reason why no worker will come; the engine then cannot start
    starter.close()           ends the workers that the starter has started

`TypedByUser` starts none itself: it tells the user how to start them. Used by `hosts.gathering`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.errors import PenstockError
from penstock.hosts.network.joining_address import join_address
from penstock.process.readiness import Waitable


class WantedWorkers(NamedTuple):
    """The workers that an engine waits for, and how they find its head.

    Attributes:
        number: how many workers are wanted.
        host_name: name of the head's host.
        cluster: name of the cluster.
        host, port: where they join; the host may stand for all addresses of this machine.
        token_file: path of the file with the token with which they join.
        link_ports: ports of the head for links from other hosts.
        is_plain: links between ranks are in plain text.
    """

    number: int
    host_name: str
    cluster: str
    host: str
    port: int
    token_file: str
    link_ports: str
    is_plain: bool = False

    @property
    def counted(self) -> str:
        """The number of workers in words, such as "2 workers"."""
        return f"{self.number} worker" + "s" * (self.number != 1)


class WorkerStarter(Protocol):
    """The interface of what starts the workers of an engine. All calls come from one thread."""

    @property
    def sources(self) -> Sequence[Waitable]:
        """The objects to poll: one is readable when `attend` has work. They are always the same."""
        ...

    @property
    def failure(self) -> PenstockError | None:
        """The reason why no more workers will come; None while they may come."""
        ...

    def start(self, wanted: WantedWorkers) -> None:
        """Begin to start the workers; return at once."""
        ...

    def attend(self) -> None:
        """Take in news about the workers since the last call, and report them to the user."""
        ...

    def take_lost(self) -> Sequence[str]:
        """Return the names of the hosts of which the launcher has reported the loss since the last call."""
        ...

    def close(self) -> None:
        """End the workers that were started, and wait until they have ended."""
        ...


class TypedByUser:
    """A starter that prints the command with which a user starts the workers. Implements `WorkerStarter`.

    Args:
        tell: shows the user a line of text.
    """

    failure: PenstockError | None = None
    sources: Sequence[Waitable] = ()

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def start(self, wanted: WantedWorkers) -> None:
        where = "the other host" if wanted.number == 1 else "each other host"
        self._invite(wanted, f"on {where}", f"--join {join_address(wanted.host, wanted.port)}")

    def _invite(self, wanted: WantedWorkers, where: str, head: str) -> None:
        """Tell the user the command to type.

        Args:
            where: the hosts, in words.
            head: the words of the command line that name the head.
        """
        self._tell(
            f"waiting for {wanted.counted}; {where} type:\n"
            f"  penstock worker {head} --join-token-file {shlex.quote(wanted.token_file)}"
        )
        self._tell(f"links from other hosts use the ports {wanted.link_ports} of this host (--link-ports)")

    def attend(self) -> None:
        """Do nothing, since nothing is known of workers before they join."""

    def take_lost(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """Do nothing, since the workers are the user's."""
