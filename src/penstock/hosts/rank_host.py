"""The interface between the supervisor and the machines that ranks run on.

The supervisor decides which rank runs on which host, which processes are connected, and what follows a loss.
A host carries these decisions out: it starts processes, reports what they say and when they end
(`hosts.member`), makes its ends of connections, and knows its resources. Descriptors and process numbers stay
behind this interface. The supervisor hands on endpoints and addresses, and opens none.

    host.start_rank(...) ──▶ member       member.hand(endpoints)   .read_status()   .kill_now()   .await_end()
    host.accept(...)     ──▶ end          end.endpoint             .end()           .close()

The supervisor and each agent have their own machine as a `hosts.local.LocalHost`. The supervisor has each
worker as a `hosts.remote_host.RemoteHost`.
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
    """The need for a link, a one-way connection that carries hidden states from one stage to the next.

    They go from the end made by `join` to the end made by `accept`, unless `Parties.is_swapped`.

    Attributes:
        frame_bytes: size of a frame, the buffer that holds the hidden states of one step.
        num_frames: the most frames under way at once.
    """

    frame_bytes: int
    num_frames: int


class ChannelNeed(msgspec.Struct, frozen=True, kw_only=True, tag="channel"):
    """The need for a one-way channel of messages with samples, from the joining end to the accepting one.

    Attributes:
        num_messages: the most messages under way while none is read.
        num_rows: the most sampled rows in a message.
    """

    num_messages: int
    num_rows: int


class BulkNeed(msgspec.Struct, frozen=True, kw_only=True, tag="bulk"):
    """The need for a bulk channel, which carries large payloads that may wait (`pipeline.bulk`).

    They go one way, in chunks, from the joining end to the accepting one.

    Attributes:
        num_chunks: the most chunks (parts of a payload) under way while none is read.
    """

    num_chunks: int = 8


class PlanNeed(msgspec.Struct, frozen=True, tag="plan"):
    """The need for a two-way channel of messages between the core, which accepts, and a rank.

    The core sends its plans over it (what each step computes), and the rank its reports.
    """


class MeetingNeed(msgspec.Struct, frozen=True, kw_only=True, tag="meeting"):
    """The need for shared memory in which the ranks of a stage add up parts of tensors; the first accepts.

    Attributes:
        num_ranks: number of ranks of the stage.
    """

    num_ranks: int


Need = LinkNeed | ChannelNeed | BulkNeed | PlanNeed | MeetingNeed


class Parties(msgspec.Struct, frozen=True, kw_only=True):
    """The two parties of a connection, seen from one of its ends. Between hosts they prove their roles.

    Attributes:
        epoch: epoch for which the connection is made.
        own, peer: roles of the processes at this end and at the other, such as "rank-3" (`trust.peer_names`).
        peer_host: name of the host of the other process.
        address: address at which this end's host listens, or from which it dials; empty: the host chooses.
        peer_address: address of the other host that this host dials; empty: `HostEnd.invitation` has it.
        is_swapped: the host that should accept cannot be reached, so the other one accepts in its place. Data
            then go from the accepting end to the joining end.
    """

    epoch: int
    own: str
    peer: str
    peer_host: str
    address: str = ""
    peer_address: str = ""
    is_swapped: bool = False


class HostEnd(Protocol):
    """The host's side of one end of a connection, for one epoch."""

    @property
    def endpoint(self) -> Any:
        """The value with which the process at this end opens its side (`process.endpoints`)."""
        ...

    @property
    def invitation(self) -> Any:
        """The facts with which another host joins this end, made by `accept`; opaque to all others."""
        ...

    def delivered(self) -> None:
        """Record that all processes of the connection have been given their endpoints."""
        ...

    def end(self) -> None:
        """End the connection, so that all processes that wait at it stop waiting; then close this end."""
        ...

    def close(self) -> None:
        """Close what the host holds of this end; a process that has its endpoint can go on."""
        ...


