"""How families of models write calls of tools, and where they think aloud: a small table.

A row says what stands around a call; what stands inside is read and written by one parser (`tool_calls`,
`reasoning`) and one grammar (`tool_grammar`) for all. Sources: the chat templates that the families publish,
which show former calls in the form that the model was trained on.

`model_syntax` chooses the rows of a model. Called by the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.config.server import ReasoningParser, ToolParser
from penstock.errors import UsageError


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    opening: before a call, or before a list of calls; "" where there is no such marker.
    closing: behind a call; "" where there is none.
    padding: between markers and call, as the family writes it.
    is_bare: a call may also be the beginning of the answer, without the marker.
    is_list: the family writes its calls as one JSON list.
    is_named: the name stands before the arguments, and not in JSON with them: `NAME[ARGS]{...}`.
    arguments: the key of the arguments, beside `name`.
    is_single: the family makes one call in an answer.
    has_short_ids: templates of the family want ids of nine letters and digits.
    signs: all of these stand in chat templates of the family.
    foreign: none of these does.
    """

    name: str
    opening: str = ""
    closing: str = ""
    padding: str = ""
    is_bare: bool = False
    is_list: bool = False
    is_named: bool = False
    arguments: str = "arguments"
    is_single: bool = False
    has_short_ids: bool = False
    signs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be a special token."""
        named = (NAME_END, CALL_ID) if self.opening == _MISTRAL else ()
        return tuple(marker for marker in (self.opening, self.closing, *named) if marker)


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    opening, closing: around the reasoning, which is the beginning of an answer.
    is_open: an answer begins inside, even where neither the prompt nor the answer has the opening marker.
    signs: as for tools.
    """

    name: str
    opening: str
    closing: str
    is_open: bool = False
    signs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing


_MISTRAL = "[TOOL_CALLS]"
NAME_END = "[ARGS]"  # between a name and its arguments
CALL_ID = "[CALL_ID]"  # some write the call's id behind its name

# The first row whose signs a template has is the model's; `json` is no family, and taken only when asked for.
TOOL_FORMATS = (
    ToolFormat(
        name="mistral_args",
        opening=_MISTRAL,
        is_named=True,
        has_short_ids=True,
        signs=(_MISTRAL, NAME_END),
    ),
    ToolFormat(name="mistral", opening=_MISTRAL, is_list=True, has_short_ids=True, signs=(_MISTRAL,)),
    ToolFormat(
        name="hermes",
        opening="<tool_call>",
        closing="</tool_call>",
        padding="\n",
        signs=("<tool_call>", "</tool_call>"),
        foreign=("<function=", "<arg_key>"),
    ),
    ToolFormat(
        name="llama3_json",
        opening="<|python_tag|>",
        is_bare=True,
        arguments="parameters",
        is_single=True,
        signs=("<|start_header_id|>", '"parameters": '),
    ),
    ToolFormat(name="json", is_bare=True),
)
REASONING_FORMATS = (
    ReasoningFormat(name="mistral", opening="[THINK]", closing="[/THINK]", signs=("[THINK]",)),
    ReasoningFormat(name="qwen3", opening="<think>", closing="</think>", signs=("</think>",)),
    ReasoningFormat(name="deepseek_r1", opening="<think>", closing="</think>", is_open=True),
)


class ModelSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """What the front knows of the way in which a model writes.

    Attributes:
        tools: how it calls tools; None: nobody knows, or it is not looked for.
        is_tool_parser_off: it is not looked for.
        template_knows_tools: the chat template shows the tools of a request to the model.
        template_knows_calls: it shows former calls to it.
        reads: variables that the chat template looks at.
        marker_ids: those of the markers that are tokens.
    """

    tools: ToolFormat | None = None
    is_tool_parser_off: bool = False
    template_knows_tools: bool = False
    template_knows_calls: bool = False
    reasoning: ReasoningFormat | None = None
    reads: frozenset[str] = frozenset()
    marker_ids: Mapping[str, int] = {}


class TemplateFacts(Protocol):
    """What `model_syntax` must know of a chat template."""

    @property
    def source(self) -> str: ...
    @property
    def reads(self) -> frozenset[str]: ...


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
    """The rows that the settings name, or those whose signs the template has.

    Args:
        token_ids: tokens that were added to the vocabulary, special or not.

    Raises:
        UsageError: a setting names no row.
    """
    tools = _chosen(TOOL_FORMATS, tool_parser, template.source, "tool_parser")
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


def tool_form_caution(syntax: ModelSyntax) -> str:
    """Return what the user should know of a model whose way to call tools is not known; "" if it is."""
    if syntax.tools is not None or syntax.is_tool_parser_off or not syntax.template_knows_tools:
        return ""
    names = ", ".join(form.name for form in TOOL_FORMATS)
    return (
        "the chat template takes tools, but not in a form that is known here: chats with tools are answered "
        f"400. If the model calls them in one of these forms, name it by --tool-parser: {names}. With "
        "--tool-parser none, calls stay in the text."
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
