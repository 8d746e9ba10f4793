"""Writes vocabularies for tests in the forms that models came in before `tokenizer.json`.

A SentencePiece model is a protocol buffer, a tiktoken file lines of base64; both are written here by their
descriptions, and by no code of what reads them.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Sequence

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def number(value: int) -> bytes:
    """Return a number of 7 bits a byte; a negative one is the complement of 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(field: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    return number(field << 3 | 2) + number(len(content)) + content


def numbered(field: int, value: int) -> bytes:
    """Return a field that is a number."""
    return number(field << 3) + number(value)


def sentencepiece_bytes(
    pieces: Sequence[tuple[str, float, int]],
    *,
    algorithm: int = BPE,
    byte_fallback: bool = True,
    dummy_prefix: bool = True,
    collapse_spaces: bool = False,
    bos: int = 1,
    eos: int = 2,
    trainer: bytes = b"",
) -> bytes:
    """Return a SentencePiece model.

    Args:
        pieces: name, score and kind of each.
        trainer: more fields of the trainer's settings.
    """
    content = b""
    for name, score, kind in pieces:
        piece = message(1, name.encode()) + number(2 << 3 | 5) + struct.pack("<f", score)
        content += message(1, piece + (numbered(3, kind) if kind != NORMAL else b""))
    settings = numbered(3, algorithm) + numbered(35, byte_fallback) + numbered(40, 0)
    settings += numbered(41, bos) + numbered(42, eos) + trainer
    spaces = numbered(3, dummy_prefix) + numbered(4, collapse_spaces) + numbered(5, True)
    return content + message(2, settings) + message(3, message(1, b"identity") + spaces)


def tiktoken_bytes(tokens: Iterable[bytes]) -> bytes:
    """Return a tiktoken file; a token's rank is its place."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
