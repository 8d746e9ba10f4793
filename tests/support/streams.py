"""Streams over sockets that a test holds in its own hands: what comes, when it ends, and how."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

from carriers import ITEM_BYTES, MAX_TOKENS, WIDTH
from penstock.pipeline.links.frame import frame_bytes
from penstock.process.endpoints import (
    PLAIN_TEXT,
    ConnectedStream,
    StreamChannelHandle,
    StreamLinkHandle,
    StreamPath,
    StreamSecurity,
    StreamSide,
)

FRAME_BYTES = frame_bytes(max_num_tokens=MAX_TOKENS, width=WIDTH, itemsize=ITEM_BYTES, num_tensors=2)
Pair = tuple[socket.socket, socket.socket]


def descriptors() -> set[str]:
    """The numbers of this process' open descriptors."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def unix_pair() -> Pair:
    """Two connected sockets that no network stack joins."""
    return socket.socketpair()


def tcp_pair() -> Pair:
    """Two connected sockets of TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return dialled, accepted


def reset(end: socket.socket) -> None:
    """Close an end of TCP so that the other one is reset."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def end_event(closing: ExitStack) -> int:
    """What a host ends streams with."""
    event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    closing.callback(os.close, event)
    return event


def connected_path(
    taken: socket.socket,
    end_fd: int,
    *,
    side: StreamSide = "accepter",
    security: StreamSecurity = PLAIN_TEXT,
    open_timeout_s: float = 30.0,
) -> StreamPath:
    """Of a socket that is connected already."""
    way = ConnectedStream(stream_fd=taken.fileno(), side=side)
    return StreamPath(way=way, end_fd=end_fd, security=security, open_timeout_s=open_timeout_s)


def link_handle(path: StreamPath, direction: str, num_frames: int = 1) -> StreamLinkHandle:
    return StreamLinkHandle(
        path=path,
        direction=direction,  # type: ignore[arg-type]
        frame_bytes=FRAME_BYTES,
        num_frames=num_frames,
    )


def channel_handle(path: StreamPath, num_messages: int = 16) -> StreamChannelHandle:
    return StreamChannelHandle(path=path, num_messages=num_messages)
