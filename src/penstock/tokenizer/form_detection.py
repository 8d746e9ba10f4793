"""Finds the form of a model's tool calls and reasoning by how its template writes earlier answers.

A template writes former answers as the model was trained to write them. So a call with arguments of several
types is rendered, and each row of `form_table` tries to read it: the first row whose reader gives back the
very call is the model's. The row of reasoning is found by the marks around it. No name of a model is looked
at. Called by `chat_template`. A template that shows no former calls gets its row by the signs of the rows
(`model_syntax`).
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from penstock.tokenizer.answer_messages import DIALECTS, MessageSplitter
from penstock.tokenizer.form_table import REASONING_FORMATS, TOOL_FORMATS
from penstock.tokenizer.tool_calls import ToolCallParser
from penstock.tokenizer.tool_formats import ReasoningFormat, ToolFormat

# Finds the arguments of the probe in a rendered text, but not if they are a string within JSON: there a
# backslash stands before each quote.
PROBE_SIGN = re.compile(r"where[^\\]{1,40}there")
_NAME = "go"
_ARGUMENTS = {"where": "there", "times": 3}
_USER = "Whither, then?"
_REASONING = "Let me think."
_SPACE = r"[ \t\r\n]*"


class Probe:
    """The conversation by which templates are tried."""

    @staticmethod
    def conversation(reasoning: str = "") -> list[dict[str, Any]]:
        """Return a question, a call and its result."""
        call = {
            "id": "a1b2c3d4e",
            "type": "function",
            "function": {"name": _NAME, "arguments": dict(_ARGUMENTS)},
        }
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if reasoning:
            answer["reasoning_content"] = reasoning
        result = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": _NAME, "content": "y"}
        return [{"role": "user", "content": _USER}, answer, result]

    @staticmethod
    def tools() -> list[dict[str, Any]]:
        properties = {
            "where": {"type": "string", "description": "a place"},
            "times": {"type": "integer", "description": "a number"},
        }
        parameters = {"type": "object", "properties": properties, "required": ["where"]}
        function = {"name": _NAME, "description": "Goes.", "parameters": parameters}
        return [{"type": "function", "function": function}]


class Render(Protocol):
    """Renders a conversation; "" where the template refuses it."""

    def __call__(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **extra: Any
    ) -> str: ...


def shown_tool_format(render: Render) -> str:
    """Return the name of the first row that reads back the call which the template shows; "" for none."""
    tools = Probe.tools()
    question, answer, result = Probe.conversation()
    whole = render([question, answer, result], add_generation_prompt=False, tools=tools) or render(
        [question, answer], add_generation_prompt=False, tools=tools
    )
    prompt = render([question], add_generation_prompt=True, tools=tools)
    behind_question = whole.rpartition(_USER)[2]
    behind_prompt = whole[len(prompt) :] if prompt and whole.startswith(prompt) else ""
    for form in TOOL_FORMATS:
        text = behind_prompt if form.is_bare else behind_question
        if form.name != "json" and text and _reads_probe(form, text):
            return form.name
    return ""


def shown_reasoning_format(render: Render) -> str:
    """Return the name of the first row whose marks are around the reasoning that is shown; "" for none."""
    tools = Probe.tools()
    question, answer, result = Probe.conversation(_REASONING)
    plain = {"role": "assistant", "content": "Done.", "reasoning_content": _REASONING}
    shown = [
        render([question, answer, result], add_generation_prompt=True, tools=tools),
        render([question, plain], add_generation_prompt=False),
        render([question, plain], add_generation_prompt=False, enable_thinking=True, thinking=True),
    ]
    for form in REASONING_FORMATS:
        if form.opening and any(_has_around(form, text) for text in shown):
            return form.name
    return ""


def _has_around(form: ReasoningFormat, text: str) -> bool:
    around = f"{re.escape(form.opening)}{_SPACE}{re.escape(_REASONING)}{_SPACE}{re.escape(form.closing)}"
    match = re.search(around, text)
    return match is not None and text[match.end() :].lstrip().startswith(form.around[0])


def _reads_probe(form: ToolFormat, text: str) -> bool:
    if form.frame is None and not form.is_named and f'"{form.arguments}"' not in text:
        return False  # the reader takes several keys for arguments, but the family writes this one
    is_plain = form.frame is None and not form.is_named and not form.is_bare
    if is_plain and form.is_list != bool(re.search(rf"{re.escape(form.opening)}{_SPACE}\[", text)):
        return False
    if form.messages:
        splitter = MessageSplitter(DIALECTS[form.messages], is_open=False)
        text = "".join(piece.text for piece in splitter.feed(text) if piece.kind == "content")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in Probe.tools()}
    parser = ToolCallParser(form, frozenset({_NAME}), schemas)
    pieces = parser.feed(text) + parser.finish()
    names = [piece.text for piece in pieces if piece.kind == "call"]
    arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    return names == [_NAME] and parser.num_sound == 1 and json.loads(arguments) == _ARGUMENTS
