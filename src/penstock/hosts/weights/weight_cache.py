"""Keeps weights that a worker has fetched, in files that are named by their content.

    DIRECTORY/tensors/SHAPES-CONTENT.safetensors   a group of tensors (`hosts.weights.needed_tensors`)
    DIRECTORY/files/CONTENT                        a small file, such as a config.json
    DIRECTORY/models/CONTENT/                      a view for a rank: links to all that it reads, and an index
    DIRECTORY/partial/                             files that are being written

A file gets its name once its content is verified and on the disk. When a worker uses it for the first time,
the whole file is read and compared with its name; a damaged file is deleted. Several workers may share a
directory: each writes files of its own, and a name appears only with the whole file. Partial files that no
worker writes any more are deleted. No part of a name comes from the head.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import xxhash

from penstock.errors import PeerError, PenstockError
from penstock.gguf.tensor_places import INDEX_SUFFIX, TensorPlace, index_content
from penstock.hosts.weights.needed_tensors import TensorGroup, num_bytes
from penstock.hosts.weights.side_threads import begin_aside
from penstock.hosts.weights.small_files import first_header
from penstock.hosts.weights.tensor_digests import READ_BYTES, Check, FileState, file_state
from penstock.trust.held_directories import HeldDirectory, delete_unheld
from penstock.trust.private_files import make_private_directory
from penstock.weights.checkpoint import INDEX_FILE, TensorEntry

CLOSE_S = 1.0  # so long `close` tries to delete partial files; the next worker deletes what is left
SPARE_BYTES = 64 << 20  # so much of a disk is left free for others
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SUFFIX = ".safetensors"


class _Index(NamedTuple):
    """The file of a view that says where tensors are."""

    name: str
    content: bytes


class WeightCache:
    """A directory of fetched weights. Thread-safe.

    Args:
        directory: a private directory, which is made if it does not exist.

    Raises:
        UsageError: the directory cannot be used, or other users may enter it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._verified: dict[Path, FileState] = {}  # by file: its state when its content was verified
        make_private_directory(directory)
        for name in ("tensors", "files", "models", "partial", "digests"):
            make_private_directory(directory / name)
        delete_unheld(directory / "partial")
        self._held = HeldDirectory(directory / "partial" / secrets.token_hex(16))
        self._partial = self._held.path

    @property
    def digests(self) -> Path:
        """The directory in which the digests of local copies are kept (`hosts.weights.tensor_digests`)."""
        return self._directory / "digests"

    def close(self) -> None:
        """Delete the files that are not finished. May be called twice."""
        wait([begin_aside(self._held.delete, "weights cache")], CLOSE_S)
        self._held.release()

    def has_candidate(self, group: TensorGroup) -> bool:
        """Return whether there is a file with tensors of these names, types and shapes, of any values."""
        return any((self._directory / "tensors").glob(f"{group.shape_key}-*{_SUFFIX}"))

    def unread_bytes(self, group: TensorGroup, digests: list[bytes]) -> int:
        """Return how many bytes must be read before the file of a group with this content can be used."""
        path = self._path(group, digests)
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            return 0 if self._verified.get(path) == file_state(file) else group.num_bytes
        return 0

    def find(self, group: TensorGroup, digests: list[bytes], check: Check) -> Path | None:
        """Return the path of the file of a group with this content; None if there is none or it is damaged.

        When a file is found for the first time, all of it is read and compared; a damaged file is deleted.

        Args:
            digests: digests of the tensors, in the order of the group.
            check: called between the pieces that are read; raises if the work was cancelled.
        """
        path = self._path(group, digests)
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            state = file_state(file)
            if self._verified.get(path) == state:
                return path
            if _content_digests(group, file, check) == digests:
                self._verified[path] = state
                return path
            path.unlink(missing_ok=True)
        return None

    def require_room(self, wanted: int) -> None:
        """Raise `PeerError` if the disk has no room for `wanted` more bytes."""
        with self._explained(wanted):
            if self._free_bytes() < wanted + SPARE_BYTES:
                raise self._full(wanted, f", {SPARE_BYTES / 1e6:.1f} MB must stay free besides,")

    def writer(self, group: TensorGroup) -> GroupWriter:
        """Return a writer for the file of a group; raise `PeerError` if the disk has no room for it."""
        with self._explained(group.num_bytes):
            return GroupWriter(self, self._partial / secrets.token_hex(16), group)

    def keep(self, partial: Path, group: TensorGroup, digests: list[bytes]) -> Path:
        """Give a written file its final name, which is made of hashes of the content; return the path."""
        path = self._path(group, digests)
        os.replace(partial, path)
        _sync(path.parent)
        with path.open("rb", buffering=0) as file:
            self._verified[path] = file_state(file)
        return path

    def small_file(self, digest: bytes) -> bytes | None:
        """Return the content of the small file with this digest; None if there is none or it is damaged."""
        path = self._directory / "files" / digest.hex()
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            if xxhash.xxh3_128_digest(content) == digest:
                return content
            path.unlink(missing_ok=True)
        return None

    def put_small_file(self, content: bytes) -> None:
        """Keep a small file, named by the digest of its content; raise `PeerError` if that fails."""
        path = self._directory / "files" / xxhash.xxh3_128_hexdigest(content)
        with self._explained(len(content)):
            partial = self._partial / secrets.token_hex(16)
            try:
                partial.write_bytes(content)
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def view(self, small: Mapping[str, bytes], tensors: Mapping[str, TensorEntry]) -> Path:
        """Make a model of these tensors out of links, and return its path.

        The path is a directory that looks like a checkpoint, or a GGUF file in one.

        Args:
            small: digests of small files by name; if GGUF headers are among them, the path is a GGUF file.
            tensors: where each tensor is.
        """
        links: dict[str, Path] = {name: Path("../../files") / digest.hex() for name, digest in small.items()}
        places: dict[str, TensorPlace] = {}
        of_path: dict[Path, str] = {}
        for tensor, entry in sorted(tensors.items()):  # the same tensors give the same directory
            path = entry.path
            if path not in of_path:
                of_path[path] = f"weights-{len(of_path) + 1:05d}{path.suffix}"
                is_ours = path.parent == self._directory / "tensors"
                links[of_path[path]] = Path("../../tensors") / path.name if is_ours else path
            places[tensor] = TensorPlace(of_path[path], entry.begin, entry.end)
        header = first_header(small)
        index = _index_of(header, places)
        described = [
            index.content,
            *(f"{name}\0{target}\0".encode() for name, target in sorted(links.items())),
        ]
        final = self._directory / "models" / xxhash.xxh3_128_hexdigest(b"\0".join(described))
        with self._explained(len(index.content)):
            if not _is_view(final, links, index):
                self._make_view(final, links, index)
        return final if header is None else final / header

    def _make_view(self, final: Path, links: Mapping[str, Path], index: _Index) -> None:
        shutil.rmtree(final, ignore_errors=True)
        partial = self._partial / secrets.token_hex(16)
        try:
            partial.mkdir(mode=0o700)
            for name, target in links.items():
                (partial / name).symlink_to(target)
            (partial / index.name).write_bytes(index.content)
            with contextlib.suppress(FileExistsError):  # another worker has made the same
                _rename_new(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _path(self, group: TensorGroup, digests: list[bytes]) -> Path:
        return self._directory / "tensors" / f"{group.shape_key}-{group.content_key(digests)}{_SUFFIX}"

    @contextlib.contextmanager
    def _explained(self, wanted: int) -> Iterator[None]:
        """Turn errors of the disk in the `with` block into errors that say what to do."""
        try:
            yield
        except PenstockError:  # raised as it is; some of these are an OSError too
            raise
        except OSError as error:
            raise self.unusable(error, wanted) from error

    def unusable(self, error: OSError, wanted: int) -> PeerError:
        """Return a failure to keep `wanted` bytes as an error for the user, which says what to do."""
        if error.errno not in _FULL:
            return PeerError(
                f"the weights cannot be kept in {self._directory}: {error.strerror or error}.",
                remedy="Give the worker another directory with --weights-cache.",
                code="weights_cache_failed",
            )
        return self._full(wanted)

    def _full(self, wanted: int, spared: str = ",") -> PeerError:
        """Return the error for a full disk; `spared` are words about the bytes that must stay free."""
        free = "no"
        with contextlib.suppress(OSError):
            free = f"{self._free_bytes() / 1e6:.1f} MB"
        return PeerError(
            f"the disk of {self._directory} is full: {wanted / 1e6:.1f} MB of weights need space "
            f"there{spared} and {free} are free.",
            remedy="Free space, or give the worker a directory on another disk with --weights-cache.",
            code="disk_full",
        )

    def _free_bytes(self) -> int:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize


class GroupWriter:
    """Writes the file of a group, tensor by tensor, in a `with` block; the file is deleted unless it is kept.

    Implements `Sink`.

    Args:
        partial: path of the file while it is written.
    """

    def __init__(self, cache: WeightCache, partial: Path, group: TensorGroup) -> None:
        self._cache = cache
        self._partial = partial
        self._group = group
        self._digests: list[bytes] = []
        self._file = partial.open("xb", buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, len(group.header) + group.num_bytes)
            self._write(memoryview(group.header))
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> GroupWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def begin(self, number: int) -> None:
        """Begin to write the tensor of this number, for the first time or anew. Implements `Sink.begin`."""
        del self._digests[number:]
        self._file.seek(len(self._group.header) + sum(map(num_bytes, self._group.tensors[:number])))

    def write(self, memory: memoryview) -> None:
        """Write the next bytes of the tensor; raise `PeerError` if the disk takes no more.

        Implements `Sink.write`.
        """
        try:
            self._write(memory)
        except OSError as error:
            raise self._cache.unusable(error, self._group.num_bytes) from error

    def end(self, digest: bytes) -> None:
        """End the tensor, and note its digest. Implements `Sink.end`."""
        self._digests.append(digest)

    def keep(self) -> Path:
        """Put the complete file into the cache and return its path; raise `PeerError` if that fails."""
        assert len(self._digests) == len(self._group.tensors), "a group without some of its tensors"
        try:
            os.fsync(self._file.fileno())
            return self._cache.keep(self._partial, self._group, self._digests)
        except OSError as error:
            raise self._cache.unusable(error, self._group.num_bytes) from error

    def _write(self, memory: memoryview) -> None:
        while memory:
            memory = memory[self._file.write(memory) :]

    def _discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def _content_digests(group: TensorGroup, file: FileIO, check: Check) -> list[bytes]:
    """Return the digests of the tensors in a file; empty if it is not a file of the group."""
    if file.read(len(group.header)) != group.header:
        return []
    memory = memoryview(bytearray(READ_BYTES))
    found = []
    for tensor in group.tensors:
        digest = xxhash.xxh3_128()
        left = num_bytes(tensor)
        while left:
            count = file.readinto(memory[:left])
            if not count:
                return []
            digest.update(memory[:count])
            left -= count
            check()
        found.append(digest.digest())
    return [] if file.read(1) else found


def _index_of(header: str | None, places: Mapping[str, TensorPlace]) -> _Index:
    """Return the index that says where the tensors are, in the form that readers of the format expect."""
    if header is not None:
        return _Index(header + INDEX_SUFFIX, index_content(places))
    files = {tensor: place.file for tensor, place in places.items()}
    return _Index(INDEX_FILE, msgspec.json.encode({"metadata": {}, "weight_map": files}))


def _is_view(final: Path, links: Mapping[str, Path], index: _Index) -> bool:
    """Return whether the directory exists, and has exactly these links and this index."""
    try:
        found = {path.name: path.readlink() for path in final.iterdir() if path.name != index.name}
        return found == dict(links) and (final / index.name).read_bytes() == index.content
    except OSError:
        return False


def _rename_new(partial: Path, final: Path) -> None:
    """Rename a directory; raise FileExistsError if the new name exists."""
    try:
        os.rename(partial, final)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError from error
        raise


def _sync(directory: Path) -> None:
    """Make a new name in a directory survive a loss of power."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
