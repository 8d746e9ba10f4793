"""The pages of `docs` as tests read them: what a section quotes, its table rows, the numbers beside flags."""

from __future__ import annotations

import re

from paths import REPOSITORY

_QUOTED = re.compile(r"`([^`]*)`")
_EXAMPLE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"[a-z_0-9]+")
_NUMBER = r"\d[\d,.]*(?: [KMG]iB)?"


def page(name: str) -> str:
    """In one line."""
    return " ".join((REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8").split())


def section(name: str, title: str = "") -> str:
    """The lines below a heading of a page, up to the next one; without a title all of the page."""
    text = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    if not title:
        return text
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    (found,) = (body for head, body in zip(parts[1::2], parts[2::2], strict=True) if head == title)
    return found


def words(text: str) -> set[str]:
    """Names that stand in backticks, alone or as parts of something; examples do not count."""
    return {word for quoted in _QUOTED.findall(_EXAMPLE.sub("", text)) for word in _WORD.findall(quoted)}


def rows(text: str) -> dict[str, str]:
    """Of all tables, without their heads: the row of each name that its first column quotes."""
    lines = text.splitlines()
    found = [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("|") and not after.startswith("|---")
    ]
    return {name: line for line in found for name in words(line.split("|")[1])}


def told_of(flag: str, text: str) -> list[str]:
    """The numbers that stand at a flag: before it, `16 (--flag)`; behind it, `--flag (16)`; or in the next
    cell of its row."""
    name = rf"`--{flag}`"
    before = rf"({_NUMBER})[^`|;\d]*\({name}"
    behind = rf"{name} (?:≤ )?\(({_NUMBER})"
    beside = rf"{name} \| ({_NUMBER})"
    return [number.rstrip(",.") for form in (before, behind, beside) for number in re.findall(form, text)]


def written(value: float) -> set[str]:
    """How a page may write a default."""
    found = {f"{value:,g}" if value < 1e6 else f"{value:,.0f}"}
    for unit, size in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if value and value % size == 0 and value // size < 1 << 10:
            found.add(f"{int(value) // size} {unit}")
    return found
