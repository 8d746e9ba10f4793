"""How families of models write calls of tools, and where they think aloud: a small table.

A row says what stands around a call and how its arguments are written. Three readers know how to read all
rows: `call_reader` reads calls that are JSON, `framed_calls` reads calls whose name and arguments stand
between marks, and `reasoning` with `harmony` reads what a model thinks. `tool_grammar` writes a grammar of
any row. Sources: the chat templates that the families publish, which show former calls in the form that the
model was trained on.

`model_syntax` chooses the rows of a model. Called by the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from penstock.config.server import ReasoningParser, ToolParser
from penstock.errors import UsageError

_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # what may be one token among the marks of a row


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes arguments that are bare text, each between tags.

    Attributes:
        key_open: before the name of an argument.
        key_end: between that name and its value.
        value_end: behind the value.
        padding: between tags and value.
        says_type: the tag of a value says whether it is a string: `string="true"`.
    """

    key_open: str
    key_end: str
    value_end: str
    padding: str = ""
    says_type: bool = False


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the name and the arguments of a call that is not one JSON object.

    Line ends in these texts are the family's; a reader takes any white space in their place.

    Attributes:
        call_open: before the name.
        prefix: before the name too, and left out by some models.
        has_index: the name is followed by a colon and a number, and both with the prefix are the call's id.
        name_end: between name and arguments.
        name_end_written: what the model writes there, where a reader is given another spelling of it.
        body: how the arguments are written: as JSON, as text between `tags`, or as literals of Python or of
            Gemma, whose strings stand between two `quote`.
        call_end: behind the arguments.
        separator: between two calls.
        section_end: behind the last call of a section; "" where every call has an opening of its own.
        is_section: one opening stands before several calls; else before each one.
    """

    call_open: str = ""
    prefix: str = ""
    has_index: bool = False
    name_end: str = ""
    name_end_written: str = ""
    body: Literal["json", "tags", "python", "gemma"] = "json"
    tags: Tags | None = None
    quote: str = ""
    call_end: str = ""
    separator: str = ""
    section_end: str = ""
    is_section: bool = False


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which models write calls of tools.

    Attributes:
        opening: before a call, or before a list of calls; "" where there is no such marker.
        also: further markers at which a call may begin.
        closing: behind a call; "" where there is none, or where the `frame` has it.
        padding: between markers and call, as the family writes it.
        is_bare: a call may also be the beginning of the answer, without the marker.
        is_list: the family writes its calls as one JSON list.
        is_named: the name stands before the arguments, and not in JSON with them: `NAME[ARGS]{...}`.
        frame: of calls that are not JSON objects; None: they are.
        name_key: the key of the name.
        arguments: the key of the arguments.
        index_key: the key of a call's number, which stands first; "" where there is none.
        is_single: the family makes one call in an answer.
        has_short_ids: templates of the family want ids of nine letters and digits.
        tokens: what may be special tokens, beside the markers that are seen in the texts.
        signs: all of these stand in chat templates of the family.
        foreign: none of these does.
    """

    name: str
    opening: str = ""
    also: tuple[str, ...] = ()
    closing: str = ""
    padding: str = ""
    is_bare: bool = False
    is_list: bool = False
    is_named: bool = False
    frame: Frame | None = None
    name_key: str = "name"
    arguments: str = "arguments"
    index_key: str = ""
    is_single: bool = False
    has_short_ids: bool = False
    tokens: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers at which a call may begin."""
        return (self.opening, *self.also) if self.opening else self.also

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be a special token."""
        named = (NAME_END, CALL_ID) if self.opening == _MISTRAL else ()
        return _tokens(self.opening, self.closing, *named, *_texts_of(self.frame), more=self.tokens)


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which models mark what they think.

    Attributes:
        opening, closing: around the reasoning, which is the beginning of an answer.
        is_open: an answer begins inside, even where neither the prompt nor the answer has the opening marker.
        around: what some models write around what they say, and what is no part of it.
        has_channels: the answer is a row of messages, each with a channel (`harmony`).
        resumes: what stands between reasoning and answer.
        answers: what stands before the text of an answer.
        tokens, signs: as for tools.
    """

    name: str
    opening: str
    closing: str
    is_open: bool = False
    around: tuple[str, str] = ("", "")
    has_channels: bool = False
    resumes: str = ""
    answers: str = ""
    tokens: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return _tokens(self.opening, self.closing, *self.around, more=self.tokens)


def _texts_of(frame: Frame | None) -> tuple[str, ...]:
    """Return all texts of a frame."""
    if frame is None:
        return ()
    tags = frame.tags
    texts = (tags.key_open, tags.key_end, tags.value_end) if tags is not None else ()
    return (frame.call_open, frame.name_end, *texts, frame.quote, frame.call_end, frame.section_end)


def _tokens(*texts: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """Return what may be tokens in these texts, the texts themselves among them, each once."""
    found = [token for text in texts if text for token in (text, *_TOKEN.findall(text))]
    return tuple(dict.fromkeys([*found, *more]))


_MISTRAL = "[TOOL_CALLS]"
NAME_END = "[ARGS]"  # between a name and its arguments
CALL_ID = "[CALL_ID]"  # some write the call's id behind its name

_XML = Frame(
    call_open="<function=",
    name_end=">\n",
    body="tags",
    tags=Tags(key_open="<parameter=", key_end=">", value_end="</parameter>\n", padding="\n"),
    call_end="</function>\n",
    section_end="</tool_call>",
)
_SEED = Frame(
    call_open="<function=",
    name_end=">\n",
    body="tags",
    tags=Tags(key_open="<parameter=", key_end=">", value_end="</parameter>\n"),
    call_end="</function>\n",
    section_end="</seed:tool_call>",
)
_GLM = Frame(
    name_end="\n",
    body="tags",
    tags=Tags(key_open="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n"),
    call_end="</tool_call>",
)
_INVOKE = Frame(
    call_open='<invoke name="',
    name_end='">\n',
    body="tags",
    tags=Tags(key_open='<parameter name="', key_end='">', value_end="</parameter>\n"),
    call_end="</invoke>\n",
    section_end="</minimax:tool_call>",
    is_section=True,
)
_DSML = Frame(
    call_open='<｜DSML｜invoke name="',
    name_end='">\n',
    body="tags",
    tags=Tags(
        key_open='<｜DSML｜parameter name="',
        key_end='">',
        value_end="</｜DSML｜parameter>\n",
        says_type=True,
    ),
    call_end="</｜DSML｜invoke>\n",
    section_end="</｜DSML｜function_calls>",
    is_section=True,
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_V3 = Frame(
    call_open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section_end="<｜tool▁calls▁end｜>",
    is_section=True,
)
_DEEPSEEK_V31 = Frame(
    call_open="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
    is_section=True,
)
_KIMI = Frame(
    call_open="<|tool_call_begin|>",
    prefix="functions.",
    has_index=True,
    name_end="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
    is_section=True,
)
_HARMONY = Frame(
    prefix="functions.",
    name_end="<|message|>",
    name_end_written=" <|constrain|>json<|message|>",
    call_end="<|call|>",
)
_FUNCTION = Frame(name_end=">", call_end="</function>")
_GEMMA = Frame(call_open="call:", body="gemma", quote='<|"|>', call_end="<tool_call|>")
_FUNCTION_GEMMA = Frame(call_open="call:", body="gemma", quote="<escape>", call_end="<end_function_call>")
_LFM = Frame(
    call_open="",
    name_end="(",
    body="python",
    call_end=")",
    separator=", ",
    section_end="]<|tool_call_end|>",
    is_section=True,
)
_OLMO = Frame(
    name_end="(",
    body="python",
    call_end=")",
    separator="\n",
    section_end="\n</function_calls>",
    is_section=True,
)

# The first row that reads the call which a template shows is the model's; where a template shows none, the
# first one whose signs it has. `json` is no family, and taken only when asked for.
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
        name="seed_oss",
        opening="<seed:tool_call>\n",
        also=("<seed:tool_call>",),
        frame=_SEED,
        signs=("<seed:tool_call>",),
    ),
    ToolFormat(
        name="qwen3_coder",
        opening="<tool_call>\n",
        also=("<tool_call>", "<function="),
        frame=_XML,
        signs=("<tool_call>", "<function=", "<parameter="),
    ),
    ToolFormat(name="glm45", opening="<tool_call>", frame=_GLM, signs=("<tool_call>", "<arg_key>")),
    ToolFormat(
        name="minimax_m2",
        opening="<minimax:tool_call>\n",
        also=("<minimax:tool_call>",),
        frame=_INVOKE,
        signs=("<minimax:tool_call>", "<invoke"),
    ),
    ToolFormat(
        name="deepseek_v32",
        opening="<｜DSML｜function_calls>\n",
        also=("<｜DSML｜function_calls>",),
        frame=_DSML,
        tokens=("｜DSML｜",),
        signs=("｜DSML｜", "invoke name="),
    ),
    ToolFormat(
        name="deepseek_v3", opening=_DEEPSEEK, frame=_DEEPSEEK_V3, signs=("<｜tool▁call▁begin｜>", "```json")
    ),
    ToolFormat(
        name="deepseek_v31",
        opening=_DEEPSEEK,
        frame=_DEEPSEEK_V31,
        signs=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    ToolFormat(
        name="kimi_k2",
        opening="<|tool_calls_section_begin|>",
        frame=_KIMI,
        signs=("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        name="harmony",
        opening="<|channel|>commentary to=",
        frame=_HARMONY,
        is_single=True,
        tokens=(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
        ),
        signs=("<|channel|>commentary", "<|message|>"),
    ),
    ToolFormat(name="gemma4", opening="<|tool_call>", frame=_GEMMA, signs=("<|tool_call>call:",)),
    ToolFormat(
        name="function_gemma",
        opening="<start_function_call>",
        frame=_FUNCTION_GEMMA,
        signs=("<start_function_call>",),
    ),
    ToolFormat(name="lfm2", opening="<|tool_call_start|>[", frame=_LFM, signs=("<|tool_list_start|>",)),
    ToolFormat(
        name="olmo3", opening="<function_calls>\n", frame=_OLMO, signs=("<function_calls>", "<functions>")
    ),
    ToolFormat(
        name="functionary_v3", opening="<function=", frame=_FUNCTION, signs=("<function=", "</function>")
    ),
    ToolFormat(
        name="cohere",
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        is_list=True,
        name_key="tool_name",
        arguments="parameters",
        index_key="tool_call_id",
        signs=("<|START_ACTION|>",),
    ),
    ToolFormat(
        name="command_r",
        opening="Action:\n```json\n",
        closing="```",
        is_list=True,
        name_key="tool_name",
        arguments="parameters",
        signs=("Action:", "```json", '"tool_name"'),
    ),
    ToolFormat(
        name="phi4_mini",
        opening="<|tool_call|>",
        closing="<|/tool_call|>",
        is_list=True,
        signs=("<|tool|>", "<|/tool|>"),
    ),
    ToolFormat(name="granite", opening="<|tool_call|>", is_list=True, signs=("<|tool_call|>",)),
    ToolFormat(name="firefunction", opening="functools", is_list=True, signs=("functools[",)),
    ToolFormat(
        name="gigachat",
        opening="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        also=("function call<|role_sep|>\n",),
        tokens=("<|role_sep|>", "<|message_sep|>"),
        signs=("function call", "role_sep"),
    ),
    ToolFormat(
        name="nemotron_json",
        opening="<TOOLCALL>",
        closing="</TOOLCALL>",
        is_list=True,
        signs=("<TOOLCALL>",),
    ),
    ToolFormat(
        name="tool_calls",
        opening="<tool_calls>",
        closing="</tool_calls>",
        is_list=True,
        signs=("<tool_calls>",),
    ),
    ToolFormat(
        name="internlm",
        opening="<|action_start|><|plugin|>\n",
        closing="<|action_end|>",
        arguments="parameters",
        signs=("<|action_start|>",),
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
    ReasoningFormat(
        name="harmony",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        has_channels=True,
        resumes="<|start|>assistant",
        answers="<|channel|>final<|message|>",
        tokens=("<|start|>", "<|constrain|>", "<|call|>", "<|return|>"),
        signs=("<|channel|>analysis<|message|>",),
    ),
    ReasoningFormat(
        name="granite",
        opening="<think>",
        closing="</think>",
        around=("<response>", "</response>"),
        signs=("<think>", "</think>", "<response>"),
    ),
    ReasoningFormat(
        name="seed_oss", opening="<seed:think>", closing="</seed:think>", signs=("<seed:think>",)
    ),
    ReasoningFormat(
        name="gemma4", opening="<|channel>thought", closing="<channel|>", signs=("<|channel>thought",)
    ),
    ReasoningFormat(
        name="cohere",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        signs=("<|START_THINKING|>",),
    ),
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
    """The rows that the settings name; else those that read what the template shows, or whose signs it has.

    Args:
        token_ids: tokens that were added to the vocabulary, special or not.

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
    """Return the first row whose signs a template has."""
    return _chosen(TOOL_FORMATS, "auto", source, "tool_parser")


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
