"""The pieces of an answer, as it comes: content, reasoning and calls of tools.

`reasoning` and `tool_calls` give pieces; `server.openai.message_reader` makes messages and deltas of them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PieceKind = Literal["content", "reasoning", "call", "arguments", "broken"]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A part of an answer.

    Attributes:
        kind: "content" and "reasoning": text. "call": a call begins; the text is its name. "arguments": more
            of its arguments. "broken": it is not sound; the text is all of it, its markers included.
        begin: of content: characters of the text that was looked through for calls which stand before it.
        id: of a call: the id that the model gave it; "" where it gave none.
    """

    kind: PieceKind
    text: str
    begin: int = 0
    id: str = ""


class PieceList:
    """Pieces until they are taken; content that follows content without a gap is one with it."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._content: list[str] = []  # behind them
        self._content_end = 0  # in the text that it is from

    def give(self, kind: PieceKind, text: str, id_: str = "") -> None:
        """Add a piece other than content, unless it is empty."""
        if text:
            self._end_content()
            self._pieces.append(Piece(kind, text, id=id_))

    def give_content(self, text: str, end: int) -> None:
        """Add content, unless it is empty.

        Args:
            end: characters of the text that it is from, up to its end.
        """
        if not text:
            return
        if end - len(text) != self._content_end:
            self._end_content()
        self._content.append(text)
        self._content_end = end

    def taken(self) -> list[Piece]:
        """Return all pieces, and remove them."""
        self._end_content()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _end_content(self) -> None:
        if self._content:
            text = "".join(self._content)
            self._pieces.append(Piece("content", text, self._content_end - len(text)))
            self._content.clear()


def partial_marker(text: str, marker: str, pos: int = 0) -> int:
    """Return where the end of the text may be the beginning of the marker.

    Only the text from `pos` on counts; the length of the text where there is no such end.
    """
    for length in range(min(len(marker) - 1, len(text) - pos), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
