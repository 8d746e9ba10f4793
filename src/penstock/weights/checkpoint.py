"""The index of a checkpoint in safetensors: which bytes of which file hold which tensor.

Every header is parsed and checked here before anything is read: length, JSON, dtypes, shapes, offsets, and
that the tensors fill the file without gap or overlap. A defect is a `CheckpointError` with file, tensor,
expected and found. Used by `weights.loader`, and where sizes are needed without loading. Torch-free; reads no
tensor data.

Format: 8 bytes little-endian header length, a JSON header, then the data; offsets count from the data's
start.
"""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError, unreadable
from penstock.families.text_names import text_name
from penstock.told_text import printable
from penstock.weights.read_digests import ReadDigests

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
MAX_INDEX_BYTES = 100 << 20
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 48
_LENGTH_BYTES = 8

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor's place: bytes `[begin, end)` of `path`.

    Attributes:
        name: name in the text model, which may be a part of the checkpoint's.
    """

    name: str
    path: Path
    dtype: str  # as safetensors spells it, such as "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a directory, in one safetensors file or in several with an index.

    Headers of shards are read when a tensor of theirs is first asked for, so a stage opens only its own
    files. Of a text model among other parts there are its own tensors alone, by the names that they would
    have without these parts (`families.text_names`).

    Args:
        digests: digests of the tensor bytes that readers of this checkpoint read; by default compared with
            nothing.
    """

    def __init__(self, directory: Path, digests: ReadDigests | None = None) -> None:
        self.digests = ReadDigests() if digests is None else digests
        self._directory = directory
        self._headers: dict[str, dict[str, TensorEntry]] = {}
        self._files = self._locate()

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors, of all stages."""
        return frozenset(self._files)

    def entry(self, name: str) -> TensorEntry:
        """Return where the tensor is. Raises `CheckpointError` if it is nowhere."""
        file = self._files.get(name)
        if file is None:
            where = SINGLE_FILE if SINGLE_FILE in self._headers else INDEX_FILE
            raise CheckpointError(file=where, tensor=name, expected="this tensor", found="no such name")
        entry = self._header(file).get(name)
        if entry is None:
            raise CheckpointError(
                file=file, tensor=name, expected=f"this tensor, as {INDEX_FILE} says", found="no such name"
            )
        return entry

    def _locate(self) -> dict[str, str]:
        """Return the name of each tensor -> name of its file."""
        if (self._directory / SINGLE_FILE).exists():
            return dict.fromkeys(self._header(SINGLE_FILE), SINGLE_FILE)
        if (self._directory / INDEX_FILE).exists():
            index = _read_index(self._directory / INDEX_FILE)
            return {name: index[stored] for name, stored in _text_names(index, INDEX_FILE).items()}
        raise CheckpointError(
            file=str(self._directory),
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            found="neither",
            remedy="Give a directory with safetensors, or a GGUF file; convert other formats first.",
        )

    def _header(self, file: str) -> dict[str, TensorEntry]:
        if file not in self._headers:
            stored = read_header(self._directory / file)
            self._headers[file] = {
                name: dataclasses.replace(stored[stored_name], name=name)
                for name, stored_name in _text_names(stored, file).items()
            }
        return self._headers[file]


def _text_names(stored: Iterable[str], file: str) -> dict[str, str]:
    """Return the name of each tensor of the text model -> its name in the checkpoint."""
    names: dict[str, str] = {}
    for stored_name in stored:
        name = text_name(stored_name)
        if name is None:
            continue
        if name in names:
            raise CheckpointError(
                file=file,
                tensor=printable(stored_name),
                expected="one tensor of a name of the text model",
                found=f"{printable(names[name])} as well",
            )
        names[name] = stored_name
    return names


def _read_index(path: Path) -> dict[str, str]:
    try:
        _check_regular_file(path)
        with path.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise unreadable(path.name, error) from error
    if len(content) > MAX_INDEX_BYTES:
        raise CheckpointError(file=path.name, expected=f"at most {MAX_INDEX_BYTES} bytes", found="more")
    index: _Index = _decode(content, _Index, path, "an object with a weight_map of names to files")
    for name, shard in index.weight_map.items():
        if Path(shard).name != shard or not shard.isprintable() or not shard.endswith(".safetensors"):
            raise CheckpointError(
                file=path.name,
                tensor=printable(name),
                expected="a *.safetensors file beside it",
                found=printable(shard),
            )
    return index.weight_map


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return all tensors of one file, checked against each other and against the size of the file."""
    try:
        size = _check_regular_file(path)
        with path.open("rb") as file:
            length = _header_length(file.read(_LENGTH_BYTES), size, path)
            content = file.read(length)
    except OSError as error:
        raise unreadable(path.name, error) from error
    header: dict[str, Any] = _decode(content, dict[str, msgspec.Raw], path, "a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None:
        _decode(metadata, dict[str, str], path, "__metadata__ to map strings to strings")
    start = _LENGTH_BYTES + length
    entries = [_entry(name, raw, path, start) for name, raw in header.items()]
    _check_coverage(entries, path, start, size)
    return {entry.name: entry for entry in entries}


def _check_regular_file(path: Path) -> int:
    """Return the size of the file; refuse anything but a file, which could block for ever."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(file=path.name, expected="a regular file", found="something else")
    return status.st_size


def _header_length(prefix: bytes, file_size: int, path: Path) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(
            file=path.name, expected=f"at least {_LENGTH_BYTES} bytes", found=f"{len(prefix)} bytes"
        )
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, file_size - _LENGTH_BYTES)
    if not 2 <= length <= limit:
        raise CheckpointError(
            file=path.name, expected=f"a header length from 2 to {limit} bytes", found=f"{length}"
        )
    return length


def _entry(name: str, raw: msgspec.Raw, path: Path, start: int) -> TensorEntry:
    shown = printable(name)
    fields = _decode(raw, _HeaderEntry, path, "dtype, shape and data_offsets", tensor=shown)
    if fields.dtype not in DTYPE_BYTES:
        raise CheckpointError(
            file=path.name,
            tensor=shown,
            expected=f"a dtype of {', '.join(DTYPE_BYTES)}",
            found=printable(fields.dtype),
        )
    if len(fields.shape) > _MAX_DIMENSIONS or any(not 0 <= size <= _MAX_SIZE for size in fields.shape):
        raise CheckpointError(
            file=path.name,
            tensor=shown,
            expected=f"a shape of at most {_MAX_DIMENSIONS} sizes from 0 to {_MAX_SIZE}",
            found=printable(str(fields.shape)),
        )
    begin, end = fields.data_offsets
    wanted = math.prod(fields.shape) * DTYPE_BYTES[fields.dtype]
    if begin < 0 or end - begin != wanted:
        raise CheckpointError(
            file=path.name,
            tensor=shown,
            expected=f"{wanted} bytes for {fields.dtype} of {fields.shape}",
            found=printable(f"offsets {begin} to {end}"),
        )
    return TensorEntry(
        name=name,
        path=path,
        dtype=fields.dtype,
        shape=tuple(fields.shape),
        begin=start + begin,
        end=start + end,
    )


def _check_coverage(entries: list[TensorEntry], path: Path, start: int, file_size: int) -> None:
    """Refuse tensors that do not follow each other from the end of the header to the end of the file."""
    position = start
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != position:
            kind = "overlapping" if entry.begin < position else "after a gap"
            raise CheckpointError(
                file=path.name,
                tensor=printable(entry.name),
                expected=f"data from offset {position - start}",
                found=f"{entry.begin - start} ({kind})",
            )
        if entry.end > file_size:
            raise CheckpointError(
                file=path.name,
                tensor=printable(entry.name),
                expected=f"a file of at least {entry.end} bytes",
                found=f"{file_size} bytes (truncated)",
            )
        position = entry.end
    if position != file_size:
        raise CheckpointError(
            file=path.name, expected=f"{position} bytes", found=f"{file_size} bytes (bytes of no tensor)"
        )


def _decode(content: Any, kind: Any, path: Path, expected: str, tensor: str = "") -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            file=path.name, tensor=tensor, expected=expected, found=printable(str(error))
        ) from error
