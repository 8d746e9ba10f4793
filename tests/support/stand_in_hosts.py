"""A host without processes: what a `RankHost` is asked for is written down, and a test plays the rest.

`StandInHost` has no descriptor, process number or socket but the one byte that says "news": all that a host
elsewhere would have too.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from penstock.batch import RankLoaded
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.member import Member
from penstock.hosts.rank_host import HostEnd, Need, Parties
from penstock.hosts.resources import HostResources
from penstock.process.child import StatusEvent
from penstock.process.config import CoreConfig, MeasureConfig, RankConfig
from penstock.process.control import ControlMessage
from penstock.process.endpoints import MemoryHandle
from penstock.process.pipe_hosts import HostClock
from penstock.process.readiness import Waitable

LOADED = RankLoaded(
    stage=1,
    max_blocks=7,
    block_bytes=1,
    tensor_bytes=2,
    bytes_read=2,
    load_seconds=0.1,
    kernels="all",
    is_invariant=True,
)


class StandInMember(Member):
    """A process that a test speaks for.

    Attributes:
        handed: messages that it was handed, in order.
        done: what else was asked of it, in order.
    """

    def __init__(self, host: StandInHost, name: str, stage: int | None, member_index: int) -> None:
        super().__init__(name, stage, member_index)
        self.handed: list[ControlMessage] = []
        self.done: list[str] = []
        self._host = host
        self._said: deque[StatusEvent] = deque()
        self._exit_code: int | None = None

    def say(self, event: StatusEvent) -> None:
        self._said.append(event)
        self._host.wake()

    def leave(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._host.wake()

    @property
    def is_away(self) -> bool:
        return not self._host.is_there

    @property
    def identity(self) -> str:
        return f"{self._host.name} #{self.member_index}"

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    @property
    def sources(self) -> Collection[Waitable]:
        return [self._host.news]

    def hand(self, message: ControlMessage) -> None:
        self.handed.append(message)

    def show_threads(self) -> None:
        self.done.append("show_threads")

    def ask_to_leave(self) -> None:
        self.done.append("ask_to_leave")

    def kill_now(self) -> None:
        self.done.append("kill_now")
        self._exit_code = -9 if self._exit_code is None else self._exit_code

    def await_end(self) -> int:
        assert self._exit_code is not None, "nobody has ended it"
        return self._exit_code

    def close(self) -> None:
        self.done.append("close")

    def _receive(self) -> list[StatusEvent]:
        self._host.clear()
        events = list(self._said)
        self._said.clear()
        return events


class StandInEnd:
    """An end whose endpoint is a number."""

    def __init__(self, host: StandInHost, kind: str, invitation: Any = None) -> None:
        self.endpoint = self.invitation = invitation or MemoryHandle(number=len(host.made))
        self.happened: list[str] = []
        host.made.append((kind, self))

    def delivered(self) -> None:
        self.happened.append("delivered")

    def end(self) -> None:
        self.happened.append("end")

    def close(self) -> None:
        self.happened.append("close")


class StandInHost:
    """A host that a test plays. Implements `HeadHost` and `WorkerHost`.

    Args:
        kinds: of connections that it offers, to hosts of any name.

    Attributes:
        news: readable when one of its members has something to say.
        members: that were started, in order.
        ranks: what the ranks among them were told at the start, in order.
        made: ends of connections, with their kinds.
        parties: who is at them.
        spares_kept: the number of threads each time that a spare was to be kept.
        spare_bytes: that it says the spare has.
        free_bytes, num_gpus, numeric_classes: that it says it has.
        num_forgotten: how often it was to forget what links were proved by.
        known_clocks: that it says is known of its clock.
    """

    def __init__(self, name: str, *kinds: str) -> None:
        self.name = name
        self.is_there = True
        self.kinds = list(kinds)
        self.members: list[StandInMember] = []
        self.ranks: list[RankConfig] = []
        self.made: list[tuple[str, StandInEnd]] = []
        self.parties: list[Parties] = []
        self.spares_kept: list[int] = []
        self.spare_bytes = 0
        self.num_forgotten = 0
        self.free_bytes, self.num_gpus = 1 << 34, 0
        self.numeric_classes: tuple[str, ...] = ("portable", "avx2")
        self.known_clocks: list[HostClock] = []
        self.news, self._bell = socket.socketpair()
        self.news.setblocking(False)

    def wake(self) -> None:
        self._bell.send(b"!")

    def clear(self) -> None:
        try:
            self.news.recv(4096)
        except BlockingIOError:
            return

    def tend(self, now: float) -> None:
        """It is there."""

    def close(self) -> None:
        self.news.close()
        self._bell.close()

    def forget_credentials(self) -> None:
        self.num_forgotten += 1

    def keep_spare(self, threads: int) -> int:
        self.spares_kept.append(threads)
        return self.spare_bytes

    def resources(self) -> HostResources:
        return HostResources(
            num_cpus=4,
            free_bytes=self.free_bytes,
            num_gpus=self.num_gpus,
            name=self.name,
            numeric_classes=self.numeric_classes,
        )

    def clocks(self) -> Sequence[HostClock]:
        return self.known_clocks

    def start_rank(self, rank: RankConfig, name: str, member_index: int) -> Member:
        self.ranks.append(rank)
        return self._start(name, rank.stage, member_index)

    def start_measuring(self, config: MeasureConfig, name: str) -> Member:
        return self._start(name, config.rank.stage, 0)

    def start_core(self, core: CoreConfig, clients: LocalSocket, name: str, member_index: int) -> Member:
        return self._start(name, None, member_index)

    def offers(self, need: Need, peer: str) -> Sequence[str]:
        return self.kinds

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        self.parties.append(parties)
        return StandInEnd(self, kind)

    def join(self, kind: str, need: Need, parties: Parties, invitation: Any) -> HostEnd:
        assert isinstance(invitation, msgspec.Struct)
        self.parties.append(parties)
        return StandInEnd(self, kind, invitation)

    def _start(self, name: str, stage: int | None, member_index: int) -> StandInMember:
        member = StandInMember(self, name, stage, member_index)
        self.members.append(member)
        return member
