"""The frame of a report: one HTML file that needs no network, no script and no other file.

The page's content security policy forbids browsers to load anything. It allows the one style of the page, by
its digest. The page is light or dark as the reader's browser is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from penstock.reports.markup import Markup, element, joined, text

_STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --text: #17202a; --muted: #556270; --edge: #d3dae1; --grid: #e3e8ed; --head: #f3f5f7;
  --bad: #b3261e;
  --c0: #2f6fb3; --c1: #c2571a; --c2: #2a8358; --c3: #7d51b5; --c4: #b8336a; --c5: #6b7a12; --c6: #17707d;
  --c7: #6d747c; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #0e1318; --text: #e4e9ee; --muted: #a3b0bd; --edge: #2c3742; --grid: #232d36; --head: #161d24;
  --bad: #ff9d94;
  --c0: #6fb1f0; --c1: #f0954f; --c2: #5fce9a; --c3: #b794f0; --c4: #f27fb0; --c5: #c5cf5a; --c6: #5cc6d6;
  --c7: #a7b0b9; } }
* { box-sizing: border-box; }
html { background: var(--ground); }
body { margin: 0 auto; max-width: 64rem; padding: 1rem 1.25rem 3rem; color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .3rem 0 .6rem; max-width: 46rem; }
.muted { color: var(--muted); }
figure { margin: .9rem 0; }
figcaption { font-weight: 600; font-size: .92rem; }
.chart { width: 100%; height: auto; display: block; }
.chart text { font-size: 12px; fill: var(--text); }
.chart .axis { fill: var(--muted); }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { stroke: currentColor; fill: none; stroke-width: 2; }
.line circle { fill: currentColor; stroke: none; }
.line.predicted circle { fill: var(--ground); stroke: currentColor; stroke-width: 1.5; }
.bar { fill: currentColor; stroke: var(--ground); stroke-width: 1; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.legend { list-style: none; margin: .3rem 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem
  1.1rem; font-size: .85rem; }
.sample { width: 28px; height: 12px; margin-right: .4rem; vertical-align: -1px; }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { border: 1px solid var(--edge); padding: .2rem .55rem; text-align: right; }
th { background: var(--head); font-weight: 600; }
th[scope="row"], th:first-child { text-align: left; font-weight: 400; white-space: nowrap; }
thead th:first-child { font-weight: 600; }
td.words { text-align: left; }
.bad { color: var(--bad); }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""


def document(title: str, body: Sequence[Markup]) -> str:
    """Return the whole file."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", text(title)),
        element("style", Markup(_STYLE)),
    )
    page = element("html", head, element("body", element("main", *body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def section(title: str, *parts: Markup) -> Markup:
    """Return a part of the page under a heading."""
    return element("section", element("h2", text(title)), *parts)


def paragraph(words: str, class_: str | None = None) -> Markup:
    """Return a paragraph of plain text."""
    return element("p", text(words), class_=class_)


def table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, has_words: bool = False
) -> Markup:
    """Return a table whose first column names its rows.

    Args:
        has_words: whether the other columns have text and not numbers.
    """
    head = element("tr", *(element("th", text(name), scope="col") for name in headings))
    kind = "words" if has_words else None
    lines = [
        element(
            "tr",
            element("th", text(row[0]), scope="row"),
            *(element("td", text(cell), class_=kind) for cell in row[1:]),
        )
        for row in rows
    ]
    shown = element(
        "table", element("caption", text(caption)), element("thead", head), element("tbody", joined(lines))
    )
    # With a tabindex, a wide table can be scrolled by keys too.
    return element("div", shown, class_="scroll", role="region", aria_label=caption, tabindex="0")
