"""Finds calls of tools in the text of an answer that comes in pieces.

One `ToolCallParser` serves all families: a row of `form_table` gives it the markers. What it gives does not
depend on how the text was cut. A call *begins* where its name is known and the bracket, or mark, before its
arguments has come. From there on the arguments are given as they come.

These are calls:

- behind an opening marker: an object with `name` and `arguments` (or `parameters`), or a list of such
  objects; in families that write so, a name and an object behind it, or a name and arguments between marks;
- in families that need no marker: the same at the beginning of the answer, if the name is a tool of the
  request.

Arguments that are an object are given word for word, from the first bracket to the one that closes it. All
that is not a call is content, word for word too, except for white space beside calls. If a call breaks off,
or its arguments are not a JSON object, a piece `broken` follows with all of its text, also the brackets and
the marker that close it. So a caller that has not shown the call yet can show the text instead.

Each character is looked at a bounded number of times, however often markers occur in the text, and however
the text was cut. `call_reader` and `framed_calls` read the calls. Called by `server.openai.message_reader`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from penstock.tokenizer.call_reader import SPACES, CallReader
from penstock.tokenizer.framed_calls import FramedCallReader, Schemas
from penstock.tokenizer.pieces import Piece, PieceList, partial_marker
from penstock.tokenizer.tool_formats import ToolFormat

_SPACE = re.compile(f"[{SPACES}]*")


class MarkerFinder:
    """Finds markers in one text, from left to right.

    Attributes:
        num_scanned: characters that were looked at, added up over all markers.
    """

    def __init__(self, text: str, markers: Sequence[str]) -> None:
        self.num_scanned = 0
        self._text = text
        self._next = dict.fromkeys(markers, -1)  # where each stands next; the text's length: nowhere

    def first(self, pos: int) -> tuple[int, str]:
        """Return the position and text of the first marker at or behind `pos`; "" if there is none.

        `pos` may not be lower than in the call before.
        """
        for marker, at in self._next.items():
            if at < pos:
                self._next[marker] = self._find(marker, pos)
        at, marker = min(((at, marker) for marker, at in self._next.items()), default=(len(self._text), ""))
        return (at, marker) if at < len(self._text) else (at, "")

    def _find(self, marker: str, pos: int) -> int:
        at = self._text.find(marker, pos)
        if at < 0:
            at = len(self._text)
        self.num_scanned += at - pos
        return at


class ToolCallParser:
    """Finds the calls in one answer.

    Args:
        form: the form of the model's calls.
        names: names of the request's tools.
        schemas: the schema of each tool's arguments, by name. It gives the types of values without quotes.

    Attributes:
        num_sound: calls that are whole, with arguments that are a JSON object.
    """

    def __init__(self, form: ToolFormat, names: Set[str], schemas: Schemas | None = None) -> None:
        self.num_sound = 0
        self._form = form
        self._markers = tuple(marker for marker in (*form.openings, form.closing) if marker)
        self._names = names
        self._schemas = schemas or {}
        self._num_fed = 0  # characters
        self._base = 0  # characters before the text in hand
        self._pieces = PieceList()
        self._spaces: list[str] = []  # white space: content, unless a call or its closing marker follows
        self._partial = ""  # text behind it that may be the beginning of a marker
        self._broken = ""  # a call that is not sound, whose closing marker may follow
        self._at_start = form.is_bare
        self._after_call = False  # white space that comes now is not content
        self._closing_is_due = False
        self._reader: CallReader | None = None  # reads what may be calls

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that these characters bring."""
        self._num_fed += len(text)
        text, self._partial = self._partial + text, ""
        self._base = self._num_fed - len(text)
        markers = self._markers_in(text)
        pos = 0
        while pos < len(text):
            if self._reader is None:
                pos = self._scan(text, pos, markers)
            else:
                pos = self._read(self._reader, text, pos)
        return self._pieces.taken()

    def finish(self) -> list[Piece]:
        """Return what was held back, when no more text comes."""
        if self._reader is not None:
            self._reader.finish()
            self._pieces.give_content(self._reader.content, self._num_fed)
            self.num_sound += self._reader.num_sound
            self._reader = None
        held, self._partial = self._led(self._partial), ""
        is_closing = self._closing_is_due and self._form.closing.startswith(held.strip(SPACES))
        if self._broken and is_closing:
            self._pieces.give("broken", self._broken + held)
        elif not is_closing:
            self._give_broken()
            self._pieces.give_content(held, self._num_fed)
        self._broken = ""
        return self._pieces.taken()

    def _markers_in(self, text: str) -> MarkerFinder:
        return MarkerFinder(text, self._markers)

    def _read(self, reader: CallReader, text: str, pos: int) -> int:
        """Let the reader read on; return where the text behind its calls begins."""
        pos = reader.read(text, pos)
        if reader.is_done:
            self._pieces.give_content(reader.content, self._base + pos)
            self._reader = None
            self.num_sound += reader.num_sound
            self._broken, spaces = reader.broken, reader.rest
            self._spaces = [spaces] if spaces else []
            self._closing_is_due = reader.is_open
            self._after_call = reader.is_open and not self._broken and not reader.ends_in_text
        return pos

    def _scan(self, text: str, pos: int, markers: MarkerFinder) -> int:
        """Look for the next marker; return where the text behind it begins, or the text's end."""
        if self._after_call:
            pos = _behind_spaces(text, pos)
        if self._at_start:
            first = _behind_spaces(text, pos)
            self._at_start = first == len(text)
            if text[first : first + 1] in ("{", "["):
                return self._begin(text, pos, first, "")
        at, marker = markers.first(pos)
        if not marker or (marker == self._form.closing and self._may_be_opening(text, pos, at)):
            self._hold_back(text, pos)
            return len(text)
        if marker != self._form.closing:
            return self._begin(text, pos, at, marker)
        self._closing(self._led(text[pos:at]), marker, self._base + at)
        return at + len(marker)

    def _may_be_opening(self, text: str, pos: int, at: int) -> bool:
        """Return whether the closing marker at `at` may be a part of an opening one that is not whole yet."""
        closing, openings = self._form.closing, self._form.openings
        return any(closing in opening and partial_marker(text, opening, pos) < at for opening in openings)

    def _begin(self, text: str, pos: int, at: int, marker: str) -> int:
        """Start reading calls whose marker, or first bracket, stands at `at`."""
        self._give_broken()
        before = self._led(text[pos:at])
        kept = before.rstrip(SPACES)
        before = before[len(kept) :]
        self._pieces.give_content(kept, self._base + at - len(before))
        before += marker
        self._at_start = self._after_call = self._closing_is_due = False
        self._reader = self._reader_of(before, marker)
        return at + len(marker)

    def _reader_of(self, before: str, marker: str) -> CallReader:
        frame = self._form.frame
        if frame is None:
            return CallReader(self._form, self._names, self._pieces, before, is_marked=bool(marker))
        return FramedCallReader(
            self._form,
            self._names,
            self._pieces,
            before,
            schemas=self._schemas,
            is_begun=bool(marker) and marker == frame.call_open,
            is_marked=bool(marker),
        )

    def _closing(self, before: str, marker: str, at: int) -> None:
        """Take a closing marker, which is content only if it closes no call.

        Args:
            before: the text before the marker since the last call or marker.
            at: number of characters of the answer before the marker.
        """
        if self._broken and not before.strip(SPACES):
            self._broken += before + marker
            self._give_broken()
            return
        self._give_broken()
        belongs, self._closing_is_due = self._closing_is_due, False
        if belongs:
            kept = before.rstrip(SPACES)
            self._pieces.give_content(kept, at - len(before) + len(kept))
        else:
            self._pieces.give_content(before + marker, at + len(marker))
        self._after_call = belongs

    def _hold_back(self, text: str, pos: int) -> None:
        keep = min((partial_marker(text, marker, pos) for marker in self._markers), default=len(text))
        behind, self._partial = text[pos:keep], text[keep:]
        shown = behind.rstrip(SPACES)
        if shown:
            self._give_broken()
            self._after_call = False
            self._pieces.give_content(self._led(shown), self._base + pos + len(shown))
        if len(shown) < len(behind):
            self._spaces.append(behind[len(shown) :])

    def _led(self, text: str) -> str:
        """Return the text with the white space that was held back before it."""
        spaces, self._spaces = self._spaces, []
        return "".join([*spaces, text])

    def _give_broken(self) -> None:
        """Give the broken call, if there is one: what follows is not a part of it."""
        if self._broken:
            self._pieces.give("broken", self._broken)
            self._broken, self._closing_is_due = "", False


def _behind_spaces(text: str, pos: int) -> int:
    match = _SPACE.match(text, pos)
    assert match is not None
    return match.end()
