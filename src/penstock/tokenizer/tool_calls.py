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

Called by `server.message_reader`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Set
from typing import Literal

import msgspec

from penstock.tokenizer.tool_formats import CALL_ID, NAME_END, ToolFormat

PieceKind = Literal["content", "reasoning", "call", "arguments", "broken"]

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SPACES = " \t\r\n"
_SEPARATORS = ";,"  # between calls without markers
_MAX_NAME = 64
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type")  # keys that some models write into a call

_Reading = Generator[None, None, None]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A part of an answer.

    Attributes:
        kind: "content" and "reasoning": text. "call": a call begins; the text is its name. "arguments": more
            of its arguments. "broken": it is not sound; the text is all of it, the marker before it included.
    """

    kind: PieceKind
    text: str


class _NotACall(Exception):
    """What was read since the last call is content."""


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
        self._pieces: list[Piece] = []
        self._held = ""  # content that may be the beginning of a marker, or white space before one
        self._at_start = form.is_bare
        self._after_call = False  # white space that comes now is none of the content
        self._closing_is_due = False
        self._reading: _Reading | None = None  # of calls, from their marker or first bracket on
        self._is_marked = False  # they stand behind a marker
        self._char = ""  # the one that `_reading` looks at; it has read it when it yields
        self._raw: list[str] = []  # what it has read since the last whole call, `_char` included
        self._arguments_at: int | None = None  # those of a call that has begun: where they begin in `_raw`
        self._num_given = 0  # characters of them

    def feed(self, text: str) -> list[Piece]:
        """What these characters bring."""
        while text:
            text = self._scan(text) if self._reading is None else self._read(text)
        self._give_arguments()
        return self._taken()

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        raw = "".join(self._raw)
        if self._reading is None:
            is_marker = self._closing_is_due and self._form.closing.startswith(self._held.strip(_SPACES))
            self._give("content", "" if is_marker else self._held)
        elif self._arguments_at is not None:
            self._give("broken", raw)
        elif not self._after_call or raw.strip(_SPACES + _SEPARATORS + "]"):
            self._give("content", raw)
        self._held, self._reading = "", None
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _give(self, kind: PieceKind, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if kind == "content" and last is not None and last.kind == "content":
            self._pieces[-1] = Piece(kind, last.text + text)
        else:
            self._pieces.append(Piece(kind, text))

    # --- outside of calls -----------------------------------------------------------------------------

    def _scan(self, text: str) -> str:
        """Look for the next call; the text behind its marker, which `_read` is for."""
        text, self._held = self._held + text, ""
        if self._after_call:
            text = text.lstrip(_SPACES)
        if self._at_start and self._has_bare_call(text):
            return self._begin(text, len(text) - len(text.lstrip(_SPACES)), "")
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
        shown = text.lstrip(_SPACES)
        if shown:
            self._at_start = False
        return shown.startswith(("{", "["))

    def _begin(self, text: str, at: int, marker: str) -> str:
        """Start reading calls whose marker, or first bracket, stands at `at`."""
        kept = text[:at].rstrip(_SPACES)
        self._give("content", kept)
        end = at + len(marker)
        self._raw = list(text[len(kept) : end])
        self._at_start = self._after_call = self._closing_is_due = False
        self._is_marked = bool(marker)
        self._reading = self._calls()
        return text[end:]

    def _closing(self, before: str, marker: str) -> None:
        """A closing marker is content only where it closes no call."""
        belongs, self._closing_is_due = self._closing_is_due, False
        self._give("content", before.rstrip(_SPACES) if belongs else before + marker)
        self._after_call = belongs

    def _hold_back(self, text: str) -> None:
        keep = min(partial_marker(text, marker) for marker in (self._form.opening, self._form.closing))
        shown = text[:keep].rstrip(_SPACES)
        self._held = text[len(shown) :]
        if shown:
            self._after_call = False
        self._give("content", shown)

    # --- inside ---------------------------------------------------------------------------------------

    def _read(self, text: str) -> str:
        """Let `_reading` read; the text from the first character on that it does not take."""
        reading, raw = self._reading, self._raw
        assert reading is not None
        for index, character in enumerate(text):
            self._char = character
            raw.append(character)
            try:
                next(reading)
            except StopIteration:
                self._reading = None
                return text[index:]
            except _NotACall:
                self._give("content", "".join(raw[:-1]))
                self._reading, self._after_call = None, False
                return text[index:]
        return ""

    def _calls(self) -> _Reading:
        yield from self._spaces()
        if self._char == "[" and not self._form.is_named:
            yield from self._list()
        elif self._char == "{":
            yield from self._object()
            yield from self._more_objects()
        elif self._is_marked and self._form.has_short_ids:
            yield from self._named()
        else:
            raise _NotACall

    def _list(self) -> _Reading:
        while True:
            yield  # the bracket, or the comma
            yield from self._spaces()
            yield from self._object()
            yield from self._spaces()
            if self._char != ",":
                break
        if self._char == "]":
            yield

    def _more_objects(self) -> _Reading:
        """Further ones, where a call needs no marker."""
        while self._form.is_bare:
            yield from self._spaces()
            is_separated = self._char in _SEPARATORS
            if is_separated:
                yield
                yield from self._spaces()
            if self._char == "{":
                yield from self._object()
            elif is_separated:
                raise _NotACall  # it is a part of the text
            else:
                return

    def _object(self) -> _Reading:
        """A call as an object, its keys in any order."""
        self._expect("{")
        name, arguments = "", "{}"
        while True:
            yield  # the bracket, or the comma
            key = yield from self._key()
            if key == "name":
                name = self._checked((yield from self._string()))
            elif key in _ARGUMENTS and name and self._char == "{":
                yield from self._streamed(name)
                yield from self._end_of_object()
                return
            elif key in _ARGUMENTS:
                arguments = yield from self._value()
            elif key in _BESIDE:
                yield from self._string()
            else:
                raise _NotACall
            yield from self._spaces()
            if self._char != ",":
                break
        self._expect("}")
        self._give("call", self._checked(name))
        self._give("arguments", arguments)
        self._note_end(is_sound=True)
        yield

    def _end_of_object(self) -> _Reading:
        """What stands behind the arguments; a bracket that is missing is forgiven."""
        yield from self._spaces()
        while self._char == ",":
            yield
            yield from self._key()
            yield from self._string()
            yield from self._spaces()
        if self._char == "}":
            self._note_end(is_sound=False)
            yield

    def _named(self) -> _Reading:
        name = ""
        while self._char not in "[{" + _SPACES and len(name) <= _MAX_NAME:
            name += self._char
            yield
        yield from self._spaces()
        if self._char == "[":
            yield
            if self._char == CALL_ID[1]:
                yield from self._literal(CALL_ID[1:])
                while self._char != "[":
                    yield
                yield
            yield from self._literal(NAME_END[1:])
            yield from self._spaces()
        self._expect("{")
        yield from self._streamed(self._checked(name))

    def _checked(self, name: str) -> str:
        if NAME.fullmatch(name) and (self._is_marked or name in self._names):
            return name
        raise _NotACall

    def _streamed(self, name: str) -> _Reading:
        """The arguments, from their first bracket to their last, as they come."""
        self._give("call", name)
        self._arguments_at, self._num_given = len(self._raw) - 1, 0
        yield from self._balanced()
        arguments = "".join(self._raw[self._arguments_at :])
        self._give_arguments()
        self._arguments_at = None
        is_sound = is_json_object(arguments)
        if not is_sound:
            self._give("broken", "".join(self._raw))
        self._note_end(is_sound=is_sound)
        yield

    def _note_end(self, *, is_sound: bool) -> None:
        """What was read so far is a call: none of it will be content."""
        self.num_sound += is_sound
        self._after_call = self._closing_is_due = True
        self._raw.clear()

    def _give_arguments(self) -> None:
        if self._arguments_at is not None:
            begun = self._raw[self._arguments_at + self._num_given :]
            self._give("arguments", "".join(begun))
            self._num_given += len(begun)

    # --- words of the grammar: each begins at `_char`, and ends with the one behind it there ----------

    def _expect(self, character: str) -> None:
        if self._char != character:
            raise _NotACall

    def _spaces(self) -> _Reading:
        while self._char in _SPACES:
            yield

    def _literal(self, word: str) -> _Reading:
        for character in word:
            self._expect(character)
            yield

    def _key(self) -> Generator[None, None, str]:
        """A key with its colon, and the white space around them."""
        yield from self._spaces()
        key = yield from self._string()
        yield from self._spaces()
        yield from self._literal(":")
        yield from self._spaces()
        return key

    def _string(self) -> Generator[None, None, str]:
        self._expect('"')
        start, escaped = len(self._raw) - 1, False
        yield
        while escaped or self._char != '"':
            escaped = self._char == "\\" and not escaped
            yield
        text = "".join(self._raw[start:])
        yield
        try:
            return msgspec.json.decode(text.encode(), type=str)
        except (msgspec.DecodeError, UnicodeError):
            raise _NotACall from None

    def _value(self) -> Generator[None, None, str]:
        """Arguments that are not given as they come: before the name, or in a string that holds them."""
        if self._char == '"':
            text = yield from self._string()
        else:
            self._expect("{")
            start = len(self._raw) - 1
            yield from self._balanced()
            text = "".join(self._raw[start:])
            yield
        if is_json_object(text):
            return text
        raise _NotACall

    def _balanced(self) -> _Reading:
        """From a bracket to the one that closes it; that one is still to be read."""
        depth, in_string, escaped = 0, False, False
        while True:
            character = self._char
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if not depth:
                    return
            yield


def is_json_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text.encode()), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def partial_marker(text: str, marker: str) -> int:
    """Where the end of the text may be the beginning of the marker; its length where it is not."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
