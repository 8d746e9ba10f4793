"""The prose of README.md and docs/ is plain English: short sentences, and nouns for things."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest

import file_tour
from paths import REPOSITORY

LONGEST_SENTENCE = 25
HIGHEST_MEAN = 18.0
# Folders whose pages are exempt: entries of the log stay as they were written when something was measured.
EXEMPT = ("docs/figures/",)


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


PAGES = [
    REPOSITORY / "README.md",
    *(path for path in sorted((REPOSITORY / "docs").rglob("*.md")) if not name_of(path).startswith(EXEMPT)),
]
# Pages that still break a rule. Remove a page from this list when it passes; never add one.
NOT_YET_REWRITTEN: set[str] = set()

_THINGS = (
    "block|client|core|host|message|model|page|peer|plan|process|rank|record|replica|request|row|server|"
    "session|slot|stage|step|store|thread|token|worker"
)
# What a sentence must not say, and why.
FORBIDDEN = [
    (re.compile(r"\bis no (?!longer\b)"), 'write "is not a", not "is no"'),
    (re.compile(rf"\b(?:{_THINGS})(?:s|es)?,? (?:who|whom)\b"), 'a thing is "which" or "that", not "who"'),
    (re.compile(r"^Who\b(?!.*\?$)"), "name the subject instead of beginning with Who"),
    (re.compile(r"\b(?:he|him|his)\b", re.IGNORECASE), "name the thing instead of he, him or his"),
]
_FENCE = re.compile(r"\s*(```|~~~)")
_NOT_PROSE = re.compile(r"\s*(\||#|<!--|!\[|\[!|---+$|===+$)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_TOUR = re.compile(re.escape(file_tour.BEGIN) + ".*?" + re.escape(file_tour.END), re.DOTALL)
_EXAMPLE = re.compile(r"^\s*```.*?^\s*```", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"``.+?``|`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|No|St)\.$")


class Sentence(NamedTuple):
    line: int
    text: str

    @property
    def length(self) -> int:
        """Return the number of words; a quotation in backticks is one word."""
        return len([word for word in _QUOTED.sub("code", self.text).split() if re.search(r"\w", word)])


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of each paragraph or list item with its first line number; skip code and tables."""
    start, lines, fence = 1, list[str](), ""
    in_list, indented, after_blank = False, False, True
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = _FENCE.match(line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        is_item = bool(_ITEM.match(line))
        indented = line.startswith("    ") and not in_list and (after_blank or indented)
        prose = not (mark or fence or indented or _NOT_PROSE.match(line)) and bool(line.strip())
        if lines and (not prose or is_item):
            yield start, lines
            lines = []
        if prose:
            start = start if lines else number
            lines.append(_ITEM.sub("", line, count=1) if is_item else line)
        if line.strip():
            in_list = is_item or (in_list and line.startswith(" "))
        after_blank = not line.strip()


def sentences(text: str) -> Iterator[Sentence]:
    """Yield every sentence of a page with the line on which it begins."""
    for start, lines in paragraphs(text):
        whole = _LINK.sub(r"\1", "\n".join(lines))
        hidden = _QUOTED.sub(lambda found: "`" + "q" * (len(found[0]) - 2) + "`", whole)
        begin, ends = 0, list(_END.finditer(hidden))
        for end, after in [*((match.start(), match.end()) for match in ends), (len(whole), len(whole))]:
            if end < len(whole) and _ABBREVIATION.search(whole[begin:end]):
                continue
            said = " ".join(whole[begin:end].split())
            if re.search(r"[A-Za-z]", _QUOTED.sub("", said)):  # a list of names alone is not a sentence
                yield Sentence(start + whole[:begin].count("\n"), said)
            begin = after


def table_cells(text: str) -> Iterator[Sentence]:
    """Yield every cell of a page's tables: short phrases, for which only the choice of words counts."""
    outside = _EXAMPLE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(outside.splitlines(), 1):
        if line.lstrip().startswith("|"):
            yield from (Sentence(number, cell.strip()) for cell in line.split("|"))


def without_tour(text: str) -> str:
    """Return a page without the tour of the files, which docstrings write; every line keeps its number."""
    return _TOUR.sub(lambda found: "\n" * found[0].count("\n"), text)


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each broken rule, and the rule with the sentence."""
    text = without_tour(text)
    found = list(sentences(text))
    for sentence in found:
        if sentence.length > LONGEST_SENTENCE:
            yield sentence.line, f"{sentence.length} words, {LONGEST_SENTENCE} allowed: {sentence.text}"
    for sentence in [*found, *table_cells(text)]:
        plain = _QUOTED.sub("code", sentence.text)
        for pattern, advice in FORBIDDEN:
            if pattern.search(plain):
                yield sentence.line, f"{advice}: {sentence.text}"
    average = mean(sentence.length for sentence in found) if found else 0.0
    if average >= HIGHEST_MEAN:
        yield (
            1,
            f"{average:.1f} words a sentence on average, under {HIGHEST_MEAN:g} allowed",
        )


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_page_is_plain_english(path: Path) -> None:
    name = name_of(path)
    found = [f"{name}:{line}: {fault}" for line, fault in faults(path.read_text(encoding="utf-8"))]
    if name in NOT_YET_REWRITTEN:
        assert found, f"{name} passes: remove it from NOT_YET_REWRITTEN"
    else:
        assert not found, "\n" + "\n".join(found)


def test_every_page_that_is_not_yet_rewritten_exists() -> None:
    assert NOT_YET_REWRITTEN - {name_of(path) for path in PAGES} == set()


PAGE = """# A heading that is no sentence and may be as long as it likes, for nobody reads it as prose at all

One short sentence. Another, with `code. That. Has. Full stops.` in it, and
a [link, too](https://example.org/a.b.c)! `A` third

- An item that
  goes on.
- A stage, who waits. The table is no table.

| a cell, however long it may be and though it has more words than any sentence of a page may have | his |
|---|---|

```
he is no code
```

    nor is this no text

1. He ends it.

`one`, `two`.
"""


def test_sentences_are_found_in_prose_alone_with_their_lines() -> None:
    assert list(sentences(PAGE)) == [
        (3, "One short sentence."),
        (3, "Another, with `code. That. Has. Full stops.` in it, and a link, too!"),
        (4, "`A` third"),
        (6, "An item that goes on."),
        (8, "A stage, who waits."),
        (8, "The table is no table."),
        (19, "He ends it."),
    ]


def test_each_rule_gives_the_line_and_the_sentence() -> None:
    assert [(line, fault.rpartition(": ")[2]) for line, fault in faults(PAGE)] == [
        (8, "A stage, who waits."),
        (8, "The table is no table."),
        (19, "He ends it."),
        (10, "his"),
    ]
    long = "The " + "very " * 24 + "end."
    assert [(line, fault[:8]) for line, fault in faults(f"Short.\n\n{long}\n\n{long[:-4]}long end.\n")] == [
        (3, "26 words"),
        (5, "27 words"),
        (1, "18.0 wor"),
    ]
    assert not list(faults("The " + "very " * 15 + "end. It is no longer slow. Who is it?"))


def test_the_tour_of_the_files_alone_is_left_out() -> None:
    tour = f"{file_tour.BEGIN}\n| he |\n\nHe ends it.\n{file_tour.END}\n"
    assert [line for line, _ in faults(f"He begins.\n\n{tour}\nHe ends it.\n")] == [1, 10]
    unmarked = tour.replace(file_tour.BEGIN, "\n")
    assert {line for line, _ in faults(unmarked)} == {3, 5}
