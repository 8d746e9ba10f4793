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
        kind: "content" and "reasoning": text. "call": a call begins; the text is the tool's name.
            "arguments": more of the arguments of that call. "broken": that call is not sound; the text is all
            of the call, its markers included.
        begin: for content: its position in the text in which calls were looked for, in characters.
        id: for a call: the id that the model gave it; "" if it gave none.
    """

    kind: PieceKind
    text: str
    begin: int = 0
    id: str = ""


class PieceList:
    """A list of pieces until they are taken; content right behind other content becomes one piece with it."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._content: list[str] = []  # parts of a piece of content behind these
        self._content_end = 0  # where that content ends in the text in which calls are looked for

    def give(self, kind: PieceKind, text: str, id_: str = "") -> None:
        """Add a piece other than content, unless it is empty."""
        if text:
            self._end_content()
            self._pieces.append(Piece(kind, text, id=id_))

    def give_content(self, text: str, end: int) -> None:
        """Add content, unless it is empty.

        Args:
            end: where the content ends in the text in which calls are looked for.
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
    """Return the position from which on the text may be the beginning of the marker.

    Only positions from `pos` on count. If there is none, the length of the text is returned.
    """
    for length in range(min(len(marker) - 1, len(text) - pos), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
