"""Elements of HTML and SVG as text. Values are escaped, so that the name of a model cannot become markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NewType

Markup = NewType("Markup", str)
"""Text in which nothing is left to escape."""

_EMPTY_IN_HTML = frozenset({"meta", "br"})


def text(value: object) -> Markup:
    """Return a value as text of an element."""
    return Markup(escape(str(value), quote=False))


def element(tag: str, /, *children: Markup, **attributes: object) -> Markup:
    """Return an element.

    Args:
        attributes: attributes by name. A `_` stands for `-`; one at the end is left out, so `class_` means
            `class`. Numbers with a fraction are rounded to hundredths. An attribute that is None is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_quoted(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _EMPTY_IN_HTML:
        return Markup(f"<{tag}{shown}>")
    return Markup(f"<{tag}{shown}>{''.join(children)}</{tag}>")


def joined(parts: Sequence[Markup]) -> Markup:
    """Return elements one behind the other."""
    return Markup("".join(parts))


def _quoted(value: object) -> str:
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return escape(shown, quote=False).replace('"', "&quot;")
