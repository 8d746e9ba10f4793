"""Brings one file of the hub into the cache: from where an earlier transfer stopped, and checked by its hash.

The bytes that have come are in `blobs/<hash>.incomplete`. The file is renamed to `blobs/<hash>` when it is
whole and has the hash that the hub has announced; with another hash it is removed. A lock keeps two programs
from downloading the same file into the same cache at once. Called by `hub.pulling`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from penstock.errors import HubContentError, HubError, HubUnreachableError
from penstock.hub.client import HubClient, TransferCutError
from penstock.hub.repository import HubFile
from penstock.local_models.hub_cache import INCOMPLETE, CachedRepository

MAX_FRUITLESS = 5  # attempts in a row that bring no byte
PAUSE_S = 1.0
_READ_BYTES = 1 << 20


class Progress(Protocol):
    """Hears how a transfer goes, to show it to the user."""

    def begin(self, file: HubFile, num_bytes: int) -> None:
        """Begin a transfer of which so many bytes are here already."""

    def advance(self, num_bytes: int) -> None:
        """Add bytes that are here now; below 0: bytes that are dropped, since the transfer begins again."""

    def end(self) -> None:
        """End the transfer: the file is here and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The place on the hub that the files of one pull come from, and the cache that they go to.

    Attributes:
        name: name of the model on the hub.
        commit: the commit whose files are wanted.
        cache: the model's folder in the cache.
        pause: waits so many seconds, before a transfer that was cut is tried again.
    """

    client: HubClient
    name: str
    commit: str
    cache: CachedRepository
    pause: Callable[[float], None]


def bytes_here(cache: CachedRepository, file: HubFile) -> int:
    """Return how many bytes of a file are in the cache, so that they need not come again."""
    if is_here(cache, file):
        return file.size
    try:
        return min(_partial(cache, file).stat().st_size, file.size)
    except OSError:
        return 0


def is_here(cache: CachedRepository, file: HubFile) -> bool:
    """Return whether the cache has the whole file."""
    try:
        return (cache.blobs / file.blob).stat().st_size == file.size
    except OSError:
        return False


def transfer(source: Source, file: HubFile, progress: Progress) -> None:
    """Bring a file into the cache, unless it is there.

    Raises:
        HubContentError: its size or hash is not what the hub has announced; its bytes are removed.
        HubUnreachableError: no byte came in `MAX_FRUITLESS` attempts in a row; bytes that came before stay
            for the next transfer.
        HubError: the hub does not give the file, or another program is downloading it.
        OSError: the file cannot be read or written.
    """
    with _locked(source.cache, file):
        if is_here(source.cache, file):
            return
        partial = _partial(source.cache, file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("a+b") as target:
                _Transfer(source, file, target, progress).run()
        except HubContentError:
            partial.unlink()
            raise
        os.replace(partial, source.cache.blobs / file.blob)
        progress.end()


class _Transfer:
    """One file on its way. The hash is updated with each piece, so that no byte is read again at the end."""

    def __init__(self, source: Source, file: HubFile, target: BinaryIO, progress: Progress) -> None:
        self._source = source
        self._file = file
        self._target = target
        self._progress = progress
        self._hash = _new_hash(file)
        self._num_bytes = 0

    def run(self) -> None:
        self._take_up()
        self._progress.begin(self._file, self._num_bytes)
        num_fruitless = 0
        while self._num_bytes < self._file.size:
            before = self._num_bytes
            try:
                self._receive()
            except TransferCutError as error:
                num_fruitless = 0 if self._num_bytes > before else num_fruitless + 1
                if num_fruitless == MAX_FRUITLESS:
                    raise _no_bytes(self._source.name, self._file, error) from error
                self._source.pause(PAUSE_S)
        self._check()

    def _take_up(self) -> None:
        """Hash the bytes that an earlier transfer has left. If they are more than the file has, drop them."""
        self._target.seek(0)
        for chunk in iter(lambda: self._target.read(_READ_BYTES), b""):
            self._hash.update(chunk)
            self._num_bytes += len(chunk)
        if self._num_bytes > self._file.size:
            self._begin_again()

    def _begin_again(self) -> None:
        self._target.truncate(0)
        self._progress.advance(-self._num_bytes)
        self._hash, self._num_bytes = _new_hash(self._file), 0

    def _receive(self) -> None:
        source = self._source
        with source.client.content(source.name, source.commit, self._file, self._num_bytes) as (
            begin,
            chunks,
        ):
            if begin != self._num_bytes:
                self._begin_again()
            for chunk in chunks:
                self._write(chunk)
        if self._num_bytes < self._file.size:
            raise TransferCutError(f"received {self._num_bytes} of {self._file.size} bytes")

    def _write(self, chunk: bytes) -> None:
        if self._num_bytes + len(chunk) > self._file.size:
            raise _differs(self._source.name, self._file, f"{self._file.size} bytes", "more")
        self._target.write(chunk)
        self._hash.update(chunk)
        self._num_bytes += len(chunk)
        self._progress.advance(len(chunk))

    def _check(self) -> None:
        if self._hash.hexdigest() != self._file.blob:
            raise _differs(self._source.name, self._file, self._file.blob, self._hash.hexdigest())


def _new_hash(file: HubFile) -> hashlib._Hash:
    """Return a hash to update with the file's bytes: SHA-256, or SHA-1 that begins with Git's header."""
    if file.is_large:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _partial(cache: CachedRepository, file: HubFile) -> Path:
    return cache.blobs / (file.blob + INCOMPLETE)


@contextmanager
def _locked(cache: CachedRepository, file: HubFile) -> Iterator[None]:
    """Hold the lock on a file, which huggingface_hub takes too. Raises `HubError` if it is taken."""
    cache.lock_directory.mkdir(parents=True, exist_ok=True)
    with (cache.lock_directory / f"{file.blob}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HubError(
                f"another program is downloading {file.path} of {cache.name}.",
                remedy="Wait until it is done, and run the command again.",
                code="hub_busy",
            ) from error
        yield


def _differs(name: str, file: HubFile, expected: str, found: str) -> HubContentError:
    return HubContentError(
        f"{name}: {file.path}: expected {expected}, found {found}; the download was removed.",
        remedy="Run the command again. If it happens again, a mirror or proxy changes files.",
    )


def _no_bytes(name: str, file: HubFile, cut: TransferCutError) -> HubUnreachableError:
    return HubUnreachableError(
        f"{file.path} of {name} could not be downloaded in {MAX_FRUITLESS} attempts: {cut}.",
        remedy="Check the network. The same command continues where it stopped.",
    )
