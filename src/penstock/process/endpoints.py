"""Where a process meets the others in one epoch, as it is told over its control socket.

An endpoint is one end of a connection, as its host hands it to a process: a value of one of several kinds.
The kind is the tag of its struct, and decides which carrier opens it (`pipeline.links.link_carriers` and
`pipeline.links.channel_carriers`). Hosts make endpoints (`hosts.rank_host`); a file descriptor in one is
called `..._fd`, and becomes the receiver's own on the way (`process.control`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from penstock.errors import ProtocolError

Opened = TypeVar("Opened")


class RingHandle(msgspec.Struct, frozen=True, kw_only=True, tag="ring"):
    """A ring in shared memory as inherited file descriptors; nothing of it has a name."""

    memory_fd: int
    data_fd: int  # eventfd semaphore: frames written and not yet read
    space_fd: int  # eventfd semaphore: frames free to write
    frame_bytes: int
    num_frames: int

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.memory_fd, self.data_fd, self.space_fd


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """A link in the memory of one process, between threads (`pipeline.links.memory`)."""

    number: int


class SocketListener(msgspec.Struct, frozen=True, kw_only=True, tag="socket_listener"):
    """A local socket that listens, for the end that binds (`hosts.local_socket`)."""

    listen_fd: int


class SocketHandle(msgspec.Struct, frozen=True, kw_only=True, tag="socket_handle"):
    """The file of a local socket, for an end that connects (`hosts.local_socket`)."""

    handle_fd: int


class MeetingHandle(msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory"):
    """Where the ranks of a stage meet in one epoch, as inherited descriptors (`distributed.meeting`)."""

    memory_fd: int
    store_fd: int


LinkEndpoint = RingHandle | MemoryHandle
ChannelEndpoint = RingHandle | SocketListener | SocketHandle
MeetingEndpoint = MeetingHandle
Endpoint = LinkEndpoint | ChannelEndpoint | MeetingEndpoint


def opener_of(
    openers: Mapping[type, Callable[..., Opened]], endpoint: msgspec.Struct, name: str
) -> Callable[..., Opened]:
    """Return what opens endpoints of this kind.

    Args:
        openers: by type of endpoint, all of one seam.
        name: of the connection, for the error.

    Raises:
        ProtocolError: none of them does.
    """
    opener = openers.get(type(endpoint))
    if opener is None:
        known = ", ".join(sorted(map(_kind, openers)))
        raise ProtocolError(
            f"{name} was given an endpoint of kind {_kind(type(endpoint))}, which nothing here can open: "
            f"the kinds for it are {known}.",
            remedy="Run the same Penstock version in all processes and on all hosts.",
        )
    return opener


def _kind(endpoint: type) -> str:
    return str(endpoint.__struct_config__.tag)  # type: ignore[attr-defined]  # of all structs


class RankEndpoints(msgspec.Struct, frozen=True, kw_only=True, tag="rank_endpoints"):
    """Where the neighbours of a rank are in one epoch."""

    epoch: int
    plans: ChannelEndpoint  # from the core, and back to it
    tokens: list[ChannelEndpoint]  # output rank: to each rank of earlier stages, in order; those: from it
    results: ChannelEndpoint | None = None  # output rank: to the core
    incoming: LinkEndpoint | None = None
    outgoing: list[LinkEndpoint] = []  # to each of `RankConfig.receivers`
    meeting: MeetingEndpoint | None = None  # of the ranks of the stage, if there are several


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often processes were started again."""

    stages: list[int] = []  # [num_stages]
    core: int = 0


NO_RESTARTS = Restarts()


class CoreEndpoints(msgspec.Struct, frozen=True, kw_only=True, tag="core_endpoints"):
    """Where the core meets the ranks in one epoch."""

    epoch: int
    plans: list[ChannelEndpoint]  # to each rank, stage by stage
    stages: list[int]  # of each rank
    results: ChannelEndpoint  # from the output rank
    restarts: Restarts = Restarts()  # up to this epoch
