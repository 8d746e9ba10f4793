"""The sandbox in which chat templates run: minijinja, with what transformers gives templates.

White space beside blocks is trimmed as in transformers. Templates have `tojson`, `raise_exception`,
`strftime_now` and loop controls. Some templates need what minijinja does not have or does otherwise; this
module gives them that: `none` is not iterable, blocks of `{% generation %}` run, and a list of a namespace
may be appended to and popped. Called by `chat_template`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

import minijinja

FUEL = 5_000_000  # template instructions

Clock = Callable[[], datetime.datetime]

_GENERATION_TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_TAG = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_ITERABLE = re.compile(r"(?<![\w.\])])([A-Za-z_][\w.]*(?:\[[^\[\]]*\][\w.]*)*)\s+is\s+(not\s+)?iterable\b")
_ATTRIBUTE = r"[A-Za-z_]\w*\.[A-Za-z_]\w*"
_APPEND = re.compile(rf"\{{%(-?)\s*(?:set\s+\w+\s*=|do)\s*({_ATTRIBUTE})\.append\((.*?)\)\s*(-?)%\}}")
_POP = re.compile(rf"\{{%(-?)\s*set\s+(\w+)\s*=\s*({_ATTRIBUTE})\.pop\(0\)\s*(-?)%\}}")


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


def jinja_environment(clock: Clock) -> minijinja.Environment:
    """Return an environment for templates.

    Args:
        clock: gives templates that ask for it the time.
    """
    return minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        fuel=FUEL,
        auto_escape_callback=lambda name: False,
        filters={"tojson": _to_json},
        globals={
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: clock().strftime(pattern),
        },
    )


def adapted_source(source: str) -> str:
    """Return the template with tags that minijinja knows, in place of tags that it does not know or misreads.

    Blocks of `generation`, which only mark assistant text for training, always run.
    """

    def always(match: re.Match[str]) -> str:
        return f"{{%{match[1]} {'endif' if match[2] else 'if true'} {match[3]}%}}"

    source = _TAG.sub(lambda match: _ITERABLE.sub(_iterable_and_not_none, match[0]), source)
    source = _GENERATION_TAG.sub(always, source)
    source = _APPEND.sub(r"{%\1 set \2 = \2 + [\3] \4%}", source)
    return _POP.sub(r"{%\1 set \2 = \3[0] %}{% set \3 = \3[1:] \4%}", source)


def _iterable_and_not_none(match: re.Match[str]) -> str:
    """Return the test `iterable` as Jinja2 has it: `none` does not pass, though in minijinja it does."""
    operand = match[1]
    if match[2]:
        return f"({operand} is not iterable or {operand} is none)"
    return f"({operand} is iterable and {operand} is not none)"


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON without HTML escapes, spaced as `json.dumps` does it."""

    allowed = {"separators", "sort_keys", "ensure_ascii"} & set(options)
    arguments = {"ensure_ascii": False} | {name: options[name] for name in allowed}
    return json.dumps(value, indent=indent, **arguments)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)
