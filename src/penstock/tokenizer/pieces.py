"""What an answer is made of, as it comes: content, reasoning and calls of tools.

`reasoning` and `tool_calls` give pieces; `server.message_reader` makes messages and deltas of them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PieceKind = Literal["content", "reasoning", "call", "arguments", "broken"]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A part of an answer.

    Attributes:
        kind: "content" and "reasoning": text. "call": a call begins; the text is its name. "arguments": more
            of its arguments. "broken": it is not sound; the text is all of it, the marker before it included.
    """

    kind: PieceKind
    text: str


class PieceList:
    """Pieces until they are taken; content that follows content is one with it."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def give(self, kind: PieceKind, text: str) -> None:
        """Add a piece, unless it is empty."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if kind == "content" and last is not None and last.kind == "content":
            self._pieces[-1] = Piece(kind, last.text + text)
        else:
            self._pieces.append(Piece(kind, text))

    def taken(self) -> list[Piece]:
        """All of them, which are not here any more."""
        pieces, self._pieces = self._pieces, []
        return pieces


def partial_marker(text: str, marker: str) -> int:
    """Where the end of the text may be the beginning of the marker; its length where it is not."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
