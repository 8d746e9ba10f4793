"""The frames that pass over pipes between `grammar.proving` and the process in which it tries grammars."""

from __future__ import annotations

import msgspec

from penstock.errors import ErrorInfo

LENGTH_BYTES = 4


class ProofAnswer(msgspec.Struct, frozen=True):
    """An answer. `error`: why a grammar, or any grammar, cannot be used; None: it can."""

    error: ErrorInfo | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as a frame: a length of four bytes, and the message."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content
