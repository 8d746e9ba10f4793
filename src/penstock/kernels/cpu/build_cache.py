"""The folder where built kernel libraries are kept between runs, which is shared with no other user.

Called by `compiler`. A library gets its name by one rename when it is whole. The name has its key, size and
sha256, so that a truncated or altered file is noticed. A folder that others could write to is not used,
neither for reading nor for writing: a library that is placed there runs in our name. Does not compile. Never
imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_KEY_DIGITS = 32
_LOCK_NAME = "lock"
_BUILDING = "building-"
_LOCK_POLL_SECONDS = 0.05
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FolderUnusableError(Exception):
    """The cache folder is not there and cannot be made, or others can write to it. The text says which."""


def cache_folder(environ: Mapping[str, str], part: str = "kernels") -> Path:
    """Return `part` in $PENSTOCK_CACHE_DIR, else in $XDG_CACHE_HOME/penstock, else in ~/.cache/penstock.

    A relative $XDG_CACHE_HOME is passed over, as the XDG base directory specification asks. Raises
    `FolderUnusableError` if none of them can be had, since the user has no home.
    """
    own, xdg, home = (environ.get(name, "") for name in ("PENSTOCK_CACHE_DIR", "XDG_CACHE_HOME", "HOME"))
    if own:
        return Path(own).absolute() / part
    if os.path.isabs(xdg):
        return Path(xdg) / "penstock" / part
    if os.path.isabs(home):
        return Path(home) / ".cache" / "penstock" / part
    raise FolderUnusableError("neither PENSTOCK_CACHE_DIR nor HOME is set")


def trusted_folder(folder: Path) -> Path:
    """Return the folder with its links resolved; make it if it is missing.

    Raises `FolderUnusableError` if that fails, or if others can write to the folder.
    """
    try:
        real = Path(os.path.realpath(folder))
        _make(real)
        _check_trust(real)
    except OSError as error:
        raise FolderUnusableError(f"{folder}: {error.strerror}") from error
    return real


class BuildCache:
    """A trusted folder of libraries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> BuildCache:
        """Return the cache at this place, as `trusted_folder`. Raises `FolderUnusableError`."""
        return cls(trusted_folder(folder))

    def find(self, key: str) -> Path | None:
        """Return the library built for this key, or None. One that is not what its name says is removed."""
        for path in sorted(self._folder.glob(f"penstock-{key[:_KEY_DIGITS]}-*.so")):
            if _is_whole(path):
                return path
            _remove(path)
        return None

    @contextmanager
    def locked(self, wait_seconds: float) -> Iterator[None]:
        """Hold the folder's lock, or after the wait go on without it: the lock only saves double work.

        Raises `FolderUnusableError` if the folder cannot be written to.
        """
        try:
            handle = os.open(self._folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FolderUnusableError(f"{self._folder}: {error.strerror}") from error
        try:
            _wait_for_lock(handle, time.monotonic() + wait_seconds)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def workshop(self) -> Iterator[Path]:
        """Yield a directory of ours on the same file system, gone afterwards; raise `FolderUnusableError`."""
        try:
            directory = Path(tempfile.mkdtemp(dir=self._folder, prefix=_BUILDING))
        except OSError as error:
            raise FolderUnusableError(f"{self._folder}: {error.strerror}") from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def adopt(self, key: str, library: Path) -> Path:
        """Move a finished library under its lasting name, in one rename. Raises `FolderUnusableError`."""
        try:
            library.chmod(0o644)
            path = self._folder / f"penstock-{key[:_KEY_DIGITS]}-{_seal(library.read_bytes())}.so"
            os.replace(library, path)
        except OSError as error:
            raise FolderUnusableError(f"{self._folder}: {error.strerror}") from error
        return path

    def clear(self) -> tuple[int, int]:
        """Remove every library and left-over of a build; return the number and the bytes of the libraries."""
        libraries = list(self._folder.glob("penstock-*.so"))
        size = sum(path.lstat().st_size for path in libraries)
        for path in [*libraries, self._folder / _LOCK_NAME]:
            _remove(path)
        for left_over in self._folder.glob(f"{_BUILDING}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        return len(libraries), size


def _make(folder: Path) -> None:
    """Make the folder and its missing parents for this user alone, whatever the umask."""
    if folder.is_dir():
        return
    if folder.exists():
        raise FolderUnusableError(f"{folder} is not a folder")
    _make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _check_trust(folder: Path) -> None:
    """Raise `FolderUnusableError` unless only this user and root can put files in the folder or swap it.

    In a parent with the sticky bit, as /tmp has it, others can neither rename nor remove what is ours.
    """
    trusted_owners = {0, os.geteuid()}
    for directory in (folder, *folder.parents):
        status = directory.stat()
        if status.st_uid not in trusted_owners:
            raise FolderUnusableError(f"{directory} belongs to another user (uid {status.st_uid})")
        is_sticky_parent = directory != folder and status.st_mode & stat.S_ISVTX
        if status.st_mode & _OTHERS_WRITE and not is_sticky_parent:
            raise FolderUnusableError(
                f"others can write to {directory} (mode {stat.S_IMODE(status.st_mode):o})"
            )


def _seal(content: bytes) -> str:
    return f"{len(content)}-{hashlib.sha256(content).hexdigest()[:_KEY_DIGITS]}"


def _is_whole(path: Path) -> bool:
    """Return whether only we can write to the file and its content is what its name says."""
    try:
        status = path.lstat()
        is_ours = status.st_uid in {0, os.geteuid()} and not status.st_mode & _OTHERS_WRITE
        if not stat.S_ISREG(status.st_mode) or not is_ours:
            return False
        return path.stem.split("-", 2)[2] == _seal(path.read_bytes())
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Remove a file if that is possible; in a read-only folder it stays, and is not used."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _wait_for_lock(handle: int, deadline: float) -> None:
    """Take the lock by polling, since a blocking call could not be bounded in time.

    Return without it at the deadline, or on a file system that has no locks.
    """
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:
            return
