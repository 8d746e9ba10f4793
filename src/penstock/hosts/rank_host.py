"""The seam between the supervisor and the machines that ranks run on.

The supervisor decides which rank runs on which host, which processes are connected and what follows a loss. A
host carries it out: it starts processes and reports their words and their end (`hosts.member`), makes its
ends of connections, and knows what it can give. Descriptors, process numbers and addresses stay behind this
seam; above it an endpoint is a value to be handed on.

    host.start_rank(...) ──▶ member       member.hand(endpoints)   .read_status()   .kill_now()   .await_end()
    host.accept(...)     ──▶ end          end.endpoint             .end()           .close()

`hosts.local.LocalHost` is the supervisor's own host, and that of the agent of a worker; the supervisor has
such a worker as a `hosts.remote_host.RemoteHost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.member import Member
from penstock.hosts.network.routes import DEFAULT_ROUTES, Routes
from penstock.hosts.resources import HostResources
from penstock.process.config import CoreConfig, MeasureConfig, RankConfig
from penstock.process.pipe_hosts import HostClock


class LinkNeed(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """A link that carries hidden states from the joining end to the accepting one."""

    frame_bytes: int
    num_frames: int  # under way at once


class ChannelNeed(msgspec.Struct, frozen=True, kw_only=True, tag="channel"):
    """A one-way channel of messages, from the joining end to the accepting one.

    Attributes:
        num_messages: most messages under way while none is read.
        num_rows: sampled rows of a message.
    """

    num_messages: int
    num_rows: int


class BulkNeed(msgspec.Struct, frozen=True, kw_only=True, tag="bulk"):
    """A bulk channel, from the joining end to the accepting one (`pipeline.bulk`).

    Attributes:
        num_chunks: most chunks under way while none is read.
    """

    num_chunks: int = 8


class PlanNeed(msgspec.Struct, frozen=True, tag="plan"):
    """A two-way channel of messages between the core, which accepts, and a rank."""


class MeetingNeed(msgspec.Struct, frozen=True, kw_only=True, tag="meeting"):
    """A place at which the ranks of one stage meet; the first of them accepts."""

    num_ranks: int


Need = LinkNeed | ChannelNeed | BulkNeed | PlanNeed | MeetingNeed


class Parties(msgspec.Struct, frozen=True, kw_only=True):
    """The parties of a connection, seen from one of its ends: what links between hosts are proved by.

    Attributes:
        own, peer: roles of the processes at this end and at the other (`trust.peer_names`).
        peer_host: where the other one is.
        address: of this end's host, on the way to the other one; empty: as the host likes.
        peer_address: of the other host, as this one dials it; empty: as its invitation says.
        is_swapped: what is carried goes from the end that is accepted here to the one that joins it, because
            the host that should accept cannot be reached.
    """

    epoch: int
    own: str
    peer: str
    peer_host: str
    address: str = ""
    peer_address: str = ""
    is_swapped: bool = False


class HostEnd(Protocol):
    """One end of a connection at a host, for as long as an epoch lasts."""

    @property
    def endpoint(self) -> Any:
        """The endpoint that the process at this end is given (`process.endpoints`)."""
        ...

    @property
    def invitation(self) -> Any:
        """The facts that the host of a joining end needs of an accepting one; opaque to all others."""
        ...

    def delivered(self) -> None:
        """Record that all processes have been given their endpoints."""
        ...

    def end(self) -> None:
        """End the connection with its epoch, so that all waits at it stop; then close it."""
        ...

    def close(self) -> None:
        """Close the host's end; a process that has its endpoint goes on."""
        ...