class RankHost(Protocol):
    """The interface of a machine that ranks run on.

    All calls come from one thread, which must outlive the processes that were started (`Member`).
    """

    @property
    def name(self) -> str:
        """The name of the host, as in `HostResources.name` and `RankConfig.host`."""
        ...

    @property
    def is_there(self) -> bool:
        """Whether the host can take requests now; another machine may be lost, and may come back."""
        ...

    def tend(self, now: float) -> None:
        """Send the host a sign of life, and give it up if it is silent for too long; call it each second.

        Args:
            now: monotonic seconds.
        """
        ...

    def resources(self) -> HostResources:
        """Return the cores, memory and GPUs that the host can give now, by its last report."""
        ...

    def clocks(self) -> Sequence[HostClock]:
        """Return a list of one: the offset of the host's clock from the head's; empty until it is known."""
        ...

    def start_rank(self, rank: RankConfig, name: str, member_index: int) -> Member:
        """Start the process of a rank and return it, without waiting until it has loaded.

        Args:
            name: name in texts for users, such as "replica 1 stage 0".
            member_index: as in `Member`.

        Raises:
            OSError: the host cannot start the process, perhaps only for now.
        """
        ...

    def keep_spare(self, threads: int) -> int:
        """Keep a spare process ready, in which the next rank starts sooner: its imports are done.

        To be called about every second; the first call starts the process. If memory is short, no spare
        process is kept.

        Args:
            threads: the most threads that a rank of this host has.

        Returns:
            Bytes of memory that the process holds, once it is ready; 0 while none is ready.
        """
        ...

    def start_measuring(self, config: MeasureConfig, name: str) -> Member:
        """Start a process that times the steps of a rank, and return it.

        `name` and errors are as for `start_rank`.
        """
        ...

    def offers(self, need: Need, peer: str) -> Sequence[str]:
        """Return the kinds of connections for this need that this host offers to the host `peer`.

        The best comes first, such as "ring" within a host and "tls" between hosts.
        """
        ...

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        """Make the accepting end of a connection for a process of this host, and return it; other ends join.

        The caller hands `HostEnd.endpoint` to that process. Several ends join only where the ranks of a stage
        meet in shared memory (`MeetingNeed`).

        Args:
            kind: kind of connection, one that `offers` has returned.
            need: what the connection is for, with the sizes of its buffers or messages.
            parties: the processes of both ends; if several join, the first of them.

        Raises:
            PeerError: the end cannot be made, or the host does not answer.
            OSError: descriptors or memory are short, perhaps only for now.
        """
        ...

    def join(self, kind: str, need: Need, parties: Parties, invitation: Any) -> HostEnd:
        """Make and return an end that joins an accepted end of this host or of another one.

        Args:
            invitation: `HostEnd.invitation` of the accepted end. Other arguments and errors: as for `accept`.
        """
        ...

    def close(self) -> None:
        """Release the host, and end its spare process if it is this machine.

        All ranks must have ended before.
        """
        ...


class HeadHost(RankHost, Protocol):
    """The interface of the supervisor's own host, where the core runs too: the process that schedules."""

    def start_core(self, core: CoreConfig, clients: LocalSocket, name: str, member_index: int) -> Member:
        """Start the process of the core and return it; `name`, `member_index` and errors as `start_rank`.

        Args:
            clients: listening socket at which the core accepts its clients.
        """
        ...


class WorkerHost(RankHost, Protocol):
    """The interface of an agent's own host, which may serve one head after the other."""

    def forget_credentials(self) -> None:
        """Forget the credentials with which processes of this host prove themselves on links.

        The next head may use the same numbers of epochs again.
        """
        ...


class Hosts(Mapping[str, RankHost]):
    """All hosts of an engine, by name, in the order in which stages are given to them.

    Args:
        head: the supervisor's own host, which comes first.
        routes: says which network route connections between two hosts take.
        readmit: called with the time at each `tend`; it takes back hosts whose connection was broken, and
            shuts out hosts that are no longer allowed.
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
        """The names of the hosts that can take requests now (`RankHost.is_there`), in order."""
        return [host.name for host in self._by_name.values() if host.is_there]

    def add(self, host: RankHost) -> None:
        """Add a host that has come later, behind the others; one of a known name takes that one's place."""
        self._by_name[host.name] = host

    def close(self) -> None:
        """Close all hosts."""
        for host in self._by_name.values():
            host.close()

    def tend(self, now: float) -> None:
        """Take back hosts whose connection was broken, and call `RankHost.tend` for all hosts.

        Args:
            now: monotonic seconds.
        """
        self._readmit(now)
        for host in self._by_name.values():
            host.tend(now)

    def resources(self) -> list[HostResources]:
        """Return the cores, memory and GPUs that each host can give now, in order."""
        return [host.resources() for host in self._by_name.values()]

    def clocks(self) -> list[HostClock]:
        """Return the clock offsets of all hosts of which one is known, in order."""
        return [clock for host in self._by_name.values() for clock in host.clocks()]
