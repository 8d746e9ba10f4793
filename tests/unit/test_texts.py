"""The texts that users read: error messages, remedies, warnings, help lines and descriptions of settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from penstock import errors
from penstock.errors import PenstockError

SOURCE = Path(errors.__file__).parent
MAX_WORDS = 30  # of a sentence
MIN_WORDS = 3  # shorter strings are names and pieces

# What a reader stumbles over, and what to write instead.
RIDDLES = {
    r"(?<!here )\b(?:is|are|was|were) no\b(?! (?:longer|more|older|larger|fewer|less)\b)": "is not a",
    r"\bof yours\b": "your",
    r"\bwhat is there\b": "the thing itself",
    r"(?:^|[.;:] )(?:Who|Whoever|Nobody who)\b": "the noun: the client, the process, the operator",
    r"(?:^|[.;:] )[Tt]hose (?:that|who|which)\b": "the noun",
    r"^of (?!which\b)": "a phrase that names the thing",
    r"\bit is not said\b": "is not given",
    r"\b(?:is|are) not built\b(?= *$|[.;,])": "is not supported",
    r"\bgoes on\b": "continues",
    r"\banew\b": "again",
    r"\b(?:nobody|anybody|somebody)\b": "the noun: no client, no process",
    r"\b(?:has|have) (?:said|told)\b": "reported",
    r"\bis gone\b": "has ended, is lost",
    r"\bknows? no\b": "does not support",
    r"\bone of those\b": "the noun",
    r"\bof (?:its|their) own\b": "its own",
}

# Texts that stay although a rule names them: `file: text` with the reason.
ALLOWED: dict[str, str] = {}


@dataclass(frozen=True)
class Text:
    """A text of the source: where it stands, and how it reads with `…` for each inserted value."""

    place: str
    text: str
    ends: bool  # a sentence, which must end with a full stop


def error_names() -> set[str]:
    """Return the names of all classes of errors of Penstock."""
    return {name for name, value in vars(errors).items() if _is_error(value)}


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, PenstockError)


def literal(node: ast.expr) -> str | None:
    """Return a string or f-string as it reads, or None for another constant."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def texts_of(source: str, file: str, names: set[str]) -> Iterator[Text]:
    """Yield each string of a module that is not a docstring and has some words."""
    tree = ast.parse(source)
    skipped, sentences = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node) if part is not node)
        elif isinstance(node, ast.Call):
            sentences.update(id(branch) for branch in _sentences(node, names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped:
            text = literal(node)
            if text is not None and len(text.split()) >= MIN_WORDS:
                yield Text(f"{file}:{node.lineno}", text, ends=id(node) in sentences)


def _sentences(call: ast.Call, names: set[str]) -> Iterator[ast.expr]:
    """Yield the texts of a call that must be whole sentences: an error's message, and each remedy."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    whole = call.args[:1] if called in names else []
    for argument in (*whole, *(word.value for word in call.keywords if word.arg == "remedy")):
        yield from _branches(argument)


def _branches(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression, or both sides of a conditional one."""
    if isinstance(node, ast.IfExp):
        yield from (*_branches(node.body), *_branches(node.orelse))
    else:
        yield node


def complaints(text: Text) -> Iterator[str]:
    """Yield what is wrong with a text, each with its place."""
    for pattern, better in RIDDLES.items():
        if (met := re.search(pattern, text.text)) is not None:
            yield f'{text.place}: "{met[0].strip()}" in "{text.text}"; write {better}'
    if text.ends and not re.search(r"[.?!…)`\n]\s*$", text.text):
        yield f'{text.place}: "{text.text}" does not end with a full stop'
    for sentence in re.split(r"(?<=[.?!;:])\s+|\n", text.text):
        if (count := len(sentence.split())) > MAX_WORDS:
            yield f'{text.place}: a sentence of {count} words, at most {MAX_WORDS}: "{sentence}"'


@cache
def all_texts() -> list[Text]:
    """Return all texts of the source."""
    names = error_names()
    return [
        text
        for path in sorted(SOURCE.rglob("*.py"))
        for text in texts_of(path.read_text("utf-8"), str(path.relative_to(SOURCE)), names)
    ]


def test_texts_that_users_read_are_plain() -> None:
    texts = all_texts()
    assert len(texts) > 3000, "the texts are no longer found"
    met = [line for text in texts for line in complaints(text) if not _is_allowed(text)]
    assert not met, "\n".join(["", *met])


def test_the_allow_list_only_shrinks() -> None:
    texts = [text for text in all_texts() if _is_allowed(text) and any(complaints(text))]
    kept = {key for key in ALLOWED if any(_key(text) == key for text in texts)}
    assert kept == set(ALLOWED), "entries that are no longer needed"
    assert len(ALLOWED) <= 0


def _key(text: Text) -> str:
    return f"{text.place.partition(':')[0]}: {text.text}"


def _is_allowed(text: Text) -> bool:
    return _key(text) in ALLOWED


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ('raise UsageError(f"{x} is no directory.")', "is no"),
        ('raise UsageError("the key is missing")', "full stop"),
        ('raise UsageError("x.", remedy="Say in a message of yours what to call.")', "of yours"),
        ('flag("of this host, among all", "--name")', "names the thing"),
        ('log.warning("the work goes on")', "continues"),
        ('log.warning("nobody reads the answers")', "no client"),
        (f'raise UsageError("{" word" * 31}.")', "31 words"),
        ('raise UsageError("a." if y else "Those that wait end.")', "the noun"),
    ],
)
def test_a_riddle_is_named_with_its_place(source: str, told: str) -> None:
    (text, *more) = [t for t in texts_of(source, "x.py", error_names()) if any(complaints(t))]
    assert not more
    (line,) = complaints(text)
    assert line.startswith("x.py:1: ")
    assert told in line


@pytest.mark.parametrize(
    "source",
    [
        'raise UsageError(f"{path} is not a directory.", remedy="Give a directory.")',
        'flag("name of this host", "--name")',
        'raise UsageError("there is no longer a file.")',
        'def f():\n    """This is no text for users, and says so anew."""',
    ],
)
def test_a_plain_text_passes(source: str) -> None:
    assert not [line for text in texts_of(source, "x.py", error_names()) for line in complaints(text)]
