"""The private directories of running processes: a process that uses a directory holds a lock on it.

A process that is killed deletes nothing, but its lock ends with it. The next process finds the directory
without a lock, and deletes it.
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
    """A private directory that `delete_unheld` does not delete until `release`.

    Several processes may hold it. What an earlier holder has left in it is still there.

    Args:
        path: path of the directory, which is made if it does not exist.

    Raises:
        UsageError: the directory cannot be used, or other users may enter it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = _held(path)

    def delete(self) -> None:
        """Delete the directory with all that is in it, and release it. May be called twice."""
        if self._handle >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock, and leave the directory as it is. May be called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def delete_unheld(parent: Path) -> None:
    """Delete all subdirectories of `parent` that no process holds.

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
    """Return a descriptor of the directory, with a lock on it; the directory is made if need be."""
    while True:
        make_private_directory(path)
        try:
            handle = _opened(path)
        except FileNotFoundError:
            continue  # another process has deleted it since it was made
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
    """Return whether the path still names the open directory."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False
