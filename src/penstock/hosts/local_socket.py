"""The local sockets of the supervisor, which have no name in the file system.

A Unix socket needs a path only so that others can connect to it. A `LocalSocket` is bound in a fresh 0700
directory and keeps two descriptors: the listening socket, and an `O_PATH` handle of the socket file. Path and
directory are removed at once, before any other process is told of the socket. Processes connect through
`/proc/.../fd/...`, which leads to the same inode and is open to the same user only. Whatever is killed from
then on, there is nothing to clean up. Processes may connect in any order, because the socket listens from the
start.

The supervisor makes these sockets and hands the descriptors to its children.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

from penstock.pipeline.links.plan_channel import bind_address, connect_address

BACKLOG = 64


@contextlib.contextmanager
def _passing_directory() -> Iterator[str]:
    """Yield a path for a socket in a directory of our own; both are gone afterwards.

    The path leads through a descriptor of the directory, because socket paths may have 107 bytes at most.
    """
    directory = tempfile.mkdtemp(prefix="penstock-")  # mode 0700
    try:
        descriptor = os.open(directory, os.O_PATH)
        try:
            yield f"/proc/self/fd/{descriptor}/socket"
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink("socket", dir_fd=descriptor)
            os.close(descriptor)
    finally:
        os.rmdir(directory)


class LocalSocket:
    """A listening Unix socket whose path is removed; others connect through a descriptor of its file."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._handle = -1
        with _passing_directory() as path:
            self._listener.bind(path)
            self._listener.listen(BACKLOG)
            self._handle = os.open(path, os.O_PATH)

    @property
    def listen_fd(self) -> int:
        """The descriptor of the listening socket, for the child that accepts connections at it."""
        return self._listener.fileno()

    @property
    def handle_fd(self) -> int:
        """The descriptor of the socket's file, for each child that connects."""
        return self._handle

    @property
    def bind_address(self) -> str:
        return bind_address(self.listen_fd)

    @property
    def connect_address(self) -> str:
        """The address at which a process that has inherited `handle_fd` connects."""
        return connect_address(self._handle)

    def connect_address_from_outside(self) -> str:
        """Return the address to which another process of the same user connects, without `handle_fd`.

        It is valid while this process lives and has not called `close`.
        """
        return f"ipc:///proc/{os.getpid()}/fd/{self._handle}"

    def close_listener(self) -> None:
        """Close the listening socket here, once the child has it.

        If the child then dies, its clients are refused, and do not wait in a queue.
        """
        self._listener.close()

    def close(self) -> None:
        self.close_listener()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
