"""Writes small GGUF files for tests, by the format's description and by no code of what reads them.

A value's type follows from its Python type (an integer becomes u32, or i64 where it does not fit; a float
becomes f32); `Typed` says another. Lists of strings and numpy arrays become arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q8_0 = 0, 1, 8

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARRAYS = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A scalar of the type with this number."""

    kind: int
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor to write.

    Attributes:
        shape: slowest dimension first.
        kind: number of its ggml type.
        content: bytes of its values.
    """

    shape: tuple[int, ...]
    kind: int
    content: bytes

    @classmethod
    def of(cls, values: np.ndarray) -> Stored:
        """Return floats as they are, of 32 or 16 bits."""
        kind = {4: F32, 2: F16}[values.dtype.itemsize]
        return cls(shape=values.shape, kind=kind, content=np.ascontiguousarray(values).tobytes())


def text_bytes(text: str | bytes) -> bytes:
    """Return a string as the format has it."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """Return the type and the bytes of a value."""
    kind, content = _encoded(value)
    return struct.pack("<I", kind) + content


def _encoded(value: Any) -> tuple[int, bytes]:
    if isinstance(value, Typed):
        return value.kind, struct.pack("<" + _SCALARS[value.kind], value.value)
    if isinstance(value, bool):
        return _encoded(Typed(kind=7, value=value))
    if isinstance(value, int):
        return _encoded(Typed(kind=4 if 0 <= value < 2**32 else 11, value=value))
    if isinstance(value, float):
        return _encoded(Typed(kind=6, value=value))
    if isinstance(value, str | bytes):
        return _STRING, text_bytes(value)
    if isinstance(value, np.ndarray):
        return _ARRAY, struct.pack("<IQ", _ARRAYS[value.dtype.str[1:]], len(value)) + value.tobytes()
    items = [_encoded(item) for item in value]
    kind = items[0][0] if items else _STRING
    return _ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(content for _, content in items)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    offsets: Mapping[str, int] | None = None,
) -> bytes:
    """Return a whole file.

    Args:
        offsets: of tensors that are to be said elsewhere than they are.
    """
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 4096:  # one that no reader takes
        alignment = 32
    keys = b"".join(text_bytes(key) + value_bytes(value) for key, value in metadata.items())
    index, data = b"", b""
    for name, tensor in tensors.items():
        offset = (offsets or {}).get(name, len(data))
        index += text_bytes(name) + struct.pack("<I", len(tensor.shape))
        index += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        index += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.content + bytes(-len(tensor.content) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + keys + index
    return head + bytes(-len(head) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """Write one file, and return its path."""
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def write_parts(
    directory: Path, stem: str, metadata: Mapping[str, Any], parts: Sequence[Mapping[str, Stored]]
) -> list[Path]:
    """Write a model that is split; the metadata goes to the first file."""
    paths = []
    total = sum(map(len, parts))
    for index, tensors in enumerate(parts):
        split = {
            "split.no": Typed(kind=2, value=index),
            "split.count": Typed(kind=2, value=len(parts)),
            "split.tensors.count": Typed(kind=5, value=total),
        }
        path = directory / f"{stem}-{index + 1:05}-of-{len(parts):05}.gguf"
        paths.append(write_gguf(path, {**(metadata if index == 0 else {}), **split}, tensors))
    return paths
