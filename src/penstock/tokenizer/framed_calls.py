"""Reads calls whose name and arguments stand between marks, as a `Frame` of `tool_formats` says.

Arguments come out as JSON, whatever they were written as: JSON word for word, text between tags by the types
that the tool's schema declares, literals of Python and of Gemma as what they mean. A string is given as it
comes; another value is given once it is whole. Marks are read with any white space between them, and an end
that is missing is forgiven. As in `call_reader`, each method is a generator that yields when it has taken the
character. Called by `tool_calls`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Set
from functools import cache

from penstock.tokenizer.argument_types import Schema, argument_types, json_argument
from penstock.tokenizer.call_reader import NAME, SPACES, CallReader, NotACall, Reading
from penstock.tokenizer.literals import PYTHON_QUOTES, LiteralReader, NotALiteral, in_json
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


class FramedCallReader(CallReader):
    """Reads the calls behind one opening.

    Args:
        form: of the model's calls; it has a frame.
        schemas: of the arguments of each tool, by its name.
        is_begun: what was read already is the frame's own beginning of a call, and not the opening.
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
    ) -> None:
        assert form.frame is not None
        super().__init__(form, names, pieces, before, is_marked=True)
        self._frame: Frame = form.frame
        self._schemas = schemas
        self._is_begun = is_begun
        self._made: list[str] = []  # JSON of arguments that was not given yet

    def finish(self) -> None:
        """Let the call end where the text does, if it can; what stays open is content, or broken."""
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
        """Whether what was read behind a sound call is a part of the marks that end it."""
        if not self._is_sound or not self._is_sound[-1] or self._arguments_at is not None:
            return False
        ends = _squeezed(self._frame.call_end + self._frame.section_end)
        return _squeezed("".join(self._raw)) in ends

    def _calls(self) -> Reading:
        if not self._is_begun:
            yield from self._words(self._frame.call_open)
        is_more = True
        while is_more:
            yield from self._call()
            if not self._is_sound[-1]:
                return
            is_more = bool(self._frame.section_end) and (yield from self._has_next())

    def _call(self) -> Reading:
        """Read a call from its name to its end. Once it was given, what does not fit makes it broken."""
        yield from self._spaces()
        name, id_ = yield from self._name()
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
        text = ""
        while _IN_NAME.match(self._char) and len(text) <= _MAX_NAME:
            text += self._char
            yield
        name, id_ = text.removeprefix(self._frame.prefix), ""
        if self._frame.has_index and (match := _INDEX.fullmatch(name)):
            name, id_ = match[1], text
        if not NAME.fullmatch(name):
            raise NotACall
        return name, id_

    # --- arguments ------------------------------------------------------------------------------------

    def _json(self, name: str, id_: str) -> Reading:
        yield from self._words(self._frame.name_end)
        yield from self._spaces()
        self._expect("{")
        yield from self._streamed(name, id_)
        yield from self._forgiven(self._frame.call_end)
        self._note_broken()

    def _tagged(self, name: str, id_: str) -> Reading:
        frame, tags = self._frame, self._frame.tags
        assert tags is not None
        yield from self._words(frame.name_end)
        yield from self._spaces()
        found = yield from self._either(tags.key_open, frame.call_end)
        self._begin(name, id_)
        root = self._schemas.get(name) or {}
        properties = root.get("properties")
        before = "{"
        while found == tags.key_open:
            key, says = yield from self._key_of(tags)
            self._made.append(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            yield from self._value_of(says or argument_types(schema, root), tags)
            yield from self._spaces()
            found = yield from self._either(tags.key_open, frame.call_end)
        self._made.append("{}" if before == "{" else "}")
        self._note_sound()

    def _key_of(self, tags: Tags) -> Generator[None, None, tuple[str, frozenset[str]]]:
        """Read the name of an argument up to its value; return it, and the types that its tag tells."""
        first, key, attributes = tags.key_end.strip()[0], "", ""
        while self._char != first:
            key += self._char
            if len(key) > _MAX_KEY:
                raise NotACall
            yield
        if not tags.says_type:
            yield from self._words(tags.key_end)
            return key.strip(), frozenset()
        while self._char != ">":
            attributes += self._char
            if len(attributes) > _MAX_ATTRIBUTES:
                raise NotACall
            yield
        yield
        if 'string="true"' in attributes:
            return key.strip(), frozenset({"string"})
        return key.strip(), _ALL_BUT_STRING if 'string="false"' in attributes else frozenset()

    def _value_of(self, types: frozenset[str], tags: Tags) -> Reading:
        if types == {"string"}:
            self._made.append('"')
            yield from self._value_text(tags, lambda character: self._made.append(in_json(character)))
            self._made.append('"')
            return
        text: list[str] = []
        yield from self._value_text(tags, text.append)
        self._made.append(json_argument("".join(text), types))

    def _value_text(self, tags: Tags, take: Callable[[str], None]) -> Reading:
        """Read text up to the tag that ends it, without the padding beside tags."""
        end, padding = _words_of(tags.value_end)[0], tags.padding
        if padding and self._char == padding:
            yield
        matched, held = 0, ""
        while matched < len(end):
            if self._char == end[matched]:
                matched += 1
                yield
                continue
            for character in held + end[:matched] if matched or self._char != padding else held:
                take(character)
            is_matched, matched, held = bool(matched), 0, ""
            if is_matched and self._char == end[0]:
                continue
            if padding and self._char == padding:
                held = padding
            else:
                take(self._char)
            yield

    def _literal_arguments(self, name: str, id_: str) -> Reading:
        """Read arguments that are literals: an object, or the keywords of a call in Python."""
        yield from self._words(self._frame.name_end)
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
        """All that was read before the character in hand is a call that is whole."""
        self._give_arguments()
        self._is_sound.append(True)
        self._arguments_at = None
        del self._raw[:-1]

    def _note_unsound(self) -> None:
        """What was read before the character in hand is a call that breaks off."""
        self._give_arguments()
        self._is_sound.append(False)
        self._arguments_at = None
        self._broken_end = len(self._raw) - 1

    # --- marks ----------------------------------------------------------------------------------------

    def _words(self, text: str) -> Reading:
        """Read a mark, with any white space before each of its words."""
        for word in _words_of(text):
            yield from self._spaces()
            yield from self._literal(word)

    def _forgiven(self, text: str) -> Reading:
        """Read a mark if it begins here."""
        yield from self._spaces()
        if self._char == _words_of(text)[0][0]:
            yield from self._words(text)

    def _either(self, *texts: str) -> Generator[None, None, str]:
        """Read the one of these marks that stands here, and return it."""
        rest, index = list(texts), 0
        while True:
            rest = [text for text in rest if _words_of(text)[0][index] == self._char]
            if not rest:
                raise NotACall
            index += 1
            yield
            for text in rest:
                first, *others = _words_of(text)
                if len(first) == index:
                    for word in others:
                        yield from self._words(word)
                    return text


_ALL_BUT_STRING = frozenset({"integer", "number", "boolean", "null", "object", "array"})


@cache
def _words_of(text: str) -> tuple[str, ...]:
    """The words of a mark, between which there may be white space."""
    return tuple(word for part in _WORD.findall(text) if (word := part.strip(SPACES)))


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)