class RankHost(Protocol):
    """A machine that ranks run on. All calls come from one thread, which must outlive the members."""

    @property
    def name(self) -> str:
        """The name that `HostResources.name` and `RankConfig.host` have."""
        ...

    @property
    def is_there(self) -> bool:
        """Whether anything can be asked of the host; a host elsewhere may be lost, and come back."""
        ...

    def tend(self, now: float) -> None:
        """Tell the host that the supervisor is there, and check whether it is; to be called each second.

        Args:
            now: monotonic seconds.
        """
        ...

    def resources(self) -> HostResources:
        """Return what the host can give now."""
        ...

    def clocks(self) -> Sequence[HostClock]:
        """Return what is known of the host's clock: one entry, or none yet."""
        ...

    def start_rank(self, rank: RankConfig, name: str, member_index: int) -> Member:
        """Start the process of a rank.

        Args:
            name: for messages, such as "replica 1 stage 0".
            member_index: as in `Member`.

        Raises OSError where the host cannot, perhaps for now.
        """
        ...

    def keep_spare(self, threads: int) -> int:
        """Keep a process ready that the next rank is started in: without weights, its imports done.

        To be called every second or so; the first calls start it. Not where memory is short.

        Args:
            threads: the most that a rank of this host has.

        Returns:
            Bytes of memory that it holds, once it is ready; 0 while there is none.
        """
        ...

    def start_measuring(self, config: MeasureConfig, name: str) -> Member:
        """Start a process that times the steps of a rank, as `start_rank`."""
        ...

    def offers(self, need: Need, peer: str) -> Sequence[str]:
        """Return the kinds of connections for this need between here and the host `peer`, best first.

        The best comes first.
        """
        ...

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        """Make the end that others join.

        Args:
            kind: one that it has offered.
            parties: where several join, the first of them.
        """
        ...

    def join(self, kind: str, need: Need, parties: Parties, invitation: Any) -> HostEnd:
        """Make an end that joins one that was accepted, here or at another host."""
        ...

    def close(self) -> None:
        """Close the host: a process that waits there ends. The owner of members ends them before."""
        ...


class HeadHost(RankHost, Protocol):
    """The host of the supervisor, where the core runs too."""

    def start_core(self, core: CoreConfig, clients: LocalSocket, name: str, member_index: int) -> Member:
        """Start the process of the core, as `start_rank` does for a rank.

        Args:
            clients: socket on which the core accepts its clients.
            member_index: position of the core among the members of the launch.
        """
        ...


class WorkerHost(RankHost, Protocol):
    """The host of an agent, which may serve one head after the other."""

    def forget_credentials(self) -> None:
        """Forget what links have been proved by.

        Epochs of the next head have names that were used before.
        """
        ...


class Hosts(Mapping[str, RankHost]):
    """All hosts of an engine, by name, in the order in which stages are given to them.

    Args:
        head: the first one.
        routes: what is known of the ways between them.
        readmit: called at each `tend` with its time: takes in those again whose connection was broken, and
            shuts out those that may not be there any more.
    """

    def __init__(
        self,
        head: HeadHost,
        *others: RankHost,
        routes: Routes = DEFAULT_ROUTES,
        readmit: Callable[[float], None] = lambda now: None,
    ) -> None:
        self.head = head
        self.routes = routes
        self._readmit = readmit
        self._by_name = {host.name: host for host in (head, *others)}

    def __getitem__(self, name: str) -> RankHost:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names_there(self) -> list[str]:
        """The names of the hosts of which anything can be asked, in order."""
        return [host.name for host in self._by_name.values() if host.is_there]

    def add(self, host: RankHost) -> None:
        """Add a host that has come later, behind the others; one that is known keeps its place."""
        self._by_name[host.name] = host

    def close(self) -> None:
        """Close all hosts."""
        for host in self._by_name.values():
            host.close()

    def tend(self, now: float) -> None:
        """Call `RankHost.tend` for all hosts; before an engine runs, take in those that are back."""
        self._readmit(now)
        for host in self._by_name.values():
            host.tend(now)

    def resources(self) -> list[HostResources]:
        """Return what each host can give now."""
        return [host.resources() for host in self._by_name.values()]

    def clocks(self) -> list[HostClock]:
        """Return what is known of the hosts' clocks, in order."""
        return [clock for host in self._by_name.values() for clock in host.clocks()]
