"""The grammar that makes a model call tools in its family's own form.

It serves `tool_choice` and strict tools, structured output in place of calls, and structured output behind
reasoning.

The grammar is written in Lark, as llguidance reads it. A marker that is one token of the model stands in the
grammar as the id of that token, so that the model writes what it was trained on. The parser of `tool_calls`
can read every text that the grammar allows. Spaces are those of the chat templates (`", "` and `": "`).
Called by `server.openai.tools` and `server.openai.structured`. The size of a grammar is bounded where it is
built (`grammar.matcher`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequestError
from penstock.request import StructuredOutputs
from penstock.tokenizer.framed_grammar import (
    arguments_rules,
    framed_call,
    framed_calls,
    gemma_rules,
    in_regex,
    joined,
    written,
)
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.tool_formats import NAME_END, ReasoningFormat, ToolFormat

MAX_CHARACTERS = 8 << 20  # of the rules of all tools
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False}
_SPACED = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{1,32}"}  # as grammar.matcher has it
_SPACE = f"/{_SPACED['whitespace_pattern']}/"
_ANY = "/(?s:.*)/"
_LINE_END = "\n"
_LIST_SPACE = "/[ \\n]{0,16}/"  # beside the brackets and commas of a list

Thinks = Literal["no", "maybe", "opened"]


class CallTask(msgspec.Struct, frozen=True, kw_only=True):
    """The calls and the text that an answer may have.

    Attributes:
        schemas: the schema of the arguments of each tool that may be called, by the tool's name; None: the
            tool has no parameters.
        is_forced: the answer must be calls, behind reasoning at most; else it may be text without calls.
        text: structured output for that text, which then may not stand beside calls; None: any text, also
            beside calls.
        is_single: at most one call is allowed.
        thinks: whether the answer begins with reasoning; "opened": it does, the prompt has opened it.
    """

    schemas: Mapping[str, dict[str, Any] | None]
    is_forced: bool = True
    text: StructuredOutputs | None = None
    is_single: bool = False
    thinks: Thinks = "no"


def call_grammar(task: CallTask, syntax: ModelSyntax) -> str:
    """Return the grammar of an answer. `syntax.tools` may not be None.

    Raises:
        InvalidRequestError: the grammar would be too long.
    """
    form, ids = syntax.tools, syntax.marker_ids
    assert form is not None
    channels = syntax.reasoning if syntax.reasoning is not None and syntax.reasoning.messages else None
    if channels is not None:
        rules = [_channels_start(task, form, channels, ids)]
    else:
        rules = [_start(task, form, ids)]
    if task.text is not None:
        rules.append(f"text: {answer_rule(task.text)}")
    if task.thinks != "no" and syntax.reasoning is not None and channels is None:
        rules[0] = rules[0].replace("start:", "answer:", 1)
        rules.append(_thinking(syntax.reasoning, ids, is_open=task.thinks == "opened"))
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(task.schemas))))
    rules += _bounded(_rules_of_tools(task, form, ids))
    if form.frame is not None and form.frame.body == "gemma":
        rules += gemma_rules(form.frame.quote, ids)
    return "\n".join(rules) + "\n"


def _rules_of_tools(task: CallTask, form: ToolFormat, ids: Mapping[str, int]) -> Iterator[str]:
    """Yield the rules of the call of each tool, and those of its arguments."""
    for index, (name, schema) in enumerate(task.schemas.items()):
        if form.frame is not None:
            yield f"call_{index}: {framed_call(form.frame, ids, name, index)}"
        else:
            yield f"call_{index}: {_call(form, ids, name, index, text=task.text)}"
        if form.frame is not None and form.frame.body != "json":
            yield from arguments_rules(form.frame, ids, schema, index)
            continue
        spacing = _SPACING if task.text is None or not form.is_bare else _spacing_of(task.text)
        yield f"arguments_{index}: %json {json.dumps(_object_schema(schema, spacing))}"


def _bounded(rules: Iterable[str]) -> Iterator[str]:
    """Yield the rules; raise once they are too long, since each argument may repeat all definitions."""
    num_characters = 0
    for rule in rules:
        num_characters += len(rule)
        if num_characters > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"the grammar of calls of these tools has more than {MAX_CHARACTERS} characters.",
                remedy="Give fewer tools, or fewer arguments that refer to large definitions.",
                param="tools",
                code="grammar_too_complex",
            )
        yield rule


def reasoned_grammar(
    structured: StructuredOutputs, reasoning: ReasoningFormat, ids: Mapping[str, int], *, is_open: bool
) -> str | None:
    """Return the grammar of reasoning and then this text; None for a text given by a pattern or a grammar.

    Args:
        ids: ids of the markers that are one token each.
        is_open: the prompt has opened the reasoning; else there may be none.
    """
    answer = answer_rule(structured)
    if answer is None:
        return None
    if reasoning.messages:
        start = _channels(reasoning, ids, is_open=is_open)
        return f"{start}\nanswer: {written(reasoning.answers, ids, is_exact=True)} text\ntext: {answer}\n"
    return f"{_thinking(reasoning, ids, is_open=is_open)}\nanswer: {answer}\n"


def has_rule(structured: StructuredOutputs) -> bool:
    """Return whether `answer_rule` has a rule for this text: it has none for a pattern or a grammar."""
    return structured.choice is not None or structured.json is not None or structured.json_object


def answer_rule(structured: StructuredOutputs) -> str | None:
    """Return the right side of a rule for this text; None for a text given by a pattern or a grammar."""
    if structured.choice is not None:
        return " | ".join(map(json.dumps, structured.choice))
    if not has_rule(structured):
        return None
    schema = json.loads(structured.json or '{"type": "object"}')
    return "%json " + json.dumps(schema | {"x-guidance": _spacing_of(structured)})


def _spacing_of(structured: StructuredOutputs) -> dict[str, Any]:
    return _SPACED if structured.whitespace else _COMPACT


def _start(task: CallTask, form: ToolFormat, ids: Mapping[str, int]) -> str:
    is_single = task.is_single or form.is_single
    calls = _calls(form, ids, is_single=is_single)
    if task.is_forced:
        return f"start: {calls}"
    if task.text is not None:
        calls = _calls_as_json(task.text, is_single=is_single) if form.is_bare else calls
        return f"start: {calls} | text"
    if form.is_bare:  # what begins like a call is one
        return f"start: {calls} | OTHER\nOTHER: /(\\s*[^\\s{{\\[](?s:.*))?/"
    opening = _marker(form.opening.rstrip("\n"), ids)
    if not opening.startswith("<["):
        head = f"head[lazy]: /(?s:.*){in_regex(form.opening.rstrip(_LINE_END))}/"
        item = _calls(form, ids, is_single=True).replace(opening, "head", 1)
        return f"start: ({item}){_times(task.is_single)} TEXT\nTEXT: {_ANY}\n{head}"
    item = _calls(form, ids, is_single=True)
    return f"start: TEXT ({item} TEXT){_times(task.is_single)}\nTEXT: {_ANY}"


def _times(is_single: bool) -> str:
    return "?" if is_single else "*"


def _calls(form: ToolFormat, ids: Mapping[str, int], *, is_single: bool) -> str:
    """Return the expression for a single call, or for one or more calls, with their markers."""
    if form.frame is not None:
        return framed_calls(form, form.frame, ids, is_single=is_single)
    if form.is_bare:  # the marker is not needed
        return "call" if is_single else 'call | "[" call (", " call)* "]"'
    opening, closing = _marker(form.opening, ids), _marker(form.closing, ids)
    if form.is_list:
        is_spaced = form.name_key != "name"  # templates of these families break the lines of a list
        space = _LIST_SPACE if is_spaced else ""
        comma = f'{space} "," {space}' if is_spaced else '", "'
        more = "" if is_single else f"({comma} call)*"
        return joined(opening, '" "?', '"["', space, "call", more, space, '"]"', closing)
    padding = _text(form.padding)
    if form.is_lines:
        more = "" if is_single else f"({joined(padding, 'call')})*"
        return joined(opening, padding, "call", more, padding, closing)
    marked = " ".join(part for part in (opening, padding, "call", padding, closing) if part)
    return marked if is_single else " ".join(part for part in (f"{marked} (", padding, marked, ")*") if part)


def _call(
    form: ToolFormat, ids: Mapping[str, int], name: str, index: int, *, text: StructuredOutputs | None
) -> str:
    if form.is_bare and text is not None:  # the text may begin as a call does
        return _call_as_json(form, name, index, text)
    if form.is_named:
        return f"{_text(name)} {_marker(NAME_END, ids)} arguments_{index}"
    head = f'"{form.name_key}": {json.dumps(name)}, "{form.arguments}": '
    if form.index_key:
        number = f'{{"{form.index_key}": "'
        return f'{_text(number)} /[0-9]{{1,4}}/ {_text(chr(34) + ", " + head)} arguments_{index} "}}"'
    return f'{_text("{" + head)} arguments_{index} "}}"'


def _call_as_json(form: ToolFormat, name: str, index: int, text: StructuredOutputs) -> str:
    """Return the expression of a call, made of the same words as JSON that may stand in the place of a call.

    A word is a terminal of the grammar, also one of white space. Where two words begin alike, the library
    follows only the longer one. So a call and a text must not differ in white space: a model that writes some
    of it would then be bound to a call.
    """
    head = map(_text, ["{", '"name"', ":", json.dumps(name), ",", f'"{form.arguments}"', ":"])
    return _between(text).join([*head, f"arguments_{index}", '"}"'])


def _calls_as_json(text: StructuredOutputs, *, is_single: bool) -> str:
    """Return the expression of one call or a list of calls, made of such words as `_call_as_json`."""
    if is_single:
        return "call"
    space = _between(text)
    more = space.join(["", '","', "call"])
    whole = space.join(['"["', "call", f"({more})*", '"]"'])
    return f"call | {whole}"


def _between(text: StructuredOutputs) -> str:
    """Return what the grammar has between two words of JSON: optional white space, or nothing but a gap."""
    return f" {_SPACE}? " if text.whitespace else " "


def _object_schema(schema: dict[str, Any] | None, spacing: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(_NO_PARAMETERS if schema is None else schema), "x-guidance": spacing}


def _thinking(form: ReasoningFormat, ids: Mapping[str, int], *, is_open: bool) -> str:
    """Return the rule `start`: reasoning, a bounded number of line ends, and the answer.

    The reasoning may be left out unless the prompt, or the form, has opened it.
    """
    closing = _marker(form.closing, ids)
    if closing.startswith("<["):
        thought = f"thought: {_ANY} {closing}"
    else:
        thought = f"thought[lazy]: /(?s:.*){in_regex(form.closing)}/"
    begin = "" if is_open or form.is_open else _marker(form.opening, ids) + " "
    optional = "" if is_open or form.is_open else "?"
    return f"start: ({begin}thought /\\n{{0,32}}/){optional} answer\n{thought}"


def _channels(form: ReasoningFormat, ids: Mapping[str, int], *, is_open: bool) -> str:
    """Return the rule `start`: thoughts, each a message of its own, and the answer behind them."""
    begin, end = _marker(form.opening, ids), _marker(form.closing + form.resumes, ids)
    if not begin:
        return "start: answer"
    first = f"{_ANY} {end} " if is_open else ""
    return f"start: {first}({begin} {_ANY} {end})* answer"


def _channels_start(
    task: CallTask, form: ToolFormat, channels: ReasoningFormat, ids: Mapping[str, int]
) -> str:
    """Return the rules of an answer that is a sequence of messages.

    Thoughts come first, then a call, or a text unless calls are forced. If the form has `remarks`, texts may
    also stand before.
    """
    call = _calls(form, ids, is_single=task.is_single or form.is_single)
    # In two words: of words that begin alike the library follows only the longer one (`_call_as_json`).
    call = call.replace('"commentary to="', '"commentary" " to="')
    start = _channels(channels, ids, is_open=task.thinks == "opened")
    if task.is_forced:
        return f"{start}\nanswer: {call}"
    answers = written(channels.answers, ids, is_exact=True)
    end = _marker(channels.closing + channels.resumes, ids)
    if task.text is not None:
        return f"{start}\nanswer: {call} | {answers} text"
    before = _marker(channels.remarks, ids)
    remarks = f"({before} {_ANY} {end})* " if before else ""
    return f"{start}\nanswer: {remarks}({call} | {answers} {_ANY})"


def _marker(marker: str, ids: Mapping[str, int]) -> str:
    """Return the expression for a marker: tokens by id, the rest of it as text; "" for no marker."""
    return written(marker, ids)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
