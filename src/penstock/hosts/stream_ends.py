"""The ends of streams between hosts, as a host makes them for its processes: one listens, one dials.

`hosts.connections` chooses which of the two hosts listens: one that the other can reach. The direction of the
data has nothing to do with that. The process opens the stream itself (`pipeline.links.stream_opening`),
because the state of TLS cannot be handed over. Its host keeps an eventfd, with which it can end the stream
from outside, even if the other host has fallen silent.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from penstock.bounds import Port, Word
from penstock.hosts.rank_host import BulkNeed, ChannelNeed, LinkNeed, PlanNeed
from penstock.process.endpoints import (
    PLAIN_TEXT,
    AcceptedStream,
    DialledStream,
    StreamChannelHandle,
    StreamLinkHandle,
    StreamPath,
    StreamSecurity,
    StreamWay,
)

StreamNeed = LinkNeed | ChannelNeed | BulkNeed | PlanNeed
NUM_PLAN_MESSAGES = 4096  # far more than plans in flight: a full channel means that the peer has stopped
OPEN_TIMEOUT_S = 3600.0  # the other rank may have to load its weights first


class StreamInvitation(msgspec.Struct, frozen=True, kw_only=True, tag="listens"):
    """The address and port at which one end of a stream listens, for the host that is to dial it."""

    host: Word
    port: Port


class StreamEnd:
    """One end of a stream, a TCP connection between two hosts, as the host of this end holds it; a `HostEnd`.

    Args:
        need: what the stream carries.
        way: how the process at this end opens the stream: it dials, or accepts at a listening socket.
        is_joining: this is the joining end of the connection, from which hidden states and samples go to the
            accepting end. Which end dials does not matter for that.
        security: how the ends prove themselves; the caller keeps and closes its descriptors.
        open_timeout_s: seconds for which the process waits for the other end.

    Attributes:
        endpoint: the value by which the process opens the stream.
        invitation: where this end listens; None if it dials.
    """

    def __init__(
        self,
        need: StreamNeed,
        way: StreamWay,
        *,
        is_joining: bool,
        security: StreamSecurity = PLAIN_TEXT,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        self._end_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.invitation: StreamInvitation | None = None
        path = StreamPath(
            way=way,
            end_fd=self._end_fd,
            security=security,
            open_timeout_s=open_timeout_s,
            precedence="low" if isinstance(need, BulkNeed) else "normal",
        )
        self.endpoint: Any = _endpoint(need, path, is_joining)

    def delivered(self) -> None:
        """Do nothing: the host keeps only the eventfd by which it can end the stream."""

    def end(self) -> None:
        """End the stream at this end, so that the process stops waiting at it; then close this end."""
        if self._end_fd >= 0:
            os.eventfd_write(self._end_fd, 1)
        self.close()

    def close(self) -> None:
        """Close what the host holds of this end; a process that has its endpoint can go on."""
        if self._end_fd >= 0:
            os.close(self._end_fd)
            self._end_fd = -1


class ListeningEnd(StreamEnd):
    """The end of a stream that listens, to be dialled by the other host.

    Args:
        listener: listening socket (`process.link_ports.listen_in_range`), which this end closes.
        host: address at which the other host reaches the listener.
        others: the other arguments of `StreamEnd`.
    """

    def __init__(
        self,
        need: StreamNeed,
        listener: socket.socket,
        host: str,
        *,
        is_joining: bool = False,
        security: StreamSecurity = PLAIN_TEXT,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        self._listener = listener
        way = AcceptedStream(listen_fd=listener.fileno())
        super().__init__(need, way, is_joining=is_joining, security=security, open_timeout_s=open_timeout_s)
        self.invitation = StreamInvitation(host=host, port=listener.getsockname()[1])

    def delivered(self) -> None:
        """Close the host's copy of the listening socket, since the process has its own.

        If the process then dies, the other end is refused, and does not wait in a queue.
        """
        self._listener.close()

    def close(self) -> None:
        self._listener.close()
        super().close()


class DiallingEnd(StreamEnd):
    """The end of a stream that dials the other host.

    Args:
        invitation: where the other end listens.
        own_address: address of this host from which it dials; empty: any.
        others: the other arguments of `StreamEnd`.
    """

    def __init__(
        self,
        need: StreamNeed,
        invitation: StreamInvitation,
        *,
        own_address: str = "",
        is_joining: bool = True,
        security: StreamSecurity = PLAIN_TEXT,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        way = DialledStream(host=invitation.host, port=invitation.port, own_address=own_address)
        super().__init__(need, way, is_joining=is_joining, security=security, open_timeout_s=open_timeout_s)


def _endpoint(need: StreamNeed, path: StreamPath, is_joining: bool) -> StreamLinkHandle | StreamChannelHandle:
    if isinstance(need, LinkNeed):
        return StreamLinkHandle(
            path=path,
            direction="out" if is_joining else "in",
            frame_bytes=need.frame_bytes,
            num_frames=need.num_frames,
        )
    return StreamChannelHandle(path=path, num_messages=_num_messages(need, is_joining))


def _num_messages(need: ChannelNeed | BulkNeed | PlanNeed, is_joining: bool) -> int:
    """Return how many messages this end has room for in each direction."""
    if isinstance(need, ChannelNeed):
        return need.num_messages
    if isinstance(need, BulkNeed):  # the sending end holds one chunk at most: others have not had their turn
        return 1 if is_joining else need.num_chunks
    return NUM_PLAN_MESSAGES
