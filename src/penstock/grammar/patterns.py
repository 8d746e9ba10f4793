"""Translates regular expressions of JSON schemas (ECMAScript's) to the notation of the grammar library.

The two notations agree in most parts. Rewritten is what the library would silently read in another way:

- white space: that of ECMA-262 (22.2.2.9) has U+FEFF, and not U+0085;
- brackets and operators within a class of characters, which are plain characters in ECMAScript;
- classes without a character, which match nothing, or with `^` anything.

Control letters (a backslash, `c` and a letter) are rewritten too, because the library does not know them.
"""

from __future__ import annotations

import re
import string

_SPACE = r"\t\n\x0B\x0C\r\x20\u{A0}\u{FEFF}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_ANYWHERE = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}
_ANYWHERE |= {rf"\c{letter}": rf"\x{ord(letter) % 32:02X}" for letter in string.ascii_letters}
_IN_CLASS = {"[": r"\[", "&": r"\&", "~": r"\~"}
_EMPTY_CLASSES = {"[]": r"[a&&b]", "[^]": r"[\x00-\u{10FFFF}]"}
_PART = re.compile(r"\\c[A-Za-z]|\\.|\[\^?\]?|.", re.DOTALL)


def from_ecma(pattern: str) -> str:
    """Return an expression in the library's notation that matches the same texts as `pattern`."""
    parts: list[str] = []
    is_in_class = False
    for found in _PART.finditer(pattern):
        if found[0] in _ANYWHERE:
            parts.append(_ANYWHERE[found[0]])
        elif not is_in_class:
            parts.append(_EMPTY_CLASSES.get(found[0], found[0]))
            is_in_class = found[0] in ("[", "[^")
        else:  # within a class an opening bracket, and `^` behind it, are plain characters
            parts += found[0] if found[0][0] == "\\" else map(_in_class, found[0])
            is_in_class = not found[0].endswith("]") or found[0][0] == "\\"
    return "".join(parts)


def _in_class(character: str) -> str:
    return _IN_CLASS.get(character, character)
