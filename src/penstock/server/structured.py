"""From `response_format` and `structured_outputs` of a request to `StructuredOutputs`."""

from __future__ import annotations

import msgspec

from penstock.errors import InvalidRequestError
from penstock.request import StructuredOutputs
from penstock.server.openai_types import GenerateRequest, ResponseFormat, StructuredOutputFields


def structured_field(request: GenerateRequest) -> str:
    """The field by which structured output is asked for, if it is."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def structured_outputs(request: GenerateRequest) -> StructuredOutputs | None:
    """What the text must be; None where nothing is asked. Raises `InvalidRequestError` naming the field."""
    of_format = None if request.response_format is None else _of_format(request.response_format)
    if request.structured_outputs is None:
        return of_format
    if of_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the text must be.",
            remedy="Leave one of them out.",
            param="response_format",
        )
    return _of_fields(request.structured_outputs)


def _of_format(asked: ResponseFormat) -> StructuredOutputs | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise InvalidRequestError(
            "response_format.json_schema.schema is required for the type json_schema.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return StructuredOutputs(json=_text(asked.json_schema.schema))


def _of_fields(asked: StructuredOutputFields) -> StructuredOutputs:
    return StructuredOutputs(
        json=asked.json if asked.json is None or isinstance(asked.json, str) else _text(asked.json),
        json_object=bool(asked.json_object),
        regex=asked.regex,
        choice=asked.choice,
        grammar=asked.grammar,
        whitespace=bool(asked.whitespace),
    )


def _text(schema: dict[str, object]) -> str:
    return msgspec.json.encode(schema).decode()
