"""Finds calls of tools in the text of an answer that comes in pieces.

`ToolCallParser` is one for all families: a row of `tool_formats` tells it the markers. What it gives does
not depend on how the text was cut: the text decides, character by character, where a call *begins* (its name
is known, and the bracket of its arguments has come); from there on its arguments are given as they come.

What is a call:

- behind the opening marker, an object with `name` and `arguments` (or `parameters`), or a list of such, or,
  where the family writes so, a name and an object behind it;
- in families without such a marker, the same as the beginning of the answer, if the name is a tool of the
  request.

Arguments reach from their first bracket to the one that closes it, word for word. All that is no call is
content, word for word too, but for white space beside calls. A call that breaks off, or whose arguments
turn out to be no JSON, is followed by a piece `broken` with its text up to there, so that who has not yet
shown the call can give the text instead.

How a call is read is `call_reader`'s. Called by `server.message_reader`.
"""

from __future__ import annotations

from collections.abc import Set

from penstock.tokenizer.call_reader import SPACES, CallReader
from penstock.tokenizer.pieces import Piece, PieceList, partial_marker
from penstock.tokenizer.tool_formats import ToolFormat


class ToolCallParser:
    """Of one answer.

    Args:
        form: of the model's calls.
        names: tools of the request.

    Attributes:
        num_sound: calls that are whole, with arguments that are a JSON object.
    """

    def __init__(self, form: ToolFormat, names: Set[str]) -> None:
        self.num_sound = 0
        self._form = form
        self._names = names
        self._pieces = PieceList()
        self._held = ""  # content that may be the beginning of a marker, or white space before one
        self._at_start = form.is_bare
        self._after_call = False  # white space that comes now is none of the content
        self._closing_is_due = False
        self._reader: CallReader | None = None  # of calls that have begun, perhaps

    def feed(self, text: str) -> list[Piece]:
        """What these characters bring."""
        while text:
            text = self._scan(text) if self._reader is None else self._read(self._reader, text)
        return self._pieces.taken()

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        if self._reader is not None:
            self._reader.finish()
            self.num_sound += self._reader.num_sound
        elif not (self._closing_is_due and self._form.closing.startswith(self._held.strip(SPACES))):
            self._pieces.give("content", self._held)
        self._held, self._reader = "", None
        return self._pieces.taken()

    def _read(self, reader: CallReader, text: str) -> str:
        """Let calls be read; the text behind them."""
        rest = reader.read(text)
        if reader.is_done:
            self._reader = None
            self.num_sound += reader.num_sound
            self._closing_is_due = reader.num_calls > 0
            self._after_call = self._closing_is_due and not reader.ends_in_text
        return rest

    def _scan(self, text: str) -> str:
        """Look for the next call; the text behind its marker, for `_read`."""
        text, self._held = self._held + text, ""
        if self._after_call:
            text = text.lstrip(SPACES)
        if self._at_start and self._has_bare_call(text):
            return self._begin(text, len(text) - len(text.lstrip(SPACES)), "")
        at, marker = self._first_marker(text)
        if not marker:
            self._hold_back(text)
            return ""
        if marker == self._form.opening:
            return self._begin(text, at, marker)
        self._closing(text[:at], marker)
        return text[at + len(marker) :]

    def _first_marker(self, text: str) -> tuple[int, str]:
        """Where it stands, and which; "" where there is none."""
        form = self._form
        found = [(at, m) for m in (form.opening, form.closing) if m and (at := text.find(m)) >= 0]
        return min(found, default=(len(text), ""))

    def _has_bare_call(self, text: str) -> bool:
        """Whether what may be a call without a marker begins here."""
        shown = text.lstrip(SPACES)
        if shown:
            self._at_start = False
        return shown.startswith(("{", "["))

    def _begin(self, text: str, at: int, marker: str) -> str:
        """Start reading calls whose marker, or first bracket, stands at `at`."""
        kept = text[:at].rstrip(SPACES)
        self._pieces.give("content", kept)
        end = at + len(marker)
        before = text[len(kept) : end]
        self._at_start = self._after_call = self._closing_is_due = False
        self._reader = CallReader(self._form, self._names, self._pieces, before, is_marked=bool(marker))
        return text[end:]

    def _closing(self, before: str, marker: str) -> None:
        """A closing marker is content only where it closes no call."""
        belongs, self._closing_is_due = self._closing_is_due, False
        self._pieces.give("content", before.rstrip(SPACES) if belongs else before + marker)
        self._after_call = belongs

    def _hold_back(self, text: str) -> None:
        keep = min(partial_marker(text, marker) for marker in (self._form.opening, self._form.closing))
        shown = text[:keep].rstrip(SPACES)
        self._held = text[len(shown) :]
        if shown:
            self._after_call = False
        self._pieces.give("content", shown)
