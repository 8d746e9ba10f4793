"""A spare process whose worker is gone, and the worker that takes it over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes import FakeClock
from penstock.process import successor
from penstock.process.successor import NewParent, NoSuccessor, SpareSelf, SuccessorDoor, take_over

OWN = SpareSelf(threads=3, own_bytes=70)
WAIT_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Longer than the name of a socket may be."""
    directory = tmp_path / ("d" * 100)
    directory.mkdir()
    return directory / "desk.spare"


@contextmanager
def parent_given() -> Iterator[tuple[NewParent, list[int]]]:
    """Pipes in place of what a parent gives: the ends for the spare, and those that are kept."""
    pairs = [os.pipe() for _ in range(3)]
    yield NewParent(*(writer for _, writer in pairs)), [reader for reader, _ in pairs]
    for pair in pairs:
        for fd in pair:
            os.close(fd)


@pytest.fixture(autouse=True)
def patient_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side gives up the other one, however busy the machine is."""
    monkeypatch.setattr(successor, "ANSWER_S", WAIT_S)


class Waiting:
    """A spare that waits for the next worker, in a thread."""

    def __init__(self, path: Path, seconds: float = WAIT_S) -> None:
        self._door = SuccessorDoor(path)
        self.found: list[NewParent | None] = []
        self._thread = threading.Thread(
            target=lambda: self.found.append(self._door.await_parent(OWN, seconds))
        )
        self._thread.start()

    def end(self) -> NewParent | None:
        self._thread.join(WAIT_S)
        self._door.close()
        return self.found[0]


def test_r15_the_next_worker_has_the_spare_with_descriptors_of_its_own(path: Path) -> None:
    waiting = Waiting(path)
    with parent_given() as (given, kept):
        assert take_over(path, given) == (os.getpid(), OWN)
        taken = waiting.end()
        assert taken is not None
        for number, (fd, reader) in enumerate(zip(taken, kept, strict=True)):
            os.write(fd, bytes([number]))
            assert os.read(reader, 10) == bytes([number])
            assert not os.get_inheritable(fd)
            os.close(fd)


def test_r15_where_no_spare_waits_there_is_none_to_take_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(successor, "ANSWER_S", 0.01)
    with parent_given() as (given, _):
        with pytest.raises(FileNotFoundError):
            take_over(path, given)
        door = SuccessorDoor(path)
        with pytest.raises(TimeoutError):  # its worker lives
            take_over(path, given)
        door.close()
        with pytest.raises(ConnectionRefusedError):  # it has ended
            take_over(path, given)


def test_r15_who_has_given_up_or_gives_too_little_is_not_followed(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    name = f"/proc/self/fd/{directory}/{path.name}"
    before = set(os.listdir("/proc/self/fd"))
    waiting = Waiting(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
        gone.connect(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as poor:
        poor.connect(name)
        socket.send_fds(poor, [b"parent"], [0])
        assert poor.recv(10) == b"", "it is sent away"
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1, "where it listens"
    os.close(directory)
    with parent_given() as (given, _):
        assert take_over(path, given)[1] == OWN
        taken = waiting.end()
        assert taken is not None
        for fd in taken:
            os.close(fd)


def test_a_spare_that_nobody_takes_over_waits_no_longer_than_it_may(path: Path) -> None:
    assert Waiting(path, 0.01).end() is None
    door = SuccessorDoor(path, FakeClock())
    assert door.await_parent(OWN, 0.0) is None
    door.close()
    assert NoSuccessor().await_parent(OWN) is None


def test_r15_a_process_of_another_user_is_not_spoken_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = SuccessorDoor(path)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with parent_given() as (given, _), pytest.raises(PermissionError, match="belongs to another user"):
        take_over(path, given)
    door.close()


def test_r15_a_process_ends_with_the_parent_that_has_taken_it_over() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"import time; from penstock.process.successor import end_with; end_with({theirs.fileno()}); "
    program += "print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
    )
    theirs.close()
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert process.poll() is None
    ours.close()
    assert process.wait(WAIT_S) == -9
    process.stdout.close()
