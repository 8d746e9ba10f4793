"""The docs as a site: built in strict mode, whole, and readable without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paths import REPOSITORY

pytestmark = pytest.mark.doors

# Attributes by which a page makes a browser load something; an `a` is only followed by its reader.
LOADS = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "form": ("action",),
}
REMOTE = re.compile(r"(?:https?:)?//", re.IGNORECASE)


class _Loads(HTMLParser):
    """Collects what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loads = LOADS.get(tag, ())
        self.remote += [
            f"<{tag} {name}={value}>" for name, value in attrs if name in loads and REMOTE.match(value or "")
        ]


def remote_loads(page: str) -> list[str]:
    parser = _Loads()
    parser.feed(page)
    return parser.remote


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material (extra docs) is not installed")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # a notice of the theme about its successor
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(site.rglob("*.html")):
        yield path, path.read_text(encoding="utf-8")


def test_every_page_of_the_docs_is_there(site: Path) -> None:
    docs = REPOSITORY / "docs"
    missing = [
        path.relative_to(docs).as_posix()
        for path in docs.rglob("*.md")
        if not (site / path.relative_to(docs)).with_suffix(".html").exists()
    ]
    assert missing == []
    assert "Start in five minutes" in (site / "index.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    found = {path.relative_to(site).as_posix(): remote_loads(text) for path, text in pages(site)}
    assert len(found) > 40
    assert {page: loads for page, loads in found.items() if loads} == {}


def test_no_style_loads_anything_from_another_host(site: Path) -> None:
    loading = re.compile(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", re.IGNORECASE)
    styles = sorted(site.rglob("*.css"))
    assert styles
    assert [path.name for path in styles if loading.search(path.read_text(encoding="utf-8"))] == []
    assert [path.name for path, text in pages(site) if loading.search(text)] == []


# What is left of a link, a table, an example or a list that the site shows as plain text.
MARKS = re.compile(r"\]\(|^\s*\||```|^\s*[-*] [`\[]?[A-Za-z]")


def test_tables_lists_and_examples_are_not_left_as_text(site: Path) -> None:
    """GitHub makes lists of lines that this site takes for text, such as those behind a table in a list."""
    left = []
    for path, text in pages(site):
        if path.parent.name == "figures":  # entries of the log stay as they were written
            continue
        article = re.search(r"<article.*?</article>", text, re.DOTALL)
        outside = re.sub(r"<(pre|code)\b.*?</\1>", "", article[0] if article else "", flags=re.DOTALL)
        lines = re.sub(r"<[^>]+>", "", outside).splitlines()
        left += [f"{path.name}: {line[:80]}" for line in lines if MARKS.search(line)]
    assert left == []


def test_loads_from_other_hosts_are_seen() -> None:
    page = (
        '<script src="https://cdn.example/a.js"></script><link href="//fonts.example/b.css"><a href="https://c.example">'
        '<img src="pictures/d.svg"><link href="assets/e.css"><img srcset="HTTP://f.example/g.png 2x">'
    )
    assert remote_loads(page) == [
        "<script src=https://cdn.example/a.js>",
        "<link href=//fonts.example/b.css>",
        "<img srcset=HTTP://f.example/g.png 2x>",
    ]
