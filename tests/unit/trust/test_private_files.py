"""Private files: whole or not there, and never with rights of others."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.trust import private_files
from penstock.trust.private_files import (
    create_private,
    locked,
    make_private_directory,
    read_private,
    replace_private,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_r15_a_private_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_directory(tmp_path / "state")
        create_private(tmp_path / "state" / "key", b"secret")
        replace_private(tmp_path / "state" / "book", b"names")
    finally:
        os.umask(before)
    assert mode(tmp_path / "state") == 0o700
    assert mode(tmp_path / "state" / "key") == mode(tmp_path / "state" / "book") == 0o600


def test_of_two_that_create_one_wins_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert create_private(path, b"first")
    assert not create_private(path, b"second")
    assert read_private(path) == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_r15_what_others_may_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_private(path, b"secret")
    for bits in (0o640, 0o604, 0o620):
        path.chmod(bits)
        with pytest.raises(UsageError, match="other users have access") as caught:
            read_private(path)
        assert f"chmod 600 {path}" in caught.value.remedy


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="other users have access"):
        make_private_directory(tmp_path / "state")


def test_what_is_not_a_file_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        read_private(tmp_path / "pipe")
    with pytest.raises(UsageError):
        read_private(tmp_path)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    create_private(tmp_path / "key", b"x" * (private_files.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="more than"):
        read_private(tmp_path / "key")


def test_a_file_that_opens_but_cannot_be_read_is_refused() -> None:
    memory = Path("/proc/self/mem")  # its first page is not mapped, so a read ends as on a failing disk
    with pytest.raises(UsageError, match=r"/proc/self/mem cannot be read: Input/output error\."):
        read_private(memory)


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(private_files.fcntl, "flock", no_locks)
    with pytest.raises(UsageError, match="cannot be locked: No locks"), locked(tmp_path / "lock"):
        raise AssertionError("the block must not begin")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book"
    replace_private(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_files.os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        replace_private(path, b"new")
    assert read_private(path) == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_lock_keeps_others_out(tmp_path: Path) -> None:
    inside, order = threading.Event(), []

    def second() -> None:
        inside.wait()
        with locked(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with locked(tmp_path / "lock"):
        inside.set()
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
