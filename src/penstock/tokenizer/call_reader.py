"""Reads one call of a tool, or several that stand together, character by character.

Each rule of the grammar of calls is a generator. It begins at the character in `_char`; when it has taken
that character it yields, and then finds the next one in `_char`. It ends at the first character that does not
belong to it. `tool_calls` makes a reader for each place where a call may begin; its docstring says what a
call is.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Set

import msgspec

from penstock.tokenizer.pieces import PieceList
from penstock.tokenizer.tool_formats import CALL_ID, NAME_END, ToolFormat

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SPACES = " \t\r\n"
_SEPARATORS = ";,"  # between calls without markers
_MAX_NAME = 64
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type", "tool_call_id")  # keys that some models write into a call

Reading = Generator[None, None, None]


class NotACall(Exception):
    """Raised when the text since the last call is content."""


class CallReader:
    """Reads calls that stand together, and hands them to a list of pieces.

    Args:
        form: the form of the model's calls.
        names: names of the request's tools.
        pieces: the list to which the calls go.
        before: text that was read already: a marker, and white space before it.
        is_marked: whether there is a marker.

    Attributes:
        is_done: whether the calls have ended.
        broken: once it is done: the text of the last call, if that is not sound and was not given as a piece.
        rest: white space that was read after the broken call.
    """

    def __init__(
        self, form: ToolFormat, names: Set[str], pieces: PieceList, before: str, *, is_marked: bool
    ) -> None:
        self.is_done = False
        self._text: str | None = None  # what was read as the next call, and is not one
        self.broken = ""
        self.rest = ""
        self._form = form
        self._names = names
        self._pieces = pieces
        self._is_marked = is_marked
        self._char = ""
        self._raw = list(before)  # what was read since the last sound call, `_char` included
        self._broken_end = 0  # how many characters of `_raw` are a call that is not sound
        self._arguments_at: int | None = None  # where in `_raw` the arguments of a begun call begin
        self._num_given = 0  # characters of these arguments that were given
        self._is_sound: list[bool] = []  # of each call that was read to its end
        self._reading = self._calls()

    @property
    def ends_in_text(self) -> bool:
        """Whether the text that was taken for another call turned out not to be one."""
        return self._text is not None

    @property
    def content(self) -> str:
        """The text that was taken for a call and is not one; it ends where reading ended."""
        return self._text or ""

    @property
    def is_open(self) -> bool:
        """Whether a closing marker may follow: there was a call, and no text behind it if it is broken."""
        return bool(self._is_sound) and (self._is_sound[-1] or bool(self.broken))

    @property
    def num_sound(self) -> int:
        """The number of calls that were read to their end, with arguments that are a JSON object."""
        return sum(self._is_sound)

    def read(self, text: str, pos: int) -> int:
        """Read on from `pos`; return the position of the first character that is not part of calls."""
        reading, raw = self._reading, self._raw
        for index in range(pos, len(text)):
            self._char = text[index]
            raw.append(self._char)
            try:
                next(reading)
            except StopIteration:
                self.is_done = True
                if self._broken_end:
                    self.broken = "".join(raw[: self._broken_end])
                    self.rest = "".join(raw[self._broken_end : -1])
                return index
            except NotACall:
                raw.pop()
                self._give_broken(self._broken_end)
                self._text = "".join(raw)
                self.is_done = True
                return index
        self._give_arguments()
        return len(text)

    def finish(self) -> None:
        """End the text. An unfinished call is given as broken if its name was given, else it is `content`."""
        raw = "".join(self._raw)
        if self._arguments_at is not None or self._broken_end:
            self._pieces.give("broken", raw)
        elif not self._is_sound or raw.strip(SPACES + _SEPARATORS + "]"):
            self._text = raw

    def _calls(self) -> Reading:
        yield from self._spaces()
        if self._char == "[" and not self._form.is_named:
            yield from self._list()
        elif self._char == "{":
            yield from self._object()
            yield from self._more_objects()
        elif self._is_marked and self._form.has_short_ids:
            yield from self._named()
        else:
            raise NotACall

    def _list(self) -> Reading:
        while True:
            yield  # the bracket, or the comma
            yield from self._spaces()
            yield from self._object()
            yield from self._spaces()
            if self._char != ",":
                break
        if self._char == "]":
            yield
            self._note_broken()

    def _more_objects(self) -> Reading:
        """Read further objects, if the family's calls need no marker or several stand behind one."""
        while self._form.is_bare or self._form.is_lines:
            yield from self._spaces()
            is_separated = self._char in _SEPARATORS
            if is_separated:
                yield
                yield from self._spaces()
            if self._char == "{":
                yield from self._object()
            elif is_separated:
                raise NotACall  # the separator is a part of the text
            else:
                return

    def _object(self) -> Reading:
        """Read a call that is an object, its keys in any order."""
        self._expect("{")
        self._give_broken(len(self._raw) - 1)  # all before this belongs to a broken call, if there is one
        name, arguments = "", "{}"
        while True:
            yield  # the bracket, or the comma
            key = yield from self._key()
            if key in ("name", self._form.name_key):
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
                raise NotACall
            yield from self._spaces()
            if self._char != ",":
                break
        self._expect("}")
        self._pieces.give("call", self._checked(name))
        self._pieces.give("arguments", arguments)
        self._note_end(is_sound=True)
        yield

    def _end_of_object(self) -> Reading:
        """Read what stands behind the arguments. The closing bracket may be missing."""
        yield from self._spaces()
        while self._char == ",":
            yield
            yield from self._key()
            yield from self._string()
            yield from self._spaces()
        if self._char == "}":
            if not self._broken_end:
                self._raw.clear()
            yield
            self._note_broken()

    def _named(self) -> Reading:
        name = ""
        while self._char not in "[{" + SPACES and len(name) <= _MAX_NAME:
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
        raise NotACall

    def _streamed(self, name: str, id_: str = "") -> Reading:
        """Read the arguments, from their first bracket to their last, and give them as they come."""
        self._pieces.give("call", name, id_)
        self._arguments_at, self._num_given = len(self._raw) - 1, 0
        yield from self._balanced()
        arguments = "".join(self._raw[self._arguments_at :])
        self._give_arguments()
        self._arguments_at = None
        self._note_end(is_sound=is_json_object(arguments))
        yield

    def _note_end(self, *, is_sound: bool) -> None:
        """Note that what was read so far is a call: it is dropped if it is sound, else kept as broken."""
        self._is_sound.append(is_sound)
        if is_sound:
            self._raw.clear()
        else:
            self._broken_end = len(self._raw)

    def _note_broken(self) -> None:
        """Note that a call that is not sound, if there is one, ends right before the character in hand."""
        if self._broken_end:
            self._broken_end = len(self._raw) - 1

    def _give_broken(self, end: int) -> None:
        """Give the first `end` characters of `_raw` as broken, if a call among them is not sound."""
        if self._broken_end:
            self._pieces.give("broken", "".join(self._raw[:end]))
            del self._raw[:end]
            self._broken_end = 0

    def _give_arguments(self) -> None:
        if self._arguments_at is not None:
            begun = self._raw[self._arguments_at + self._num_given :]
            self._pieces.give("arguments", "".join(begun))
            self._num_given += len(begun)

    # --- words ----------------------------------------------------------------------------------------

    def _expect(self, character: str) -> None:
        if self._char != character:
            raise NotACall

    def _spaces(self) -> Reading:
        while self._char in SPACES:
            yield

    def _literal(self, word: str) -> Reading:
        for character in word:
            self._expect(character)
            yield

    def _key(self) -> Generator[None, None, str]:
        """Read a key with its colon, and the white space around them; return the key."""
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
            raise NotACall from None

    def _value(self) -> Generator[None, None, str]:
        """Return arguments that are not given as they come: they stand before the name, or in a string."""
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
        raise NotACall

    def _balanced(self) -> Reading:
        """Read from a bracket up to the one that closes it, which is still to be read."""
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
