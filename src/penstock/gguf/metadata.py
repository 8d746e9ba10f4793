"""The metadata of a GGUF file: keys, and values of the format's thirteen types.

`gguf.part` parses the keys and values in a header by `read_metadata`, and makes a `GgufMetadata` of them. The
readers of a model's configuration and vocabulary ask that object. If a value has another type than they
expect, it raises a `CheckpointError` with file, key, expected and found. This module knows the meaning of no
key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np

from penstock.errors import CheckpointError
from penstock.gguf.header_bytes import MAX_HEADER_BYTES, HeaderBytes
from penstock.told_text import printable

Scalar = int | float | bool | str
Value = Scalar | np.ndarray | list[str] | list["Value"]

_MAX_KEY_BYTES = 65_535
_MAX_NESTING = 4
_KEY_BYTES = 13  # the fewest for a key and its value: 8 for the key's length, 4 for a type, 1 for the value
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_FORMATS = {number: struct.Struct(f"<{letter}") for number, letter in _LETTERS.items()}
_LEAST_BYTES = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {
    number: kind.itemsize for number, kind in _NUMBERS.items()
}


class GgufMetadata(Mapping[str, Value]):
    """The keys and values of a file. An array of numbers or truth values is a numpy array, any other a list.

    Args:
        file: name of the file, for errors.
        values: the values, by key.
    """

    def __init__(self, file: str, values: Mapping[str, Value]) -> None:
        self.file = file
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; without a default the key must be there."""
        value = self._value(key, default, "a string")
        return value if isinstance(value, str) else self._refuse(key, "a string", value)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; without a default the key must be there."""
        value = self._value(key, default, "an integer")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return self._refuse(key, "an integer", value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; without a default the key must be there."""
        value = self._value(key, default, "a number")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        return self._refuse(key, "a number", value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value; without a default the key must be there."""
        value = self._value(key, default, "true or false")
        return value if isinstance(value, bool) else self._refuse(key, "true or false", value)

    def texts(self, key: str) -> list[str]:
        """Return an array of strings, which must be there."""
        value = self._value(key, None, "an array of strings")
        if isinstance(value, list) and (not value or isinstance(value[0], str)):
            return value  # type: ignore[return-value]
        return self._refuse(key, "an array of strings", value)

    def numbers(self, key: str) -> np.ndarray:
        """Return an array of numbers, which must be there."""
        value = self._value(key, None, "an array of numbers")
        if isinstance(value, np.ndarray) and value.dtype != np.bool_:
            return value
        return self._refuse(key, "an array of numbers", value)

    def _value(self, key: str, default: Scalar | None, expected: str) -> Value:
        value = self._values.get(key, default)
        return self._refuse(key, expected, None) if value is None else value

    def _refuse(self, key: str, expected: str, found: Value | None) -> NoReturn:
        raise CheckpointError(file=self.file, key=key, expected=expected, found=_shown(found))


def read_metadata(header: HeaderBytes, count: int) -> dict[str, Value]:
    """Return `count` keys and their values, which begin at the header's position."""
    values: dict[str, Value] = {}
    for _ in range(count):
        key = header.text("the key of a value", _MAX_KEY_BYTES)
        if key in values:
            header.refuse("each key once", "it twice", key=key)
        try:
            values[key] = _read_value(header, header.u32("the type of a value"), 0)
        except CheckpointError as error:
            header.refuse(error.expected, error.found, key=key)
    return values


def metadata_room(header: HeaderBytes) -> int:
    """Return the number of keys, which comes next; refuse one that the rest of the file has no room for."""
    return header.count(_KEY_BYTES, "a number of metadata keys")


def _read_value(header: HeaderBytes, kind: int, depth: int) -> Value:
    if kind in _FORMATS:
        form = _FORMATS[kind]
        value: Value = form.unpack(header.take(form.size, "a number"))[0]
        return value
    if kind == _STRING:
        return header.text("a string", MAX_HEADER_BYTES)
    if kind == _BOOL:
        return bool(_checked_bools(header, header.take(1, "a truth value"))[0])
    if kind == _ARRAY:
        return _read_array(header, depth + 1)
    header.refuse("a value of a type from 0 to 12", f"type {kind}")


def _read_array(header: HeaderBytes, depth: int) -> Value:
    if depth > _MAX_NESTING:
        header.refuse(f"arrays in arrays at most {_MAX_NESTING} deep", "deeper ones")
    kind = header.u32("the type of an array")
    if kind not in _LEAST_BYTES:
        header.refuse("an array of a type from 0 to 12", f"type {kind}")
    count = header.count(_LEAST_BYTES[kind], "a length of an array")
    if kind == _STRING:
        return header.texts(count, "a string")
    if kind == _ARRAY:
        return [_read_array(header, depth + 1) for _ in range(count)]
    if kind == _BOOL:
        return _checked_bools(header, header.take(count, "an array"))
    return _numbers(header.take(count * _NUMBERS[kind].itemsize, "an array"), _NUMBERS[kind])


def _numbers(content: bytes, kind: np.dtype) -> np.ndarray:
    return np.frombuffer(content, kind) if content else np.empty(0, kind)


def _checked_bools(header: HeaderBytes, content: bytes) -> np.ndarray:
    values = _numbers(content, np.dtype(np.uint8))
    if values.size and values.max() > 1:
        header.refuse("truth values of 0 or 1", str(values.max()))
    return values.astype(np.bool_)


def _shown(value: Value | None) -> str:
    """Describe an untrusted value for an error: a string printably, an array by its length alone."""
    if value is None:
        return "no such key"
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)} values"
    return f"the string {printable(value)!r}" if isinstance(value, str) else repr(value)
