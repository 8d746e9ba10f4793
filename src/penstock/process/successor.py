"""Lets the next worker on a host take over the spare process that a killed worker has left behind.

    spare                                              the next worker
    listens at a path, in a directory of its user
    its worker is gone: it waits for some seconds
                                            ◀──        connects, and sends the descriptors that a parent gives
    what it is                              ──▶        has it as if it had started it

A spare has no weights and no part in anything, so that nothing of the first worker is left in it but its
imports. Only processes of the same user are spoken with. Used by `rank.spare` and `hosts.local`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.process.child import StatusWriter
from penstock.process.control import ControlReader

WAIT_S = 10.0  # of a spare whose worker is gone: for whoever starts the worker again
ANSWER_S = 0.5  # for either side to say its word
_NUM_DESCRIPTORS = 3
_MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as `SO_PEERCRED` gives them


class SpareSelf(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a spare tells of itself.

    Attributes:
        threads: the most threads of a rank that it can become.
        own_bytes: as in `process.child.Warm`.
    """

    threads: int
    own_bytes: int


class NewParent(NamedTuple):
    """The descriptors that a parent gives; they belong to the holder of this value."""

    control_fd: int
    status_fd: int
    output_fd: int


class SuccessorDoor:
    """The socket where a spare waits for the next worker.

    Args:
        path: path of the socket; a file that is there is replaced.
        clock: monotonic seconds.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _short_name(path) as name:
            path.unlink(missing_ok=True)
            self._listener.bind(name)
        self._listener.listen(1)

    def await_parent(self, own: SpareSelf, seconds: float = WAIT_S) -> NewParent | None:
        """Wait for the next worker; None if there is none in this time."""
        deadline = self._clock() + seconds
        while (left_s := deadline - self._clock()) > 0:
            self._listener.settimeout(left_s)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                break
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_S)
                parent = _receive_parent(connection)
                if parent is not None:
                    try:
                        connection.send(msgspec.json.encode(own))
                    except OSError:  # nobody waits for it any more
                        _close_all(parent)
                    else:
                        return parent
        return None

    def close(self) -> None:
        """Close the socket, so that this process cannot be taken over any more."""
        self._listener.close()


class NoSuccessor:
    """The door of a spare that ends with its parent: there is none."""

    def await_parent(self, own: SpareSelf) -> None:
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def take_over(path: Path, parent: NewParent) -> tuple[int, SpareSelf]:
    """Become the parent of a spare process that waits at a path; return its process number, and its facts.

    Args:
        parent: descriptors that the spare gets; they stay the caller's.

    Raises:
        OSError: no spare waits there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, _short_name(path) as name:
        connection.settimeout(ANSWER_S)
        connection.connect(name)
        pid = _require_own_user(connection)
        socket.send_fds(connection, [b"parent"], parent)
        answer = connection.recv(_MAX_BYTES)
        try:
            return pid, msgspec.json.decode(answer, type=SpareSelf)
        except msgspec.MsgspecError as error:
            raise ConnectionAbortedError("the spare process did not identify itself") from error


def follow(parent: NewParent, status: StatusWriter) -> ControlReader:
    """Report and print to another parent from now on; return the reader of its orders."""
    status.move_to(parent.status_fd)
    for output in (sys.stdout, sys.stderr):
        os.dup2(parent.output_fd, output.fileno())
    os.close(parent.status_fd)
    os.close(parent.output_fd)
    return ControlReader(parent.control_fd)


def end_with(fd: int) -> None:
    """End this process when the other end of a socket is closed.

    A parent that did not start this process holds that end.
    """
    own = os.dup(fd)

    def watch() -> None:
        poll = select.poll()
        poll.register(own, 0)  # a hang-up is told in any case
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _receive_parent(connection: socket.socket) -> NewParent | None:
    """Return the descriptors from the next worker; None if it is gone, or sends something else."""
    _require_own_user(connection)
    _, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, _NUM_DESCRIPTORS)
    if len(descriptors) != _NUM_DESCRIPTORS:
        _close_all(descriptors)
        return None
    for fd in descriptors:
        os.set_inheritable(fd, False)
    return NewParent(*descriptors)


def _close_all(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _require_own_user(connection: socket.socket) -> int:
    """Return the number of the process at the other end; raises `PermissionError` for one of another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.getuid():
        raise PermissionError(f"process {pid} belongs to another user")
    return int(pid)


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """Yield a name of the path that is short enough for a socket, however long the path is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
