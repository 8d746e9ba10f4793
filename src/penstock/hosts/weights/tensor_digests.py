"""Digests of whole tensors in files, remembered as long as the files do not change.

Head and worker compare tensors by their digests. To compute a digest, the whole tensor must be read from the
disk. The digests are therefore kept in a directory, by the state of the file: device, inode, size and time of
the last change. Digests reveal damage, but not an attack; the hosts that may send weights are a matter of
`penstock.trust`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import msgspec
import xxhash

from penstock.errors import CheckpointError, UsageError, unreadable
from penstock.trust.private_files import replace_private
from penstock.weights.checkpoint import TensorEntry

READ_BYTES = 1 << 20

FileState = tuple[int, int, int, int]
Check = Callable[[], None]  # raises an error if the work was cancelled
_Known = dict[str, bytes]  # digests by the names of tensors


def go_on() -> None:
    """Do nothing; takes the place of a `Check` for work that is never cancelled."""


def file_state(file: FileIO) -> FileState:
    """Return device, inode, size and time of change of an open file, to notice a change of its content."""
    return state_of(os.fstat(file.fileno()))


def state_of(status: os.stat_result) -> FileState:
    """Return device, inode, size and time of change of a file, to notice a change of its content."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_pieces(entry: TensorEntry, file: FileIO, memory: memoryview) -> Iterator[int]:
    """Read a tensor piece by piece into the beginning of `memory`; yield the size of each piece.

    Raises:
        CheckpointError: the file ends too early, or cannot be read.
    """
    position = entry.begin
    try:
        file.seek(position)
        while position < entry.end:
            count = file.readinto(memory[: entry.end - position])
            if not count:
                raise CheckpointError(
                    file=entry.path.name,
                    tensor=entry.name,
                    expected=f"{entry.end - entry.begin} bytes",
                    found=f"the end of the file after {position - entry.begin}",
                )
            position += count
            yield count
    except OSError as error:
        raise unreadable(entry.path.name, error, tensor=entry.name) from error


@contextlib.contextmanager
def opened(entry: TensorEntry) -> Iterator[FileIO]:
    """Open the file of a tensor for the block of a `with`; raise `CheckpointError` if that fails."""
    try:
        file = open(entry.path, "rb", buffering=0)  # noqa: SIM115  # closed below
    except OSError as error:
        raise unreadable(entry.path.name, error, tensor=entry.name) from error
    with file:
        yield file


class TensorDigests:
    """The digests (XXH3-128 hashes) of tensors that this host knows. Thread-safe.

    Args:
        directory: a private directory in which they are kept; the caller has made it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[FileState, _Known] = {}
        self._changed: set[FileState] = set()
        self._mutex = threading.Lock()

    def has(self, entry: TensorEntry) -> bool:
        """Return whether the digest of a tensor is known; raises `CheckpointError`."""
        with opened(entry) as file:
            return entry.name in self._of_file(file_state(file))

    def of(self, entry: TensorEntry, check: Check = go_on) -> bytes:
        """Return the digest of a tensor; read the tensor if the digest is not known.

        Args:
            check: called between the pieces that are read; raises if the work was cancelled.
        """
        with opened(entry) as file:
            state = file_state(file)
            found = self._of_file(state).get(entry.name, b"")
            if found:
                return found
            digest = xxhash.xxh3_128()
            memory = memoryview(bytearray(READ_BYTES))
            check()
            for size in read_pieces(entry, file, memory):
                digest.update(memory[:size])
                check()
            self.note(entry, file, state, digest.digest())
            return digest.digest()

    def note(self, entry: TensorEntry, file: FileIO, state: FileState, digest: bytes) -> None:
        """Remember the digest of a tensor that was read, unless its file has changed meanwhile.

        Args:
            file: the open file of the tensor.
            state: state of the file before the tensor was read.
        """
        if file_state(file) == state:
            known = self._of_file(state)
            with self._mutex:
                known[entry.name] = digest
                self._changed.add(state)

    def keep(self) -> None:
        """Write the digests that are new to the disk, for the next start; a failure is not an error."""
        with self._mutex:
            changed = {state: dict(self._known[state]) for state in self._changed}
            self._changed.clear()
        for state, known in changed.items():
            with contextlib.suppress(UsageError):
                replace_private(self._path(state), msgspec.msgpack.encode(known))

    def _of_file(self, state: FileState) -> _Known:
        with self._mutex:
            if state not in self._known:
                self._known[state] = self._read(state)
            return self._known[state]

    def _read(self, state: FileState) -> _Known:
        try:
            return msgspec.msgpack.decode(self._path(state).read_bytes(), type=_Known)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def _path(self, state: FileState) -> Path:
        return self._directory / "-".join(f"{number:x}" for number in state)
