"""Rewrites a Lark grammar so that it accepts the same texts, each written as a quoted JSON string.

A model writes the free text for a tool as a string in the JSON of its call. A quotation mark, for example,
is two characters there. The terminals of the text's grammar are therefore rewritten. Characters that JSON
must escape have its short escapes, such as `\\n`; control characters without a short escape are refused. The
result is the body of a `%lark { }` of the library of grammars (llguidance), which keeps the names inside
apart from those outside.

The library's lexer takes the longest terminal that fits and never goes back. With `/.+/ LF`, a line and then
its end, a text could never end: the backslash with which the escaped line end begins also fits `/.+/`, as the
beginning of another escape. So a grammar in which no rule contains itself becomes one terminal, within which
nothing must be chosen. A grammar with a rule that contains itself, or with `%ignore`, keeps its rules; it is
refused if it has characters that JSON escapes.

Called by `custom_tools`, for grammars that the library has found to be sound.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from penstock.errors import InvalidRequestError

_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}  # after a backslash
_PLAIN = r'[^"\\\x00-\x1F]'  # characters that JSON writes as they are
_WORD = re.compile(
    r'(?P<string>"(?:\\.|[^"\\\n])*+"?i?)'
    r"|(?P<comment>(?:#|//)[^\n]*)"
    r"|(?P<regex>/(?:\\.|[^/\\\n])++/?[a-z]*)"
    r"|(?P<library>%import[^\n]*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<kept>%ignore\b|->|\.-?\d+|~\s*\d+(?:\s*\.\.\s*\d+)?|\d+|[\s:|()\[\]{}?*+!,])"
    r"|(?P<other>%?\w+|.)",
    re.DOTALL,
)
_IMPORT = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*(?:(?:#|//).*)?")
# Terminals of Lark's library without a character that JSON escapes; `_IMPORTS` has those that are rewritten.
_PLAIN_IMPORTS = frozenset(
    {"DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "EXP", "FLOAT", "SIGNED_FLOAT", "NUMBER"}
    | {"SIGNED_NUMBER", "LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME"}
)
_IMPORTS = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_ATOM = re.compile(
    r"(?P<code>\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[xu]\{[0-9A-Fa-f]{1,6}\})"
    r"|(?P<escape>\\.)"
    r"|(?P<choice>\[\^?\]?(?:\\.|[^\]\\])*+\]?)"
    r"|(?P<kept>\((?:\?:|(?!\?))|[)|*+?^$]|\{\d+(?:,\d*)?\})"
    r"|(?P<group>\(\?)"
    r"|(?P<character>.)",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_SETS_WITHIN = re.compile(
    r"(?<!\\)(?:\[|&&|--|~~|\|\|)"
)  # operators of the library within a class of characters, after its first bracket
_Word = tuple[str, str]  # a word of the grammar: its kind, which is a group of `_WORD`, and its text


def quoted_lark(grammar: str) -> str:
    """Return a grammar of the same texts as they stand between the quotation marks of a JSON string.

    Raises:
        InvalidRequestError: something in the grammar cannot be rewritten; the error says what.
    """
    found = [(one.lastgroup or "other", one[0]) for one in _WORD.finditer(grammar)]
    words = [(kind, _WORDS[kind](word)) for kind, word in found if kind != "comment"]
    bodies = _bodies(words)
    if "start" not in bodies:
        raise _refused("another first rule than start")
    if not _contains_itself(bodies) and ("kept", "%ignore") not in words:
        return _one_terminal(words, bodies.keys())
    for kind, word in found:
        if kind in ("string", "regex") and _ESCAPED.search(_WORDS[kind](word)):
            raise _refused(f"a rule that contains itself, or %ignore, beside {word[:64]}, which JSON escapes")
    return "".join(word for _, word in words)


def _bodies(words: Sequence[_Word]) -> dict[str, set[str]]:
    """Return the names that stand in the definition of each name."""
    bodies: dict[str, set[str]] = {}
    body: set[str] = set()
    for index, (kind, word) in enumerate(words):
        if kind == "library":
            continue
        if kind == "name" and _is_defined(words, index):
            body = bodies.setdefault(word, set())
        elif kind == "name":
            body.add(word)
    return bodies


def _is_defined(words: Sequence[_Word], index: int) -> bool:
    """Return whether a definition begins with this word: a colon follows, perhaps after a priority."""
    rest = (word for _, word in words[index + 1 : index + 6] if not word.isspace())
    following = next(rest, "")
    return (next(rest, "") if following.startswith(".") else following) == ":"


def _contains_itself(bodies: Mapping[str, set[str]]) -> bool:
    """Return whether a definition leads back to itself."""
    try:
        TopologicalSorter(bodies).prepare()
    except CycleError:
        return True
    return False


def _one_terminal(words: Sequence[_Word], rules: Collection[str]) -> str:
    """Return the grammar with a terminal in place of each rule.

    Aliases, priorities, and `?` and `!` before a rule are left out, which only concern trees of rules.
    """
    parts: list[str] = []
    is_alias = False
    for index, (kind, word) in enumerate(words):
        is_name = kind == "name"
        if word == "->" or (is_alias and is_name):
            is_alias = not is_name
        elif is_name and word in rules:
            if parts and parts[-1] in "?!" and _is_defined(words, index):
                parts.pop()  # the mark says how trees of the rule are made
            parts.append(f"RULE_{word.upper()}" if word != word.upper() else word)
        elif not (kind == "kept" and word.startswith(".")):
            parts.append(word)
    return "start: RULE_START\n" + "".join(parts)


def lark_of_regex(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    body = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return f"start: /{body}/\n".replace("\n", r"\n", body.count("\n"))


def _string(word: str) -> str:
    """Return a literal rewritten; one that ignores case becomes a regular expression."""
    literal = word.removesuffix("i")
    try:
        text = json.loads(literal)
    except ValueError:
        raise _refused(f"the text {word[:64]}") from None
    if literal == word:
        return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)
    return f"/{''.join(map(_of_any_case, text))}/"


def _of_any_case(character: str) -> str:
    small, large = character.lower(), character.upper()
    is_pair = small != large and len(small) == len(large) == 1
    return f"[{small}{large}]" if is_pair else _character(character)


def _library(word: str) -> str:
    found = _IMPORT.fullmatch(word.strip())
    if found is not None and found[1] in _PLAIN_IMPORTS:
        return word
    if found is None or found[1] not in _IMPORTS:
        raise _refused(word.strip()[:64])
    return f"{found[2] or found[1]}: /{_quoted_regex(_IMPORTS[found[1]], _ESCAPES)}/"


def _regex(word: str) -> str:
    body, _, flags = word[1:].rpartition("/")
    if flags.strip("s"):
        raise _refused(f"an expression with the flags {flags[:16]}")
    dot = _ESCAPES if flags else {name: escape for name, escape in _ESCAPES.items() if name != "\n"}
    return f"/{_quoted_regex(body, dot)}/"


def _quoted_regex(body: str, dot: Mapping[str, str]) -> str:
    """Return a regular expression rewritten.

    Args:
        dot: those of the characters that a dot matches which JSON escapes, with the letters of their escapes.
    """

    def written(found: re.Match[str]) -> str:
        if found[0] == ".":
            return _either(_PLAIN, dot)
        return _ATOMS[found.lastgroup or "character"](found[0])

    return _ATOM.sub(written, body)


def _code(atom: str) -> str:
    """A character by its number. The library looks at no expression that the first rule does not lead to."""
    number = int(atom[2:].strip("{}"), 16)
    if number > sys.maxunicode or 0xD800 <= number <= 0xDFFF:
        raise _refused(f"{atom}, which is not a character,")
    return _character(chr(number))


def _escape(atom: str) -> str:
    kind = atom[1]
    if kind in "dw":
        return atom
    if kind in "sSDW":
        return _choice(f"[{atom}]")
    if kind in _CONTROLS:
        return _character(_CONTROLS[kind])
    if kind.isalnum():
        raise _refused(f"{atom} in an expression")
    return _character(kind)


def _choice(atom: str) -> str:
    """Return a class of characters rewritten."""
    if _SETS_WITHIN.search(atom, 1):
        raise _refused(f"the class {atom[:64]}")
    try:
        is_in = re.compile(atom).fullmatch
    except re.error:
        raise _refused(f"the class {atom[:64]}") from None
    escaped = {character: escape for character, escape in _ESCAPES.items() if is_in(character)}
    return _either(f"[{atom}&&{_PLAIN}]", escaped)


def _either(plain: str, escaped: Mapping[str, str]) -> str:
    if not escaped:
        return plain
    return f"(?:{plain}|{'|'.join(map(_character, escaped))})"


def _character(character: str) -> str:
    """Return the regular expression of a character as a JSON string has it."""
    if character in _ESCAPES:
        escape = _ESCAPES[character]
        return rf"(?:\\{escape if escape.isalpha() else chr(92) + escape})"
    if character < " ":
        raise _refused(f"the control character {character!r}")
    return (
        character if character.isalnum() or not character.isascii() or character in " _" else f"\\{character}"
    )


def _group(atom: str) -> str:
    raise _refused("a group with options or looks ahead, (?")


def _other(word: str) -> str:
    raise _refused(word[:64])


def _kept(word: str) -> str:
    return word


_ESCAPED = re.compile(r"\\\\(?!/)")
_Writer = Callable[[str], str]
_WORDS: Mapping[str, _Writer] = {
    "string": _string,
    "name": _kept,
    "regex": _regex,
    "library": _library,
    "kept": _kept,
    "other": _other,
}
_ATOMS: Mapping[str, _Writer] = {
    "code": _code,
    "escape": _escape,
    "choice": _choice,
    "kept": _kept,
    "group": _group,
    "character": _character,
}


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"A grammar of a custom tool cannot have {what} here.",
        remedy="Write it in another way, or leave format out and describe the input.",
        code="unsupported_parameter",
    )
