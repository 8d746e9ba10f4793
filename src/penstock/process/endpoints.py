"""The endpoints of an epoch: what a process receives to open its ends of connections to other processes.

An endpoint is one end of a connection, as the host hands it to a process: a value of one of several kinds.
The kind is the tag of the struct, and decides which carrier opens it (`pipeline.links.link_carriers` and
`pipeline.links.channel_carriers`). Hosts make endpoints (`hosts.rank_host`). A field `..._fd` is a file
descriptor; on the way to the process, `process.control` replaces it by a descriptor of that process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from penstock.errors import ProtocolError

Opened = TypeVar("Opened")


class RingHandle(msgspec.Struct, frozen=True, kw_only=True, tag="ring"):
    """A ring in shared memory, as file descriptors; neither the memory nor the eventfds have a name."""

    memory_fd: int
    data_fd: int  # eventfd semaphore: counts frames that are written and not yet read
    space_fd: int  # eventfd semaphore: counts free places for frames
    frame_bytes: int
    num_frames: int

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.memory_fd, self.data_fd, self.space_fd


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """A link between threads, in the memory of their process (`pipeline.links.memory`)."""

    number: int


class SocketListener(msgspec.Struct, frozen=True, kw_only=True, tag="socket_listener"):
    """A local socket that listens, for the end that binds (`hosts.local_socket`)."""

    listen_fd: int


class SocketHandle(msgspec.Struct, frozen=True, kw_only=True, tag="socket_handle"):
    """The file of a local socket, for an end that connects (`hosts.local_socket`)."""

    handle_fd: int


class MeetingHandle(msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory"):
    """The meeting where ranks of a stage add up tensors, as inherited descriptors (`distributed.meeting`)."""

    memory_fd: int
    store_fd: int


StreamSide = Literal["dialler", "accepter"]


class DialledStream(msgspec.Struct, frozen=True, kw_only=True, tag="dialled"):
    """A stream that this process dials.

    Attributes:
        host: the address to dial, of IPv4 or IPv6, or a name.
        own_address: address of this machine from which to dial; empty: any.
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
        side: whether this end has dialled or accepted; it decides which end begins a handshake.
    """

    stream_fd: int
    side: StreamSide


StreamWay = DialledStream | AcceptedStream | ConnectedStream


class PlainText(msgspec.Struct, frozen=True, tag="plain_text"):
    """A stream without encryption or proof of the peer: for measurements within a host, and for tests."""


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
    """A stream in plain text, whose ends first prove that they belong to the epoch (`trust.challenge`).

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
        way: how the stream comes about: dialled, accepted, or connected already.
        end_fd: an eventfd; once it is written the stream is over at this end. Many streams may share it.
        security: how the two ends prove their identity, and whether the bytes are encrypted.
        open_timeout_s: seconds from the opening of this end in which the other end must come; its process
            may still be loading.
        precedence: the bytes of a stream with "low" let those of other streams of the host go first.
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
    """A stand-in for an end that the agent of another host has and hands to its own process (`hosts.agent`).

    The head knows the end by this number; no process gets this value.
    """

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
        openers: the functions that open the endpoints of one seam, by type of endpoint.
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
    """The endpoints at which a rank meets the core and other ranks in one epoch."""

    epoch: int
    plans: ChannelEndpoint  # plans from the core, and reports back to it
    # Samples. Of the output rank: one to each rank of earlier stages, in their order. Of a rank of an earlier
    # stage: the only one, from the output rank. Other ranks have none.
    tokens: list[ChannelEndpoint]
    results: ChannelEndpoint | None = None  # of the output rank alone: to the core
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
    plans: list[ChannelEndpoint]  # one to each rank, stage by stage
    stages: list[int]  # the stage of each rank, in the same order
    results: ChannelEndpoint  # from the output rank
    restarts: Restarts = Restarts()  # of all epochs up to this one
