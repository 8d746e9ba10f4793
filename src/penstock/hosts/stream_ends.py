"""The ends of streams between hosts, as a host makes them for its processes: one listens, one dials.

The maker of the ends chooses which of two hosts listens. That has nothing to do with the direction of what
the stream carries: of two ranks the one that can be reached is dialled. The process opens the stream itself
(`pipeline.links.stream_opening`), because the state of TLS cannot be handed over. Its host keeps an eventfd,
with which it ends the stream from outside, also where the other host has fallen silent.
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
NUM_PLAN_MESSAGES = 4096  # far above any depth, so that a full channel means a peer that has stopped
OPEN_TIMEOUT_S = 3600.0  # the other rank may have to load its weights first


class StreamInvitation(msgspec.Struct, frozen=True, kw_only=True, tag="listens"):
    """The place where a stream is accepted, for the host of the other end."""

    host: Word
    port: Port


class StreamEnd:
    """One end of a stream between hosts; a `HostEnd`.

    Args:
        need: what the stream is for.
        is_joining: of the connection that was asked for: hidden states and samples go from the joining end to
            the accepting one.
        security: of the endpoint; its descriptors stay the caller's.

    Attributes:
        invitation: of an end that listens; None: it dials.
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
        """Do nothing: the process has what it needs, and the host keeps what ends the stream."""

    def end(self) -> None:
        """See `HostEnd.end`."""
        if self._end_fd >= 0:
            os.eventfd_write(self._end_fd, 1)
        self.close()

    def close(self) -> None:
        """See `HostEnd.close`."""
        if self._end_fd >= 0:
            os.close(self._end_fd)
            self._end_fd = -1


class ListeningEnd(StreamEnd):
    """The end that is dialled.

    Args:
        listener: of `process.link_ports.listen_in_range`; belongs to the end from now on.
        host: under which the other host reaches it.
        others: as for `StreamEnd`.
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
        """Stop listening: where the process has died a dialler must be refused, and not queued."""
        self._listener.close()

    def close(self) -> None:
        self._listener.close()
        super().close()


class DiallingEnd(StreamEnd):
    """The end that dials where it was invited to; arguments as for `StreamEnd`.

    Args:
        own_address: from which it dials; empty: any.
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
    if isinstance(need, BulkNeed):  # what waits at the sending end has had its turn: one chunk at most
        return 1 if is_joining else need.num_chunks
    return NUM_PLAN_MESSAGES
