"""The fenced blocks of README.md and of the pages of `docs`: what a reader types, and what a page shows.

`page_reader` types them; `tests/doors/test_documented_commands.py` says which of them nothing here can run.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_DRAWN = re.compile(r"[─│┌└┐┘├┤┬┴┼═║╚╲╱▶◀▲▼▒█·]")
_TYPED = re.compile(r"(\.venv/bin/)?(penstock|curl|openssl|pip|export|git|python3|scp|mkdir|docker) ")
_PROMPT = "$ "


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file without the ending, such as `docs/index`.
        line: of its first fence.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}.md:{self.line}"

    @property
    def is_drawing(self) -> bool:
        """Return whether it is a picture made of characters."""
        return bool(_DRAWN.search(self.text))

    @property
    def commands(self) -> list[str]:
        """Return the lines to type, whole where a backslash breaks them: all, or those with a prompt."""
        lines = self._lines()
        prompted = [line.removeprefix(_PROMPT) for line in lines if line.startswith(_PROMPT)]
        return prompted or (lines if _TYPED.match(self.text) else [])

    @property
    def shown(self) -> str:
        """Return what commands print, as the block shows it: the lines without a prompt."""
        lines = self._lines()
        has_prompt = any(line.startswith(_PROMPT) for line in lines)
        return "\n".join(line for line in lines if has_prompt and not line.startswith(_PROMPT))

    def _lines(self) -> list[str]:
        return re.sub(r"\\\n *", "", self.text).splitlines()


def all_blocks() -> list[Block]:
    """Return the blocks of all pages, in the order in which they are read."""
    return [block for path in PAGES for block in blocks_of(path)]


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a page."""
    text = path.read_text(encoding="utf-8")
    page = path.relative_to(REPOSITORY).with_suffix("").as_posix()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=match[2],
            text=textwrap.dedent(match[3]),
        )
        for match in _BLOCK.finditer(text)
    ]
