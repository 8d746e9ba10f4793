"""Turns `response_format` and `structured_outputs` of a request into `StructuredOutputs`."""

from __future__ import annotations

import msgspec

from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams, StructuredOutputs
from penstock.server.openai.openai_types import GenerateRequest, ResponseFormat, StructuredOutputFields
from penstock.server.openai.tools import ToolUse
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.tool_grammar import has_rule, reasoned_grammar


def structured_field(request: GenerateRequest) -> str:
    """Return the name of the field that asks for structured output, if any does."""
    fields = request.structured_outputs
    if fields is None or (request.response_format is not None and not _says_what(fields)):
        return "response_format"
    return "structured_outputs"


def structured_outputs(request: GenerateRequest, *, open_objects: bool) -> StructuredOutputs | None:
    """Return what the text must be; None if the request does not say.

    Args:
        open_objects: whether an object of a JSON schema may have further keys, if neither the schema nor the
            request says so.

    Raises:
        InvalidRequestError: both fields say what the text must be, or a schema is missing; the error names
            the field.
    """
    of_format = None if request.response_format is None else _of_format(request.response_format)
    fields = request.structured_outputs or StructuredOutputFields()
    if of_format is not None and _says_what(fields):
        raise InvalidRequestError(
            "response_format and structured_outputs both constrain the text.",
            remedy="Leave out one of them.",
            param="response_format",
        )
    if of_format is None and request.structured_outputs is None:
        return None
    return msgspec.structs.replace(
        of_format or _of_fields(fields),
        whitespace=bool(fields.whitespace),
        open_objects=open_objects if fields.open_objects is None else fields.open_objects,
    )


def _says_what(fields: StructuredOutputFields) -> bool:
    """Return whether the fields say what the text must be, and not only how its JSON is written."""
    given = (fields.json, fields.json_object or None, fields.regex, fields.choice, fields.grammar)
    return any(value is not None for value in given)


def in_place_of_calls(
    sampling: SamplingParams, use: ToolUse, syntax: ModelSyntax, param: str
) -> StructuredOutputs | None:
    """Return what the text must be if the model makes no call, where it may call tools or not.

    Return None if the text is not bound, or if the request leaves the model no such choice.

    Args:
        param: the field that binds the text.

    Raises:
        InvalidRequestError: no grammar can say "this text or a call"; the error names the field.
    """
    text = sampling.structured_outputs
    if text is None or use.choice != "auto":
        return None
    if syntax.tools is None:
        why = "this server does not detect tool calls, so there would be none"
    elif not has_rule(text):
        why = "a regex or grammar cannot be combined with tool calls"
    else:
        return text
    raise InvalidRequestError(
        f"{param} constrains the whole answer, but {why}.",
        remedy="Leave one of them out, or set tool_choice to none or required.",
        param=param,
    )


def behind_reasoning(
    sampling: SamplingParams, syntax: ModelSyntax, param: str, *, is_open: bool
) -> str | None:
    """Return the grammar of an answer that has reasoning and then a bound text.

    Return None if the whole answer is bound, as that of a model that does not reason, or not bound at all.

    Args:
        param: the field that binds the text.
        is_open: the answer begins inside the reasoning.

    Raises:
        InvalidRequestError: the answer begins with reasoning, and no grammar can say what follows it.
    """
    structured, reasoning = sampling.structured_outputs, syntax.reasoning
    if structured is None or reasoning is None:
        return None
    grammar = reasoned_grammar(structured, reasoning, syntax.marker_ids, is_open=is_open)
    if grammar is None and is_open:
        raise InvalidRequestError(
            f"{param} has a regex or grammar, but this model reasons before it answers.",
            remedy="Use json, json_object or choice, or switch reasoning off with chat_template_kwargs.",
            param=param,
        )
    return grammar


def _of_format(response_format: ResponseFormat) -> StructuredOutputs | None:
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True)
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        raise InvalidRequestError(
            "response_format.json_schema.schema is required for the type json_schema.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return StructuredOutputs(json=_text(response_format.json_schema.schema))


def _of_fields(fields: StructuredOutputFields) -> StructuredOutputs:
    return StructuredOutputs(
        json=fields.json if fields.json is None or isinstance(fields.json, str) else _text(fields.json),
        json_object=bool(fields.json_object),
        regex=fields.regex,
        choice=fields.choice,
        grammar=fields.grammar,
    )


def _text(schema: dict[str, object]) -> str:
    return msgspec.json.encode(schema).decode()
