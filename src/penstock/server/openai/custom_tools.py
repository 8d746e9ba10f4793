"""Custom tools of the Responses API: the model writes a free text for them; a grammar may restrict it.

The model sees such a tool as a function with one argument, `input`, in the form of functions that the model
was trained on. What the model writes as `input` is the text. A grammar of the text goes into the grammar of
the calls, in place of the function's schema. Called by `responses_input` and `chat_reader`; `input_of` is
called by `answers.responses_output`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import InvalidRequestError
from penstock.request import StructuredOutputs
from penstock.server.openai.openai_types import Function, Tool
from penstock.server.openai.quoted_lark import lark_of_regex, quoted_lark
from penstock.server.openai.responses_types import CustomFormat, FunctionTool
from penstock.server.openai.tools import ToolUse, callable_names

_INPUT = "input"
_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_FREE = "The argument input is free text, and not JSON."
_BOUND = "It must match this {syntax} grammar:\n{definition}"
# The rule for the arguments of one tool in a grammar of calls: as it is, and with the grammar of a text.
_ARGUMENTS = r"^arguments_{index}: %json .*$"
_BOUND_ARGUMENTS = (
    'arguments_{index}: "{{\\"input\\": \\"" input_{index} "\\"}}"\ninput_{index}: %lark {{\n{lark}\n}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrammar:
    """The grammar that the text for a custom tool must follow.

    Attributes:
        where: name of the field of the request that has the grammar.
        given: the grammar as the client gave it.
    """

    where: str
    given: StructuredOutputs

    @property
    def size(self) -> int:
        """The number of characters of the grammar."""
        return len(self.given.grammar or self.given.regex or "")

    def quoted(self) -> str:
        """Return a grammar of the same texts as a string of JSON has them, in Lark's notation.

        Raises:
            InvalidRequestError: something in the grammar cannot be expressed for such a string; the error
                names the field.
        """
        regex = self.given.regex
        try:
            return quoted_lark(self.given.grammar or "" if regex is None else lark_of_regex(regex))
        except InvalidRequestError as error:
            error.param = self.where
            raise


def custom_tool(tool: FunctionTool, name: str) -> Tool:
    """Return a custom tool as the function that the model sees.

    Args:
        name: name of the tool; it was checked that there is one.
    """
    shown = tool.format or CustomFormat(type="text")
    is_bound = shown.type == "grammar"
    parts = [tool.description or "", _FREE]
    if is_bound:
        parts.append(_BOUND.format(syntax=shown.syntax, definition=shown.definition))
    function = Function(
        name=name,
        description="\n\n".join(filter(None, parts)),
        parameters=_PARAMETERS,
        strict=is_bound or None,
    )
    return Tool(type="function", function=function)


def input_grammar(shown: CustomFormat, where: str) -> InputGrammar | None:
    """Return the grammar of a custom tool's text; None if the text is free.

    Raises:
        InvalidRequestError: `syntax` or `definition` is missing; the error names the field.
    """
    if shown.type == "text":
        return None
    for name in ("syntax", "definition"):
        if getattr(shown, name) is None:
            param = f"{where}.{name}"
            raise InvalidRequestError(f"{param} is required.", param=param, code="missing_required_parameter")
    if shown.syntax == "regex":
        return InputGrammar(where=where, given=StructuredOutputs(regex=shown.definition))
    return InputGrammar(where=where, given=StructuredOutputs(grammar=shown.definition))


def with_inputs(
    grammar: str | None, use: ToolUse, inputs: Mapping[str, InputGrammar]
) -> tuple[str | None, list[str]]:
    """Put the grammars of custom tools' texts into the grammar of the calls.

    Args:
        grammar: the grammar of the calls; None: there is none.
        inputs: grammar of the text for each custom tool; the grammars are known to be sound.

    Returns:
        The grammar of the calls, and the fields whose grammar has no effect: this model's form of calls has
        no place for it.

    Raises:
        InvalidRequestError: as `InputGrammar.quoted`.
    """
    unbound = []
    for index, name in enumerate(callable_names(use) if inputs else ()):
        if name not in inputs:
            continue
        arguments = re.compile(_ARGUMENTS.format(index=index), re.MULTILINE)
        if grammar is None or not arguments.search(grammar):
            unbound.append(inputs[name].where)
            continue
        bound = _BOUND_ARGUMENTS.format(index=index, lark=inputs[name].quoted())
        grammar = arguments.sub(lambda _, bound=bound: bound, grammar)  # type: ignore[misc]
    return grammar, unbound


def input_of(arguments: str) -> str:
    """Return the text for a custom tool from the arguments that the model has written.

    The text is the value of `input`. Without `input` it is the value of the only argument. If there is no
    such value, or it is not a text, the arguments are returned as they are.
    """
    try:
        values = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError):
        return arguments
    text = values.get(_INPUT) if _INPUT in values or len(values) != 1 else next(iter(values.values()))
    return text if isinstance(text, str) else arguments


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call with this text, for the template."""
    return {_INPUT: text}
