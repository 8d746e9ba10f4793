"""The content of a SentencePiece model file (`tokenizer.model`): a protocol buffer, read here by hand.

A message is a list of fields, each with a number and a kind of coding. Fields that are not needed are passed
over. A length is compared with the number of bytes that are left before any are read. Called by
`sources.sentencepiece_vocabulary`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ModelConfigError
from penstock.tokenizer.sources.charsmap import require_sound_charsmap

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class Piece:
    """One token; its kind is one of the numbers from `NORMAL` to `BYTE`."""

    name: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceFile:
    """A model: its pieces by id, and how a text is prepared for them.

    Attributes:
        algorithm: `UNIGRAM`, `BPE`, or one of two others, which are not supported.
        unknown, bos, eos: ids of these tokens; -1: the model has no such token.
        dummy_prefix: a space is put before a text.
        collapse_spaces: spaces at both ends go away, and of several in a row all but one.
        escape_spaces: a space is written as U+2581.
        space_behind: pieces have the space of their word at their end.
        charsmap: a table of characters to replace (`sources.charsmap`); empty: there is none.
    """

    pieces: list[Piece]
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    unknown: int = 0
    bos: int = 1
    eos: int = 2
    dummy_prefix: bool = True
    collapse_spaces: bool = True
    escape_spaces: bool = True
    space_behind: bool = False
    charsmap: bytes = b""


def read_sentencepiece(content: bytes, name: str) -> SentencePieceFile:
    """Return the model in a file.

    Args:
        content: the bytes of the file.
        name: what errors call the file.

    Raises:
        ModelConfigError: this is not a SentencePiece model, or it is cut off.
    """
    try:
        return _read_model(content)
    except (ValueError, IndexError, struct.error) as error:
        raise ModelConfigError(
            f"{name} is not a readable SentencePiece model: {error}.",
            remedy="Download the model's tokenizer again.",
        ) from error


def _read_model(content: bytes) -> SentencePieceFile:
    pieces: list[Piece] = []
    settings: dict[str, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1:
            pieces.append(_read_piece(_bytes(value)))
        elif number in _SETTINGS:
            names = _SETTINGS[number]
            settings |= {names[inner]: held for inner, held in _fields(_bytes(value)) if inner in names}
    if not pieces:
        raise ValueError("it has no pieces")
    require_sound_charsmap(_bytes(settings.get("charsmap", b"")))
    fields = {name: _typed(name, value) for name, value in settings.items()}
    return SentencePieceFile(pieces=pieces, **fields)  # type: ignore[arg-type]


# For each message within a model, by number: the names that its fields have here, by their numbers.
_SETTINGS = {
    2: {
        3: "algorithm",
        24: "space_behind",
        35: "byte_fallback",
        40: "unknown",
        41: "bos",
        42: "eos",
    },
    3: {2: "charsmap", 3: "dummy_prefix", 4: "collapse_spaces", 5: "escape_spaces"},
}
_NUMBERS = ("algorithm", "unknown", "bos", "eos")


def _typed(name: str, value: int | bytes) -> int | bool | bytes:
    if name == "charsmap":
        return _bytes(value)
    if isinstance(value, bytes):
        raise ValueError(f"{name} is not a number")
    if name in _NUMBERS:
        return value - (1 << 64) if value >> 63 else value
    return bool(value)


def _read_piece(content: bytes) -> Piece:
    name, score, kind = "", 0.0, NORMAL
    for number, value in _fields(content):
        if number == 1:
            name = _bytes(value).decode()
        elif number == 2:
            score = struct.unpack("<f", _bytes(value))[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(name, score, kind)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field: a number where it is coded as one, else its bytes."""
    position, size = 0, len(content)
    while position < size:
        tag, position = _varint(content, position)
        coding = tag & 7
        if coding == _VARINT:
            value, position = _varint(content, position)
            yield tag >> 3, value
            continue
        if coding == _BYTES:
            length, position = _varint(content, position)
        elif coding in (_FOUR_BYTES, _EIGHT_BYTES):
            length = 4 if coding == _FOUR_BYTES else 8
        else:
            raise ValueError(f"byte {position} begins a field of the unknown coding {coding}")
        if length > size - position:
            raise ValueError(f"a field of {length} bytes is cut off after {size - position}")
        yield tag >> 3, content[position : position + length]
        position += length


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the number that is coded at a position, 7 bits in each byte, and the position behind it."""
    byte = content[position]
    if byte < 0x80:
        return byte, position + 1
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = content[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & (1 << 64) - 1, position + index + 1
    raise ValueError(f"the number at byte {position} is not terminated")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number appears where text is expected")
    return value
