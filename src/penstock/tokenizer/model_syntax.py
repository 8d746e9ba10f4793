"""Chooses a model's forms of calls and reasoning, by the server's settings and the chat template.

The forms are rows of the tables in `form_table`. The server calls `model_syntax` once, and gives the result
to everything that reads or writes answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.config.server import ReasoningParser, ToolParser
from penstock.errors import UsageError
from penstock.tokenizer.form_table import REASONING_FORMATS, TOOL_FORMATS
from penstock.tokenizer.tool_formats import ReasoningFormat, ToolFormat


class ModelSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the server knows of the way in which a model writes.

    Attributes:
        tools: the form of the model's calls of tools; None: unknown, or calls are not looked for.
        is_tool_parser_off: a setting says that calls are not looked for.
        template_knows_tools: the model sees the tools of a request.
        template_knows_calls: the chat template shows former calls.
        reasoning: the form of the model's reasoning; None: unknown, or it is not looked for.
        reads: variables that the chat template looks at.
        marker_ids: the id of each marker that is one token.
    """

    tools: ToolFormat | None = None
    is_tool_parser_off: bool = False
    template_knows_tools: bool = False
    template_knows_calls: bool = False
    reasoning: ReasoningFormat | None = None
    reads: frozenset[str] = frozenset()
    marker_ids: Mapping[str, int] = {}


class TemplateFacts(Protocol):
    """The facts that `model_syntax` must know of a chat template."""

    @property
    def source(self) -> str: ...
    @property
    def reads(self) -> frozenset[str]: ...
    @property
    def tool_format(self) -> str: ...
    @property
    def reasoning_format(self) -> str: ...


class _Row(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def signs(self) -> tuple[str, ...]: ...
    @property
    def foreign(self) -> tuple[str, ...]: ...


Row = TypeVar("Row", bound=_Row)


def model_syntax(
    template: TemplateFacts,
    token_ids: Mapping[str, int],
    *,
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> ModelSyntax:
    """Return the rows that the settings name, or for "auto" the rows that fit the template.

    These are the rows that read what the template shows, if there are any, else the first ones whose signs
    are in the template.

    Args:
        token_ids: ids of the tokens that were added to the vocabulary, special or not.

    Raises:
        UsageError: a setting names no row.
    """
    if tool_parser == "auto" and template.tool_format:
        tools = _chosen(TOOL_FORMATS, template.tool_format, "", "tool_parser")
    else:
        tools = _chosen(TOOL_FORMATS, tool_parser, template.source, "tool_parser")
    if reasoning_parser == "auto" and template.reasoning_format:
        reasoning = _chosen(REASONING_FORMATS, template.reasoning_format, "", "reasoning_parser")
    else:
        reasoning = _chosen(REASONING_FORMATS, reasoning_parser, template.source, "reasoning_parser")
    markers = (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))
    return ModelSyntax(
        tools=tools,
        is_tool_parser_off=tool_parser == "none",
        template_knows_tools="tools" in template.reads,
        template_knows_calls="tool_calls" in template.source,
        reasoning=reasoning,
        reads=template.reads,
        marker_ids={marker: token_ids[marker] for marker in markers if marker in token_ids},
    )


def format_by_signs(source: str) -> ToolFormat | None:
    """Return the first row whose signs a template has; None if there is none."""
    return _chosen(TOOL_FORMATS, "auto", source, "tool_parser")


def tool_form_caution(syntax: ModelSyntax) -> str:
    """Return what the user should know of a model whose way to call tools is not known; "" if it is."""
    if syntax.tools is not None or syntax.is_tool_parser_off or not syntax.template_knows_tools:
        return ""
    names = ", ".join(form.name for form in TOOL_FORMATS)
    return (
        "the chat template supports tools, but its call format is unknown: chats with tools get 400. If "
        f"the model uses one of these formats, select it with --tool-parser: {names}. With --tool-parser "
        "none, calls stay in the text."
    )


def _chosen(rows: Sequence[Row], wanted: str, source: str, param: str) -> Row | None:
    if wanted == "none":
        return None
    if wanted == "auto":
        return next((row for row in rows if row.signs and _has_signs(row, source)), None)
    for row in rows:
        if row.name == wanted:
            return row
    names = ", ".join(row.name for row in rows)
    raise UsageError(f"{param} is {wanted!r}; it must be auto, none or one of {names}.", param=param)


def _has_signs(row: _Row, source: str) -> bool:
    return all(sign in source for sign in row.signs) and not any(sign in source for sign in row.foreign)
