"""Lets a `penstock worker` that starts soon after one was killed take over the killed one's spare process.

    spare                                              the next worker
    listens at a path, in a directory of its user
    its worker is gone: it waits for some seconds
                                            ◀──        connects, and sends the descriptors that a parent gives
    tells what it is                        ──▶        uses the spare as if it had started it

The spare has imported modules, and has no weights and no part in any epoch. Nothing that the first worker
has told it matters to the next one. Both sides refuse processes of other users. Used by `rank.spare` and
`hosts.local`.
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

WAIT_S = 10.0  # so long a spare whose worker is gone waits for the next worker
ANSWER_S = 0.5  # so long either side waits for a message of the other
_NUM_DESCRIPTORS = 3
_MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as `SO_PEERCRED` gives them


class SpareSelf(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a spare tells of itself.

    Attributes:
        threads: the most threads that the rank may have which the spare becomes.
        own_bytes: as in `process.child.Warm`.
    """

    threads: int
    own_bytes: int


class NewParent(NamedTuple):
    """The descriptors that a parent gives to a process; the owner of this value closes them.

    Attributes:
        control_fd: the child's end of a control socket (`process.control`).
        status_fd: the pipe for status lines (`process.child`).
        output_fd: where standard output and standard error go.
    """

    control_fd: int
    status_fd: int
    output_fd: int


class SuccessorDoor:
    """The socket where a spare waits for the next worker.

    Args:
        path: path of the socket; a file that is there is replaced.
        clock: monotonic seconds.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _short_name(path) as name:
            path.unlink(missing_ok=True)
            self._listener.bind(name)
        self._listener.listen(1)

    def await_parent(self, own: SpareSelf, seconds: float = WAIT_S) -> NewParent | None:
        """Wait for the next worker, tell it about this spare, and return the descriptors that it has given.

        Args:
            own: what the worker is told about this spare.
            seconds: how long to wait; None is returned if no worker has come by then.
        """
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
                    except OSError:  # that worker has gone already
                        _close_all(parent)
                    else:
                        return parent
        return None

    def close(self) -> None:
        """Close the socket, so that this process cannot be taken over any more."""
        self._listener.close()


class NoSuccessor:
    """The null `SuccessorDoor`, for a spare that ends with its parent: nobody takes it over."""

    def await_parent(self, own: SpareSelf) -> None:
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def take_over(path: Path, parent: NewParent) -> tuple[int, SpareSelf]:
    """Become the parent of a spare process that waits at a path; return its process number, and its facts.

    Args:
        path: path of the socket where the spare waits.
        parent: descriptors that the spare gets copies of; the caller keeps and closes its own.

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
    """Report and print to a new parent from now on, and return the reader of that parent's orders."""
    status.move_to(parent.status_fd)
    for output in (sys.stdout, sys.stderr):
        os.dup2(parent.output_fd, output.fileno())
    os.close(parent.status_fd)
    os.close(parent.output_fd)
    return ControlReader(parent.control_fd)


def end_with(fd: int) -> None:
    """End this process when the other end of a socket is closed.

    A parent that did not start this process holds the other end. The kernel would end this process only with
    the parent that started it.
    """
    own = os.dup(fd)

    def watch() -> None:
        poll = select.poll()
        poll.register(own, 0)  # a hang-up is told in any case
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _receive_parent(connection: socket.socket) -> NewParent | None:
    """Return the descriptors from the next worker; None if the worker is gone, or sends something else."""
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
    """Return the number of the process at the other end; raise `PermissionError` if its user is another."""
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
