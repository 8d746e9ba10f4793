"""The endpoints at which a process meets the others in one epoch, as it gets them over its control socket.

An endpoint is one end of a connection, as its host hands it to a process: a value of one of several kinds.
The kind is the tag of its struct, and decides which carrier opens it (`pipeline.links.link_carriers` and
`pipeline.links.channel_carriers`). Hosts make endpoints (`hosts.rank_host`); a file descriptor in one is
called `..._fd`, and becomes the receiver's own on the way (`process.control`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

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
    """The meeting of the ranks of a stage for one epoch, as inherited descriptors (`distributed.meeting`)."""

    memory_fd: int
    store_fd: int


StreamSide = Literal["dialler", "accepter"]


class DialledStream(msgspec.Struct, frozen=True, kw_only=True, tag="dialled"):
    """A stream that this process dials.

    Attributes:
        host: an IPv4 or IPv6 address, or a name.
        own_address: address from which it is dialled; empty: any.
    """

    host: str
    port: int
    own_address: str = ""


class AcceptedStream(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """A stream that this process accepts, at a socket that listens already."""

    listen_fd: int


class ConnectedStream(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """A stream that the host has connected.

    Attributes:
        side: which of the two this end is; it decides which end begins a handshake.
    """

    stream_fd: int
    side: StreamSide


StreamWay = DialledStream | AcceptedStream | ConnectedStream


class PlainText(msgspec.Struct, frozen=True, tag="plain_text"):
    """Bytes cross as they are, without proof of the peer: to measure within a host, and for tests."""


PLAIN_TEXT = PlainText()


class Certified(msgspec.Struct, frozen=True, kw_only=True, tag="certified"):
    """A stream over TLS in which both ends show a certificate of their cluster.

    Attributes:
        credentials_fd: credentials of this end (`trust.credentials`).
        peer: the name that the other end must have, as a URI (`trust.peer_names`).
    """

    credentials_fd: int
    peer: str


class Challenged(msgspec.Struct, frozen=True, kw_only=True, tag="challenged"):
    """Plain text, after both ends have proved that they belong to the epoch (`trust.challenge`).

    Attributes:
        credentials_fd: credentials of this end, with the key of the epoch.
        own, peer: the names of the two ends, as URIs.
    """

    credentials_fd: int
    own: str
    peer: str


StreamSecurity = PlainText | Certified | Challenged
Precedence = Literal["normal", "low"]


class StreamPath(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which one end of a stream between hosts is made and ended.

    Attributes:
        end_fd: an eventfd; once it is written the stream is over at this end. Many streams may share it.
        open_timeout_s: for the other end to come, from when this end is opened; it may be loading still.
        precedence: low: what is written waits for other streams of the host, where they meet.
    """

    way: StreamWay
    end_fd: int
    security: StreamSecurity = PLAIN_TEXT
    open_timeout_s: float = 3600.0
    precedence: Precedence = "normal"


class StreamLinkHandle(msgspec.Struct, frozen=True, kw_only=True, tag="stream_link"):
    """One end of a link over a stream (`pipeline.links.stream_link`).

    Attributes:
        direction: direction of the frames at this end.
        num_frames: frames that this end has room for.
    """

    path: StreamPath
    direction: Literal["out", "in"]
    frame_bytes: int
    num_frames: int


class StreamChannelHandle(msgspec.Struct, frozen=True, kw_only=True, tag="stream_channel"):
    """One end of a channel of messages over a stream (`pipeline.links.stream_channel`).

    Attributes:
        num_messages: messages that this end has room for, in each direction.
    """

    path: StreamPath
    num_messages: int


class HeldEnd(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """An end that the agent of another host holds for its process (`hosts.agent`); no process gets it."""

    number: int


LinkEndpoint = RingHandle | MemoryHandle | StreamLinkHandle | HeldEnd
ChannelEndpoint = RingHandle | SocketListener | SocketHandle | StreamChannelHandle | HeldEnd
MeetingEndpoint = MeetingHandle | HeldEnd
Endpoint = LinkEndpoint | ChannelEndpoint | MeetingEndpoint


def opener_of(
    openers: Mapping[type, Callable[..., Opened]], endpoint: msgspec.Struct, name: str
) -> Callable[..., Opened]:
    """Return the function that opens endpoints of this kind.

    Args:
        openers: by type of endpoint, all of one seam.
        name: name of the connection, for the error.

    Raises:
        ProtocolError: there is no such function.
    """
    opener = openers.get(type(endpoint))
    if opener is None:
        known = ", ".join(sorted(map(_kind, openers)))
        raise ProtocolError(
            f"{name} was given an endpoint of kind {_kind(type(endpoint))}, which cannot be opened; "
            f"supported kinds: {known}.",
            remedy="Run the same Penstock version in all processes and on all hosts.",
        )
    return opener


def _kind(endpoint: type) -> str:
    return str(endpoint.__struct_config__.tag)  # type: ignore[attr-defined]  # of all structs


class RankEndpoints(msgspec.Struct, frozen=True, kw_only=True, tag="rank_endpoints"):
    """The endpoints of a rank's neighbours in one epoch."""

    epoch: int
    plans: ChannelEndpoint  # from the core, and back to it
    tokens: list[ChannelEndpoint]  # output rank: to each rank of earlier stages, in order; those: from it
    results: ChannelEndpoint | None = None  # output rank: to the core
    incoming: LinkEndpoint | None = None
    outgoing: list[LinkEndpoint] = []  # to each of `RankConfig.receivers`
    meeting: MeetingEndpoint | None = None  # of the ranks of the stage, if there are several


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of how often processes were started again."""

    stages: list[int] = []  # [num_stages]
    core: int = 0


NO_RESTARTS = Restarts()


class CoreEndpoints(msgspec.Struct, frozen=True, kw_only=True, tag="core_endpoints"):
    """The endpoints at which the core meets the ranks in one epoch."""

    epoch: int
    plans: list[ChannelEndpoint]  # to each rank, stage by stage
    stages: list[int]  # of each rank
    results: ChannelEndpoint  # from the output rank
    restarts: Restarts = Restarts()  # up to this epoch
