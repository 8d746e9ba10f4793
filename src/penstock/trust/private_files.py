"""The files that only their owner may read: written whole or not at all, refused if others can read them.

Keys, tokens and the list of joined hosts are kept in such files, in a directory with mode 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import UsageError

MAX_BYTES = 1 << 20  # of one file
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_directory(path: Path) -> None:
    """Make a directory with mode 0700, unless it is there.

    Raises:
        UsageError: the directory belongs to another user, other users may enter it, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise UsageError(f"the directory {path} cannot be used: {error.strerror}.") from error
    _require_own(path, status, f"chmod 700 {path}")


def read_private(path: Path) -> bytes:
    """Return the content of a private file.

    Raises:
        FileNotFoundError: the file does not exist.
        UsageError: other users may read the file, it belongs to another user, it is too long, it is not a
            regular file, or its disk does not give it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        status = os.fstat(handle)  # of the open file: the name may stand for another file by now
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file.")
        _require_own(path, status, f"chmod 600 {path}")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(handle)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES} bytes, too many for a file of this kind.")
    return content


def create_private(path: Path, content: bytes) -> bool:
    """Write a private file, unless a file of this name exists.

    The name appears only when the file has the whole content. If two processes write, one of them wins.

    Returns:
        Whether the file has this content; False: a file of this name existed.

    Raises:
        UsageError: the file cannot be written.
    """
    with _written_beside(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


def replace_private(path: Path, content: bytes) -> None:
    """Write a private file in place of an older file, if there is one.

    Raises:
        UsageError: the file cannot be written; an older file is then unchanged.
    """
    with _written_beside(path, content) as temporary:
        os.replace(temporary, path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock in the `with` block, which keeps out other processes and other threads.

    Args:
        path: path of the lock's file, which is made if it does not exist.

    Raises:
        UsageError: the file of the lock cannot be made, or its file system has no locks.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}.") from error
    try:
        _lock(handle, path)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise UsageError(f"{path} cannot be locked: {error.strerror}.") from error


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes) -> Iterator[Path]:
    """Write a temporary file in the directory of `path`; it is deleted afterwards, unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def _sync_directory(path: Path) -> None:
    """Make a new name in a directory survive a loss of power."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_own(path: Path, status: os.stat_result, remedy: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{path} belongs to another user.", remedy="Use a path of your own.")
    if status.st_mode & _OTHERS:
        raise UsageError(
            f"other users have access to {path} (mode {stat.S_IMODE(status.st_mode):04o}), so its secrets "
            "may be known.",
            remedy=f"If you trust them, run `{remedy}`; otherwise delete it, and a new one is made.",
        )
