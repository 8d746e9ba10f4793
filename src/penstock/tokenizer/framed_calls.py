"""Reads calls whose name and arguments stand between marks, as a `Frame` of `tool_formats` says.

Arguments are given as JSON, however they were written:

- JSON is given word for word, as it comes.
- Text between tags becomes a value of a type that the tool's schema declares. A string is given as it comes,
  another value once it is whole.
- Literals of Python and of Gemma become the JSON that means the same, as they come.

Marks may have any white space between their words, and the marks behind a call may be missing. As in
`call_reader`, each method that reads is a generator: it yields when it has taken the character in `_char`.
Called by `tool_calls`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Set
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from penstock.tokenizer.argument_types import ArgumentTypes, Schema, json_argument
from penstock.tokenizer.call_reader import NAME, SPACES, CallReader, NotACall, Reading
from penstock.tokenizer.literals import PYTHON_QUOTES, LiteralReader, NotALiteral, in_json
from penstock.tokenizer.nested_arguments import nested_argument
from penstock.tokenizer.pieces import PieceList
from penstock.tokenizer.tool_formats import Frame, Tags, ToolFormat

_WORD = re.compile(r"<[^<>\n]*>?|[^<\n]+")
_IN_NAME = re.compile(r"[\w.:/-]")
_INDEX = re.compile(r"(.*?):([0-9]{1,6})")
_MAX_NAME = 160
_MAX_KEY = 256
_MAX_ATTRIBUTES = 64
_END_OF_TEXT = "\0"

Schemas = Mapping[str, Schema | None]


class _MarkReader(CallReader):
    """Reads marks, with any white space between their words."""

    def _words(self, text: str) -> Reading:
        """Read a mark, with any white space before each of its words."""
        for word in _words_of(text):
            yield from self._spaces()
            yield from self._literal(word)

    def _forgiven(self, text: str) -> Reading:
        """Read a mark if it begins here."""
        yield from self._spaces()
        if text and self._char == _words_of(text)[0][0]:
            yield from self._words(text)

    def _either(self, *texts: str) -> Generator[None, None, str]:
        """Read the one of these marks that stands here, and return it."""
        rest, index = list(texts), 0
        while True:
            fitting = [text for text in rest if _letters_of(text)[index] == self._char]
            if fitting:
                rest, index = fitting, index + 1
                yield
                whole = [text for text in rest if len(_letters_of(text)) == index]
                if whole:
                    return whole[0]
            elif index and self._char in SPACES and any(index in _breaks_of(text) for text in rest):
                yield
            else:
                raise NotACall

    def _with_attributes(self, mark: str) -> Generator[None, None, str]:
        """Read a mark behind whose first character attributes may stand; return the attributes."""
        yield from self._spaces()
        self._expect(mark[0])
        yield
        rest, attributes = mark[1:].strip(SPACES), ""
        while not attributes.endswith(rest):
            attributes += self._char
            if len(attributes) > _MAX_ATTRIBUTES:
                raise NotACall
            yield
        return attributes.removesuffix(rest)


class FramedCallReader(_MarkReader):
    """Reads the calls behind one opening. Arguments that are not listed here are those of `CallReader`.

    Args:
        form: the form of the model's calls; it has a frame.
        schemas: the schema of the arguments of each tool, by the tool's name.
        is_begun: the marker that was read already is the frame's `call_open`, and not an opening before it.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Set[str],
        pieces: PieceList,
        before: str,
        *,
        schemas: Schemas,
        is_begun: bool,
        is_marked: bool = True,
    ) -> None:
        assert form.frame is not None
        super().__init__(form, names, pieces, before, is_marked=is_marked)
        self._frame: Frame = form.frame
        self._schemas = schemas
        self._is_begun = is_begun
        self._made: list[str] = []  # JSON of arguments that was not given yet

    def finish(self) -> None:
        """End the text, and the call with it if it can end here; else the rest becomes content, or broken."""
        self._char = _END_OF_TEXT
        self._raw.append(_END_OF_TEXT)
        with contextlib.suppress(StopIteration, NotACall):
            next(self._reading)
        if self._raw and self._raw[-1] == _END_OF_TEXT:
            self._raw.pop()
        self._made.clear()
        if not self._is_between_ends():
            super().finish()

    def _is_between_ends(self) -> bool:
        """Return whether all that was read behind a sound call is a part of the marks behind calls."""
        if not self._is_sound or not self._is_sound[-1] or self._arguments_at is not None:
            return False
        ends = self._frame.call_end + self._frame.section_end
        read, marks = (re.sub(r"\s", "", text) for text in ("".join(self._raw), ends))
        return read in marks

    def _calls(self) -> Reading:
        if not self._is_begun:
            yield from self._words(self._frame.section_open + self._frame.call_open)
        is_more = True
        while is_more:
            yield from self._call()
            if not self._is_sound[-1]:
                return
            is_more = bool(self._frame.section_end) and (yield from self._has_next())

    def _call(self) -> Reading:
        """Read a call from its id or name to its end.

        Once the name was given as a piece, text that does not fit makes the call broken.
        """
        yield from self._spaces()
        given = ""
        if self._frame.id_end:
            given = yield from self._word_of_name()
            yield from self._words(self._frame.id_end)
        name, id_ = yield from self._name()
        id_ = id_ or given
        try:
            if self._frame.body == "json":
                yield from self._json(name, id_)
            elif self._frame.body == "tags":
                yield from self._tagged(name, id_)
            else:
                yield from self._literal_arguments(name, id_)
        except NotACall:
            if self._arguments_at is None:
                raise
            self._note_unsound()

    def _has_next(self) -> Generator[None, None, bool]:
        """Read what stands behind a call: the beginning of the next one, or the end of the section."""
        frame = self._frame
        yield from self._spaces()
        between = frame.separator.strip() or frame.call_open
        texts = [text for text in (frame.section_end, between) if text]
        if all(self._char != _words_of(text)[0][0] for text in texts):
            return not between and self._char != _END_OF_TEXT and bool(_IN_NAME.match(self._char))
        found = yield from self._either(*texts)
        if found == frame.section_end:
            return False
        if frame.separator.strip():
            yield from self._spaces()
            yield from self._words(frame.call_open)
        return True

    def _name(self) -> Generator[None, None, tuple[str, str]]:
        """Read the name of a tool; return it, and the id that the model gave the call."""
        text = yield from self._word_of_name()
        name, id_ = text.removeprefix(self._frame.prefix), ""
        if self._frame.has_index and (match := _INDEX.fullmatch(name)):
            name, id_ = match[1], text
        if not NAME.fullmatch(name) or not (self._is_marked or name in self._names):
            raise NotACall
        return name, id_

    def _word_of_name(self) -> Generator[None, None, str]:
        text = ""
        while _IN_NAME.match(self._char) and len(text) <= _MAX_NAME:
            text += self._char
            yield
        return text

    def _end_of_name(self) -> Reading:
        if self._frame.number_attribute:
            yield from self._with_attributes(self._frame.name_end)
        else:
            yield from self._words(self._frame.name_end)

    # --- arguments ------------------------------------------------------------------------------------

    def _json(self, name: str, id_: str) -> Reading:
        yield from self._end_of_name()
        yield from self._spaces()
        self._expect("{")
        yield from self._streamed(name, id_)
        yield from self._forgiven(self._frame.call_end)
        self._note_broken()

    def _tagged(self, name: str, id_: str) -> Reading:
        tags = self._frame.tags
        assert tags is not None
        yield from self._end_of_name()
        yield from self._spaces()
        is_argument = yield from self._is_argument(tags)
        self._begin(name, id_)
        types = ArgumentTypes(self._schemas.get(name) or {})
        properties = types.root.get("properties")
        before = "{"
        while is_argument:
            key, says = yield from self._key_of(tags)
            self._made.append(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            yield from self._value_of(_Argument(key, says or types.of(schema), schema, types), tags)
            yield from self._spaces()
            is_argument = yield from self._is_argument(tags)
        self._made.append("{}" if before == "{" else "}")
        self._note_sound()

    def _is_argument(self, tags: Tags) -> Generator[None, None, bool]:
        """Read the mark before an argument or the one behind the call; return whether an argument follows."""
        end = self._frame.call_end
        if not end.startswith(tags.key_open):
            found = yield from self._either(tags.key_open, end)
            return found == tags.key_open
        yield from self._words(tags.key_open)
        rest = end[len(tags.key_open) :]
        if self._char != rest[0]:
            return True
        yield from self._words(rest)
        return False

    def _key_of(self, tags: Tags) -> Generator[None, None, tuple[str, frozenset[str]]]:
        """Read the name of an argument up to the value; return the name, and the types that the tag gives."""
        first, key = tags.key_end.strip()[0], ""
        while self._char != first:
            key += self._char
            if len(key) > _MAX_KEY:
                raise NotACall
            yield
        if not tags.type_attribute:
            yield from self._words(tags.key_end)
            return key.strip(), frozenset()
        attributes = yield from self._with_attributes(tags.key_end)
        told = re.search(re.escape(tags.type_attribute.strip()).replace(r"\{\}", r"(\w+)"), attributes)
        return key.strip(), _TOLD_TYPES.get(told[1], frozenset()) if told else frozenset()

    def _value_of(self, argument: _Argument, tags: Tags) -> Reading:
        if argument.types == {"string"}:
            self._made.append('"')
            yield from self._value_text(
                tags, argument.key, lambda character: self._made.append(in_json(character))
            )
            self._made.append('"')
            return
        parts: list[str] = []
        yield from self._value_text(tags, argument.key, parts.append)
        text = "".join(parts)
        if tags.is_nested:
            self._made.append(nested_argument(text, tags, argument.schema, argument.tool_types))
        else:
            self._made.append(json_argument(text, argument.types))

    def _value_text(self, tags: Tags, key: str, take: Callable[[str], None]) -> Reading:
        """Read text up to the mark that ends it, without padding and quotes beside the marks."""
        end, padding, (quote, unquote) = tags.end_of(key).strip(SPACES), tags.padding, tags.quotes
        if padding and self._char == padding:
            yield
        held = ""  # text that may be the beginning of the mark behind the value
        while len(held) < len(quote) and self._char == quote[len(held)]:
            held += self._char
            yield
        if quote and held == quote:
            held, end = "", unquote + end
        ends = (padding + end, end)
        while True:
            held += self._char
            while held and not any(mark.startswith(held) for mark in ends):
                take(held[0])
                held = held[1:]
            is_ended = held in ends
            yield
            if is_ended:
                return

    def _literal_arguments(self, name: str, id_: str) -> Reading:
        """Read arguments that are literals: an object, or the keywords of a call in Python."""
        yield from self._end_of_name()
        if self._frame.body == "python":
            self._begin(name, id_)
            yield from self._keywords()
        else:
            self._expect("{")
            self._begin(name, id_)
            yield from self._literal_value((self._frame.quote,))
        yield from self._words(self._frame.call_end)
        self._note_sound()

    def _keywords(self) -> Reading:
        """Read `name=value, ...` up to the closing bracket."""
        before = "{"
        yield from self._spaces()
        while self._char != ")":
            key = ""
            while self._char.isalnum() or self._char == "_":
                key += self._char
                yield
            yield from self._spaces()
            self._expect("=")
            yield
            self._made.append(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._literal_value(PYTHON_QUOTES)
            yield from self._spaces()
            if self._char != ")":
                self._expect(",")
                yield
                yield from self._spaces()
        self._made.append("{}" if before == "{" else "}")

    def _literal_value(self, quotes: tuple[str, ...]) -> Reading:
        reader = LiteralReader(self._made, quotes)
        steps = reader.value()
        while True:
            reader.char = self._char
            try:
                next(steps)
            except StopIteration:
                return
            except NotALiteral:
                raise NotACall from None
            yield

    # --- begin and end of a call ----------------------------------------------------------------------

    def _begin(self, name: str, id_: str) -> None:
        self._pieces.give("call", name, id_)
        self._arguments_at = 0

    def _give_arguments(self) -> None:
        if self._frame.body == "json":
            super()._give_arguments()
        elif self._arguments_at is not None:
            self._pieces.give("arguments", "".join(self._made))
            self._made.clear()

    def _note_sound(self) -> None:
        """Note that all that was read before the character in hand is a call that is whole."""
        self._give_arguments()
        self._is_sound.append(True)
        self._arguments_at = None
        del self._raw[:-1]

    def _note_unsound(self) -> None:
        """Note that what was read before the character in hand is a call that breaks off."""
        self._give_arguments()
        self._is_sound.append(False)
        self._arguments_at = None
        self._broken_end = len(self._raw) - 1


class _Argument(NamedTuple):
    """What is known of an argument before its value is read."""

    key: str
    types: frozenset[str]  # types that the value may have; empty: any
    schema: Any  # of the value
    tool_types: ArgumentTypes  # the types of all arguments of the tool


_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_TOLD_TYPES = {name: frozenset({name}) for name in _TYPES} | {
    "true": frozenset({"string"}),
    "false": _TYPES - {"string"},
}


@cache
def _words_of(text: str) -> tuple[str, ...]:
    """Return the words of a mark, between which there may be white space."""
    return tuple(word for part in _WORD.findall(text) if (word := part.strip(SPACES)))


@cache
def _letters_of(text: str) -> str:
    """Return a mark without the white space between its words."""
    return "".join(_words_of(text))


@cache
def _breaks_of(text: str) -> frozenset[int]:
    """Return the positions in the letters of a mark (`_letters_of`) at which there may be white space."""
    return frozenset(accumulate(map(len, _words_of(text))))
