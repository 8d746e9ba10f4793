"""The ends of connections between processes of one machine: rings, sockets and memory without file names.

The accepting end owns the descriptors of both ends. A joining end uses the same descriptors, or the handle of
the same socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from penstock.distributed.meeting import close_meeting, create_meeting, end_meeting
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.rank_host import BulkNeed, ChannelNeed, HostEnd, LinkNeed, MeetingNeed, Need, PlanNeed
from penstock.pipeline.links.ring_channel import FRAME_BYTES, create_channel_ring
from penstock.pipeline.links.ring_memory import close_handle, create_ring, end_ring
from penstock.process.endpoints import RingHandle, SocketHandle, SocketListener


class RingEnd:
    """A ring in shared memory between two processes, as their host holds it. Implements `HostEnd`.

    The host keeps the ring open, so that it can end the ring from outside.
    """

    def __init__(self, ring: RingHandle) -> None:
        self.endpoint = self.invitation = ring

    def delivered(self) -> None:
        """Do nothing: the host keeps the ring open."""

    def end(self) -> None:
        end_ring(self.endpoint)
        self.close()

    def close(self) -> None:
        close_handle(self.endpoint)


class MeetingEnd:
    """The shared memory in which the ranks of a stage add up results, as their host holds it; a `HostEnd`.

    The host keeps the memory open, so that it can end the meeting from outside.
    """

    def __init__(self, num_ranks: int) -> None:
        self.endpoint = self.invitation = create_meeting(num_ranks)

    def delivered(self) -> None:
        """Do nothing: the host keeps the memory open."""

    def end(self) -> None:
        end_meeting(self.endpoint)
        self.close()

    def close(self) -> None:
        close_meeting(self.endpoint)


class SocketEnd:
    """A listening local socket without a path: one process accepts at it, others connect; a `HostEnd`."""

    def __init__(self) -> None:
        self._socket = LocalSocket()
        self.endpoint = SocketListener(listen_fd=self._socket.listen_fd)
        self.invitation = SocketHandle(handle_fd=self._socket.handle_fd)

    def delivered(self) -> None:
        self.close()  # if the accepting process dies, connections must be refused and not queued

    def end(self) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()


class JoinedEnd:
    """An end that joins another one on the same host, which owns the descriptors of both; a `HostEnd`."""

    def __init__(self, invitation: msgspec.Struct) -> None:
        self.endpoint = self.invitation = invitation

    def delivered(self) -> None:
        """Do nothing: the end that it has joined does what is needed once processes have their endpoints."""

    def end(self) -> None:
        """Do nothing: the end that it has joined ends the connection."""

    def close(self) -> None:
        """Do nothing: the end that it has joined closes the descriptors."""


def _link(need: LinkNeed) -> RingEnd:
    return RingEnd(create_ring(need.frame_bytes, need.num_frames))


def _channel(need: ChannelNeed) -> RingEnd:
    return RingEnd(create_channel_ring(need.num_messages, need.num_rows))


def _bulk(need: BulkNeed) -> RingEnd:
    return RingEnd(create_ring(FRAME_BYTES, need.num_chunks))


# For each need, the kinds of connections within a machine, best first, and what makes the accepting end.
KINDS: Mapping[type[Need], Mapping[str, Callable[..., HostEnd]]] = {
    LinkNeed: {"ring": _link},
    ChannelNeed: {"ring": _channel},
    BulkNeed: {"ring": _bulk},
    PlanNeed: {"socket": lambda need: SocketEnd()},
    MeetingNeed: {"shared memory": lambda need: MeetingEnd(need.num_ranks)},
}
