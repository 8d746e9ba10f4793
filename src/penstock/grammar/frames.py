"""The messages between `grammar.proving` and the process that tries grammars; a length precedes each."""

from __future__ import annotations

import msgspec

from penstock.errors import ErrorInfo

LENGTH_BYTES = 4


class ProofAnswer(msgspec.Struct, frozen=True):
    """An answer of that process.

    Attributes:
        error: why the grammar cannot be used, or in the first answer why no grammar can; None: it can.
    """

    error: ErrorInfo | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as a frame: its length in four bytes, little-endian, then its MessagePack form."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content
