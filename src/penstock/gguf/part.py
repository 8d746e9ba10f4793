"""One GGUF file: its metadata, and which bytes of it hold which tensor.

`read_part` reads and checks the header alone: counts, names, types, shapes, offsets, and that no tensors
overlap or go beyond the end of a whole file. A defect is a `CheckpointError` with file, tensor or key,
expected and found. Called by `gguf.file`, which joins the files of a model. Torch-free; reads no tensor data.

Format, versions 2 and 3: magic, version, number of tensors, number of keys; the keys with their values; name,
dimensions, type and offset of each tensor; padding up to the alignment; the data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.errors import CheckpointError, unreadable
from penstock.gguf.block_types import TYPES, WITHDRAWN, GgufType
from penstock.gguf.header_bytes import HeaderBytes
from penstock.gguf.metadata import GgufMetadata, metadata_room, read_metadata
from penstock.told_text import printable

MAGIC = b"GGUF"
ALIGNMENT_KEY = "general.alignment"
MAX_DIMENSIONS = 4
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_NAME_BYTES = 1024
_MAX_SIZE = 1 << 48
_TENSOR_BYTES = 24  # the fewest in the header: length of the name, number of dimensions, type, offset


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor's place: `num_bytes` bytes of `path` from `start` on."""

    name: str
    shape: tuple[int, ...]  # the slowest dimension first, as in torch; the file has the reverse order
    type: GgufType
    path: Path
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Return where the bytes end."""
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPart:
    """One file, as its header describes it.

    Attributes:
        header_bytes: number of bytes of the file that were read.
        data_start: position where the header ends, and the tensors' bytes begin.
    """

    path: Path
    version: int
    metadata: GgufMetadata
    tensors: Mapping[str, GgufTensor]
    header_bytes: int
    data_start: int


def read_part(path: Path, *, is_header_alone: bool = False) -> GgufPart:
    """Return what one file holds, without the others of its model.

    Args:
        is_header_alone: the tensors are elsewhere (`gguf.tensor_places`), and the file ends with its header.

    Raises:
        CheckpointError: the file cannot be read, or its header is not sound.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block for ever
        try:
            return _parse(path, HeaderBytes(path, descriptor), is_header_alone=is_header_alone)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable(path.name, error) from error


def _parse(path: Path, header: HeaderBytes, *, is_header_alone: bool) -> GgufPart:
    version = _read_version(header)
    num_tensors = header.count(_TENSOR_BYTES, "a number of tensors")
    metadata = GgufMetadata(path.name, read_metadata(header, metadata_room(header)))
    alignment = _alignment(metadata)
    entries = [_read_entry(header) for _ in range(num_tensors)]
    data_start = -(-header.position // alignment) * alignment
    if is_header_alone and header.file_size > data_start:
        header.refuse(f"a header of {data_start} bytes on its own", f"a file of {header.file_size} bytes")
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            header.refuse("each tensor once", "it twice", tensor=entry.name)
        tensors[entry.name] = _placed(header, entry, path, data_start, alignment)
        if not is_header_alone:
            _require_whole(header, tensors[entry.name])
    _require_apart(header, tensors)
    return GgufPart(
        path=path,
        version=version,
        metadata=metadata,
        tensors=tensors,
        header_bytes=len(header.content),
        data_start=data_start,
    )


def _read_version(header: HeaderBytes) -> int:
    magic = header.take(len(MAGIC), "a GGUF header")
    if magic == MAGIC[::-1]:
        _refuse_big_endian(header)
    if magic != MAGIC:
        header.refuse(f"a file that begins with {MAGIC.decode()}", repr(magic)[1:])
    version = header.u32("a version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            _refuse_big_endian(header)
        header.refuse(f"GGUF of version {' or '.join(map(str, _VERSIONS))}", f"version {version}")
    return version


def _refuse_big_endian(header: HeaderBytes) -> NoReturn:
    header.refuse("a little-endian GGUF file", "a big-endian file, which is not supported")


def _alignment(metadata: GgufMetadata) -> int:
    alignment = metadata.integer(ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            file=metadata.file,
            key=ALIGNMENT_KEY,
            expected=f"a power of two from 1 to {_MAX_ALIGNMENT}",
            found=str(alignment),
        )
    return alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor as the header lists it; dimensions begin with the fastest one."""

    name: str
    dimensions: tuple[int, ...]
    type: GgufType
    offset: int


def _read_entry(header: HeaderBytes) -> _Entry:
    name = header.text("the name of a tensor", _MAX_NAME_BYTES)
    num_dimensions = header.u32("a number of dimensions")
    if num_dimensions > MAX_DIMENSIONS:
        header.refuse(f"at most {MAX_DIMENSIONS} dimensions", str(num_dimensions), tensor=name)
    # A file may give a single value no dimension. As in ggml it gets one: no caller has to expect none.
    dimensions = tuple(header.u64("a dimension") for _ in range(num_dimensions)) or (1,)
    if math.prod(dimensions) > _MAX_SIZE or any(size > _MAX_SIZE for size in dimensions):
        header.refuse(f"at most {_MAX_SIZE} values", f"dimensions {list(dimensions)}", tensor=name)
    kind = _known_type(header, header.u32("a type"), name)
    if dimensions[0] % kind.block_values:
        expected = f"rows of whole blocks of {kind.block_values} values for {kind.name}"
        header.refuse(expected, str(dimensions[0]), tensor=name)
    return _Entry(name=name, dimensions=dimensions, type=kind, offset=header.u64("an offset"))


def _known_type(header: HeaderBytes, number: int, tensor: str) -> GgufType:
    if number not in TYPES:
        known = ", ".join(f"{kind.name} ({kind.number})" for kind in TYPES.values())
        found = WITHDRAWN.get(number, "which is not a known type of ggml")
        header.refuse(f"a type of {known}", f"type {number}, {found}", tensor=tensor)
    return TYPES[number]


def _placed(header: HeaderBytes, entry: _Entry, path: Path, data_start: int, alignment: int) -> GgufTensor:
    """Return a tensor with its place in the file, if the file is whole."""
    num_bytes = entry.type.num_bytes(math.prod(entry.dimensions))
    if entry.offset % alignment:
        found = f"offset {entry.offset}"
        header.refuse(f"an offset that is a multiple of {alignment}", found, tensor=entry.name)
    return GgufTensor(
        name=entry.name,
        shape=entry.dimensions[::-1],
        type=entry.type,
        path=path,
        start=data_start + entry.offset,
        num_bytes=num_bytes,
    )


def _require_whole(header: HeaderBytes, tensor: GgufTensor) -> None:
    if tensor.end > header.file_size:
        shape = "x".join(map(str, tensor.shape[::-1]))
        header.refuse(
            f"{tensor.num_bytes} bytes of {tensor.type.name} ({shape}) from byte {tensor.start} on",
            f"a file of {header.file_size} bytes (truncated)",
            tensor=tensor.name,
        )


def _require_apart(header: HeaderBytes, tensors: Mapping[str, GgufTensor]) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start < end and tensor.num_bytes:
            expected = f"bytes from {end} on, where {printable(before)} ends"
            header.refuse(expected, f"bytes from {tensor.start} on", tensor=tensor.name)
        if tensor.end > end:
            end, before = tensor.end, tensor.name
