"""The private directories of running processes: a process that uses one holds its lock.

A process that is killed deletes nothing, but its lock goes with it: by that the next process knows that
the directory is not used any more, and deletes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from penstock.errors import UsageError
from penstock.trust.private_files import make_private_directory


class HeldDirectory:
    """A private directory, kept from `delete_unheld` until `release`. Several processes may hold it.

    What an earlier holder of the name has left in it is still there.

    Args:
        path: made if it is not there.

    Raises:
        UsageError: it cannot be used, or others may enter it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = _held(path)

    def delete(self) -> None:
        """Delete it with all that is in it, and release it. May be called twice."""
        if self._handle >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave the directory as it is, to the next holder. May be called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def delete_unheld(parent: Path) -> None:
    """Delete all directories in a directory that no process holds.

    On a file system without locks nothing is deleted.
    """
    for path in parent.iterdir():
        with contextlib.suppress(OSError):
            handle = _opened(path)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _held(path: Path) -> int:
    """Return an open directory with a lock on it, which is still the one of this name."""
    while True:
        make_private_directory(path)
        try:
            handle = _opened(path)
        except FileNotFoundError:
            continue  # it has been deleted since it was made
        except OSError as error:
            raise UsageError(f"the directory {path} cannot be used: {error.strerror}.") from error
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_still(path, handle):
            return handle
        os.close(handle)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_still(path: Path, handle: int) -> bool:
    """Return whether the open directory has this name now."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False
