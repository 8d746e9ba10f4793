"""Turns literals that are not JSON into JSON, character by character: those of Python and those of Gemma.

Some models write calls as Python, and some templates show arguments so: `{'a': [1, None, True]}`. Gemma
writes `{a:[1,null,true],b:<|"|>text<|"|>}`, with bare keys and a mark around strings. `LiteralReader` gives
JSON as the characters come; `json_of_literal` turns a whole text. Called by `framed_calls` and
`argument_types`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator

SPACES = " \t\r\n"
PYTHON_QUOTES = ("'", '"')
_MAX_DEPTH = 64
_MAX_WORD = 512
_END = "\0"  # stands behind a whole text; no literal has it outside of a string
_WORD_ENDS = frozenset(SPACES + ",:]})" + _END)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false"}
_NULLS = ("None", "none", "null")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "/": "/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_IN_JSON = {'"': '\\"', "\\": "\\\\"} | {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}

Steps = Generator[None, None, None]


class NotALiteral(Exception):
    """The character in hand cannot stand where it does."""


def in_json(character: str) -> str:
    """Return the character as it stands within a string of JSON."""
    return _IN_JSON.get(character, character)


class LiteralReader:
    """Reads one literal. `value` is a generator: it begins at `char`, and yields when it has taken that one.

    Args:
        made: the list to which the JSON goes, in parts.
        quotes: marks that may stand around strings. In a string between marks of one character a backslash
            escapes; between longer marks it is a plain character.

    Attributes:
        char: the character in hand.
    """

    def __init__(self, made: list[str], quotes: tuple[str, ...] = PYTHON_QUOTES) -> None:
        self.char = ""
        self._made = made
        self._quotes = quotes
        self._first_of_quotes = frozenset(quote[0] for quote in quotes)

    def value(self, depth: int = 0) -> Steps:
        """Read a value, up to the first character that does not belong to it."""
        if depth > _MAX_DEPTH:
            raise NotALiteral
        yield from self._spaces()
        if self.char in self._first_of_quotes:
            yield from self._string()
        elif self.char == "{":
            yield from self._entries(depth)
        elif self.char in ("[", "("):
            yield from self._items(depth)
        else:
            word = yield from self._word()
            self._made.append(self._json_of(word))

    def _items(self, depth: int) -> Steps:
        closing = _CLOSING[self.char]
        self._made.append("[")
        yield
        yield from self._spaces()
        is_first = True
        while self.char != closing:
            self._made.append("" if is_first else ", ")
            is_first = False
            yield from self.value(depth + 1)
            yield from self._comma_or(closing)
        self._made.append("]")
        yield

    def _entries(self, depth: int) -> Steps:
        self._made.append("{")
        yield
        yield from self._spaces()
        is_first = True
        while self.char != "}":
            self._made.append("" if is_first else ", ")
            is_first = False
            yield from self._key()
            yield from self._spaces()
            if self.char != ":":
                raise NotALiteral
            yield
            self._made.append(": ")
            yield from self.value(depth + 1)
            yield from self._comma_or("}")
        self._made.append("}")
        yield

    def _key(self) -> Steps:
        if self.char in self._first_of_quotes:
            yield from self._string()
        else:
            word = yield from self._word()
            self._made.append(json.dumps(word, ensure_ascii=False))

    def _comma_or(self, closing: str) -> Steps:
        """Read a comma and the white space around it, or stop before the closing bracket."""
        yield from self._spaces()
        if self.char == ",":
            yield
            yield from self._spaces()
        elif self.char != closing:
            raise NotALiteral

    def _string(self) -> Steps:
        quote = yield from self._opening_quote()
        self._made.append('"')
        if len(quote) == 1:
            yield from self._escaped_text(quote)
        else:
            yield from self._marked_text(quote)
        self._made.append('"')

    def _opening_quote(self) -> Generator[None, None, str]:
        quote = next(quote for quote in self._quotes if quote[0] == self.char)
        for character in quote:
            if self.char != character:
                raise NotALiteral
            yield
        return quote

    def _escaped_text(self, quote: str) -> Steps:
        while self.char != quote:
            if self.char == "\\":
                yield
                yield from self._escape()
            else:
                self._made.append(in_json(self.char))
                yield
        yield

    def _escape(self) -> Steps:
        letter = self.char
        yield
        if letter in _HEX_DIGITS:
            digits = ""
            while len(digits) < _HEX_DIGITS[letter]:
                digits += self.char
                yield
            self._made.append(_character_of(digits))
        elif letter in _ESCAPED:
            self._made.append(in_json(_ESCAPED[letter]))
        elif letter in ("'", '"', "\\"):
            self._made.append(in_json(letter))
        elif letter != "\n":
            self._made.append("\\\\" + in_json(letter))

    def _marked_text(self, quote: str) -> Steps:
        matched = 0
        while matched < len(quote):
            if self.char == quote[matched]:
                matched += 1
                yield
            elif matched:
                self._made.extend(map(in_json, quote[:matched]))
                matched = 0
            else:
                self._made.append(in_json(self.char))
                yield

    def _word(self) -> Generator[None, None, str]:
        word = ""
        while self.char not in _WORD_ENDS:
            word += self.char
            if len(word) > _MAX_WORD:
                raise NotALiteral
            yield
        if not word:
            raise NotALiteral
        return word

    def _json_of(self, word: str) -> str:
        if word in _WORDS:
            return _WORDS[word]
        if word in _NULLS:
            return "null"
        number = json_number(word)
        if number:
            return number
        if self._quotes == PYTHON_QUOTES:
            raise NotALiteral
        return json.dumps(word, ensure_ascii=False)  # Gemma may leave the marks of a short word out

    def _spaces(self) -> Steps:
        while self.char in SPACES:
            yield


def json_number(word: str) -> str:
    """Return the number as JSON, unchanged if it is JSON already; "" if it is not a number."""
    if _NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)
    except ValueError:
        return ""
    return json.dumps(number) if math.isfinite(number) else ""


def json_of_literal(text: str) -> str:
    """Return JSON of a whole Python literal; "" where the text is not one."""
    made: list[str] = []
    reader = LiteralReader(made)
    steps = reader.value()
    for index, character in enumerate(text.strip() + _END):
        reader.char = character
        try:
            next(steps)
        except StopIteration:
            return "".join(made) if index == len(text.strip()) else ""
        except NotALiteral:
            return ""
    return ""


def _character_of(digits: str) -> str:
    try:
        code = int(digits, 16)
    except ValueError:
        raise NotALiteral from None
    if code > 0x10FFFF:
        raise NotALiteral
    return json.dumps(chr(code))[1:-1] if 0xD800 <= code < 0xE000 else in_json(chr(code))
