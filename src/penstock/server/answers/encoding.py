"""Writes long answers as JSON in short steps, between which the event loop serves others.

While one call encodes, no other thread of the process runs: the event loop waits for it even if it runs in
another thread. The entries of a long list are therefore encoded a few at a time (`encode_in_slices`), and
entries that are encoded already are only copied into the answer (`EncodedLists`). Called by the routes with
whole answers, and by `responses_output`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

SLICE = 16  # entries of a list that are encoded at once: with 4,096 numbers each, some 5 ms
_MAX_CHOICES = 256  # the entries of a list of at most so many are searched for long lists
_MARK = b"\0"  # around the number of a list; no JSON has this byte

encode = msgspec.json.Encoder().encode


class EncodedList:
    """A JSON list that is put together from lists which are encoded already.

    Args:
        number: its number among the lists of one answer.

    Attributes:
        placeholder: stands for the list in what `EncodedLists` encodes.
    """

    def __init__(self, number: int) -> None:
        self.placeholder = msgspec.Raw(_MARK + str(number).encode() + _MARK)
        self._parts: list[bytes] = []

    def extend(self, encoded: bytes) -> None:
        """Add the entries of a list."""
        if entries := encoded[1:-1]:
            self._parts += (b",", entries) if self._parts else (entries,)

    @property
    def parts(self) -> list[bytes]:
        """The list with all entries, in pieces."""
        return [b"[", *self._parts, b"]"]


class EncodedLists:
    """The encoded lists of one answer, which take the place of their placeholders."""

    def __init__(self) -> None:
        self._lists: list[EncodedList] = []

    def new_list(self) -> EncodedList:
        """Return a list without entries."""
        self._lists.append(EncodedList(len(self._lists)))
        return self._lists[-1]

    def encode(self, value: Any) -> bytes:
        """Return the value as JSON, with the lists in place of their placeholders."""
        return b"".join(self._pieces(encode(value)))

    def _pieces(self, encoded: bytes) -> Iterator[bytes]:
        for index, piece in enumerate(encoded.split(_MARK)):
            if index % 2:
                yield from self._lists[int(piece)].parts
            else:
                yield piece


def encode_in_slices(answer: msgspec.Struct) -> bytes:
    """Return the answer as JSON. Long lists in it and in its choices are encoded a few entries at a time."""
    fields = {name: _choices_in_slices(getattr(answer, name)) for name in answer.__struct_fields__}
    return encode(msgspec.structs.replace(answer, **fields))


def _choices_in_slices(value: Any) -> Any:
    if isinstance(value, list) and len(value) <= _MAX_CHOICES:
        return [_in_slices(entry) for entry in value]
    return _in_slices(value)


def _in_slices(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {name: _in_slices(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    is_long = isinstance(value, list) and len(value) > SLICE
    if not is_long or not isinstance(value[-1], dict | list | msgspec.Struct):
        return value
    slices = [encode(value[begin : begin + SLICE])[1:-1] for begin in range(0, len(value), SLICE)]
    return msgspec.Raw(b"".join((b"[", b",".join(slices), b"]")))
