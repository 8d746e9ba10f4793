"""Makes the description in `/openapi.json` from the types that read requests and write answers.

`app` makes a `DescribedRoute` for each route, and then one document of all of them. The schemas are those
of the types by which msgspec reads and writes. Bounds are in the document as far as a schema can express
them. A bound that depends on two fields, or on the length of a text in tokens, shows only in the error of a
request that breaks it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.routing import Route

from penstock import __version__
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.operations import SESSION_ID
from penstock.request import VectorShape
from penstock.server.anthropic.error_form import MessagesErrorBody
from penstock.server.anthropic.messages_types import (
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from penstock.server.anthropic.turns import BLOCKS
from penstock.server.engine_port import ServedModel
from penstock.server.http.access import ADMIN_PATHS, OPEN_PATHS
from penstock.server.http.errors import ErrorBody
from penstock.server.http.limits import ByteLimits
from penstock.server.openai.openai_types import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    ModelCard,
    ModelList,
    RenderedPrompt,
)
from penstock.server.openai.prompts import ROLES
from penstock.server.openai.responses_input import MAX_METADATA
from penstock.server.openai.responses_types import ResponseObject, ResponsesRequest
from penstock.server.openai.sampling import NO_LIMIT
from penstock.server.routes.admin import (
    Aborted,
    Applied,
    Flushed,
    NoQuery,
    PauseState,
    SessionClosed,
    SessionOpened,
    Slowed,
)
from penstock.server.routes.health import Health, Version
from penstock.server.routes.pipeline_view import PipelineView
from penstock.server.routes.profiler import ProfileStarted, ProfileStopped
from penstock.server.routes.query import Endpoint
from penstock.server.routes.server_info import ServerInfo
from penstock.server.routes.streams import StreamStopped
from penstock.server.routes.text_routes import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from penstock.tokenizer.call_reader import NAME

_TYPES = (
    Aborted,
    Applied,
    Flushed,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    CountTokensRequest,
    ErrorBody,
    Health,
    MessageObject,
    MessagesErrorBody,
    MessagesRequest,
    ModelCard,
    ModelList,
    PauseState,
    PipelineView,
    ProfileStarted,
    ProfileStopped,
    ServerInfo,
    SessionClosed,
    SessionOpened,
    Slowed,
    StreamStopped,
    TokenCount,
    TokenizeChatRequest,
    TokenizeTextRequest,
    TokenizeResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    RenderedPrompt,
    ResponseObject,
    ResponsesRequest,
    Version,
)
_REQUESTS = (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    EmbeddingRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    DetokenizeRequest,
)
_MESSAGES = ("CountTokensRequest", "MessagesRequest")
_ANY_ROUTE = (401, 403, 500)
_GENERATION = (400, 404, 413, 429, 503)
_TEXT = (400, 404, 413, 429)
_REASONS = {
    400: "A field, or the body, is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin is not allowed.",
    404: "The model, session or stream does not exist.",
    410: "The requested events are no longer kept.",
    413: "The body is too large.",
    429: "Too many requests wait; try again after Retry-After seconds.",
    500: "The server failed; its log has more under the request id.",
    503: "The pipe is not ready, or the server is shutting down; try again after Retry-After seconds.",
}
_SCHEME, _HEADER = "key", "key_header"
_ANY_KEY: list[dict[str, list[str]]] = [{_SCHEME: []}, {_HEADER: []}]

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The description of one route, without its path, name and text.

    Attributes:
        responses: the answers by status, in the document's form.
        body: the request's body, in the document's form; empty: the route reads none.
        query: the type of the parameters in the URL's query.
    """

    responses: Mapping[int, Schema]
    body: Schema = field(default_factory=dict)
    query: type[msgspec.Struct] = NoQuery


class DescribedRoute(Route):
    """A route of one method that the document lists; the docstring of its endpoint is its text there."""

    def __init__(
        self, method: str, path: str, endpoint: Endpoint, *, name: str, description: Description
    ) -> None:
        super().__init__(path, endpoint, methods=[method], name=name)
        self.methods = {method}  # the framework adds HEAD to GET by itself
        self._method = method.lower()
        self._description = description

    def operation(self) -> tuple[str, str, Schema]:
        """Return the path and the method as the document writes them, and the entry for them."""
        described = self._description
        text = inspect.cleandoc(self.endpoint.__doc__ or "")
        operation: Schema = {
            "summary": self.name.replace("_", " ").title(),
            "operationId": re.sub(r"\W", "_", f"{self.name}{self.path_format}_{self._method}"),
            "parameters": [*map(_path_parameter, self.param_convertors), *_query_parameters(described.query)],
            "requestBody": described.body,
            "responses": {str(status): answer for status, answer in described.responses.items()},
            "description": text,
        }
        return self.path_format, self._method, {key: value for key, value in operation.items() if value}


def _path_parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(query_type: type[msgspec.Struct]) -> list[Schema]:
    schema = msgspec.json.schema_components([query_type])[1][query_type.__name__]
    required = schema["required"]
    return [
        {"name": name, "in": "query", "required": name in required, "schema": parameter}
        | ({"description": parameter["description"]} if "description" in parameter else {})
        for name, parameter in schema["properties"].items()
    ]


def _content(media_type: str, schema: Schema) -> Schema:
    return {"content": {media_type: {"schema": schema}}}


def _reference(of: type[msgspec.Struct]) -> Schema:
    return {"$ref": f"#/components/schemas/{of.__name__}"}


def _answers(ok: Schema, errors: Iterable[int], error: type[msgspec.Struct] = ErrorBody) -> dict[int, Schema]:
    refused = {
        status: {"description": _REASONS[status], **_content("application/json", _reference(error))}
        for status in (*_ANY_ROUTE, *errors)
    }
    return {200: {"description": "Done.", **ok}} | refused


def generation_route(
    request: type[msgspec.Struct], answer: type[msgspec.Struct], error: type[msgspec.Struct] = ErrorBody
) -> Description:
    """Describe a route that runs the model, and streams its answer if the request asks for that.

    Args:
        error: the shape of its errors.
    """
    described = whole_route(request, answer, error)
    described.responses[200]["content"]["text/event-stream"] = {}
    return described


def whole_route(
    request: type[msgspec.Struct], answer: type[msgspec.Struct], error: type[msgspec.Struct] = ErrorBody
) -> Description:
    """Describe a route that runs the model and never streams."""
    ok = _content("application/json", _reference(answer))
    body = {"required": True, **_content("application/json", _reference(request))}
    return Description(responses=_answers(ok, _GENERATION, error), body=body)


def text_route(
    answer: type[msgspec.Struct],
    *requests: type[msgspec.Struct],
    is_list: bool = False,
    error: type[msgspec.Struct] = ErrorBody,
) -> Description:
    """Describe a route that turns text into ids or ids into text.

    Args:
        requests: types of the body; a request has one of them.
        is_list: the answer is a list of `answer`.
        error: the shape of its errors.
    """
    shape = {"type": "array", "items": _reference(answer)} if is_list else _reference(answer)
    bodies = [_reference(request) for request in requests]
    body = {
        "required": True,
        **_content("application/json", bodies[0] if len(bodies) == 1 else {"anyOf": bodies}),
    }
    return Description(responses=_answers(_content("application/json", shape), _TEXT, error), body=body)


def stream_route(*, stops: bool = False) -> Description:
    """Describe the route by which a client comes back to a kept stream, to read on or to end it (`stops`)."""
    shape = _reference(StreamStopped) if stops else {"type": "string"}
    answer = _content("application/json" if stops else "text/event-stream", shape)
    return Description(responses=_answers(answer, (404,) if stops else (400, 404, 410)))


def plain_route(path: str, query: type[msgspec.Struct] = NoQuery) -> Description:
    """Describe a route without a body."""
    if path in OPEN_PATHS:
        health = _content("application/json", _reference(Health))
        answers = {200: {"description": "Yes.", **health}, 503: {"description": "No.", **health}}
        return Description(responses=_answers({}, ()) | answers, query=query)
    shape = _ANSWERS.get(path, _content("application/json", {"type": "object"}))
    errors = _ERRORS.get(path, ())
    if path in ADMIN_PATHS:
        errors = (400, *errors, 503)
    return Description(responses=_answers(shape, errors), query=query)


_ERRORS: Mapping[str, tuple[int, ...]] = {
    "/v1/models/{model_id:path}": (404,),
    "/debug/trace": (503,),
    "/debug/pipeline/events": (429, 503),
    "/start_profile": (429,),
    "/open_session": (429,),
    "/close_session": (404,),
}
_ANSWERS: Mapping[str, Schema] = {
    "/v1/models": _content("application/json", _reference(ModelList)),
    "/v1/models/{model_id:path}": _content("application/json", _reference(ModelCard)),
    "/pause": _content("application/json", _reference(Applied)),
    "/resume": _content("application/json", _reference(Applied)),
    "/flush_cache": _content("application/json", _reference(Flushed)),
    "/abort": _content("application/json", _reference(Aborted)),
    "/slow_down": _content("application/json", _reference(Slowed)),
    "/open_session": _content("application/json", _reference(SessionOpened)),
    "/close_session": _content("application/json", _reference(SessionClosed)),
    "/start_profile": _content("application/json", _reference(ProfileStarted)),
    "/stop_profile": _content("application/json", _reference(ProfileStopped)),
    "/is_paused": _content("application/json", _reference(PauseState)),
    "/server_info": _content("application/json", _reference(ServerInfo)),
    "/debug/pipeline": _content("application/json", _reference(PipelineView)),
    "/debug/pipeline/events": _content("text/event-stream", {"type": "string"}),
    "/debug/pipeline/table": _content("text/html", {"type": "string"}),
    "/version": _content("application/json", _reference(Version)),
    "/metrics": _content("text/plain", {"type": "string"}),
}


def document_of(routes: Iterable[DescribedRoute], model: ServedModel, config: ServerConfig) -> Schema:
    """Return the whole document: paths, types with their bounds, and how a request carries its key."""
    paths: dict[str, dict[str, Schema]] = {}
    for route in routes:
        path, method, operation = route.operation()
        paths.setdefault(path, {})[method] = operation
    for path in ADMIN_PATHS & paths.keys():
        for operation in paths[path].values():
            operation["security"] = _ANY_KEY
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(model, config.limits)},
    }
    if config.api_keys or config.admin_keys:
        document["components"]["securitySchemes"] = {
            _SCHEME: {"type": "http", "scheme": "bearer"},
            _HEADER: {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    if config.api_keys:
        document["security"] = _ANY_KEY
        for path in OPEN_PATHS:
            paths[path]["get"]["security"] = []
    return document


def _schemas(model: ServedModel, limits: Limits) -> dict[str, Schema]:
    _, definitions = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    for name in _MESSAGES:
        del definitions[name]["properties"]["stop"]  # refused in these requests, which have `stop_sequences`
    for name, bounds in _bounds(model, limits).items():
        _bound(definitions[name]["properties"], bounds)
    for request in _REQUESTS:
        names = {"enum": [*model.names, ""]}  # an empty name asks for the model that is served
        _bound(definitions[request.__name__]["properties"], {"model": {"string": names}})
    return definitions


def _bound(properties: Schema, bounds: Mapping[str, Mapping[str, Schema]]) -> None:
    """Write the bounds of each field into the variants of its type for which they hold.

    Args:
        bounds: for each field's name, the bounds for each JSON type of its value.
    """
    for name, by_type in bounds.items():
        variants = properties[name].get("anyOf", [properties[name]])
        for variant in variants:
            variant.update(by_type.get(variant.get("type", ""), {}))


def _bounds(model: ServedModel, limits: Limits) -> dict[str, dict[str, dict[str, Schema]]]:
    ids = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    stop = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_string_bytes}
    bad_word = {"type": "string", "minLength": 1, "maxLength": limits.max_bad_word_bytes}
    logprobs = {"integer": {"minimum": 0, "maximum": limits.max_logprobs}}
    tokens = {"integer": {"minimum": NO_LIMIT, "maximum": model.max_model_len}}
    sampled: dict[str, dict[str, Schema]] = {
        "temperature": {"number": {"minimum": 0, "maximum": 2}},
        "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
        "min_p": {"number": {"minimum": 0, "maximum": 1}},
        "top_k": {"integer": {"minimum": -1, "maximum": model.vocab_size}},
        "presence_penalty": {"number": {"minimum": -2, "maximum": 2}},
        "frequency_penalty": {"number": {"minimum": -2, "maximum": 2}},
        "repetition_penalty": {"number": {"exclusiveMinimum": 0, "maximum": 10}},
        "logit_bias": {"object": _bias(limits)},
        "allowed_token_ids": {
            "array": {"minItems": 1, "maxItems": limits.max_allowed_token_ids, "items": ids}
        },
        "bad_words": {"array": {"maxItems": limits.max_bad_words, "items": bad_word}},
        "seed": {"integer": {"minimum": -(2**63), "maximum": 2**63 - 1}},
        "min_tokens": {"integer": {"minimum": 0, "maximum": model.max_model_len}},
        "stop": {"string": stop, "array": {"maxItems": limits.max_stop_strings, "items": stop}},
        "stop_token_ids": {"array": {"maxItems": limits.max_stop_token_ids, "items": ids}},
        "session_id": {"string": {"pattern": f"^({SESSION_ID})?$"}},
    }
    common = sampled | {
        "n": {"integer": {"minimum": 1, "maximum": limits.max_n}},
        "max_tokens": tokens,
        "prompt_logprobs": logprobs,
    }
    conversation = {name: bounds for name, bounds in sampled.items() if name != "stop"} | {
        "messages": {"array": {"minItems": 1, "maxItems": limits.max_messages}},
        "stop_sequences": {"array": sampled["stop"]["array"]},
        "tools": {"array": {"maxItems": limits.max_tools}},
    }
    prompts = {"minItems": 1, "items": _prompt_item(ids)}
    messages = {"minItems": 1, "maxItems": limits.max_messages}
    return {
        "CompletionRequest": {**common, "prompt": {"array": prompts}, "logprobs": logprobs},
        "ChatRequest": {
            **common,
            "messages": {"array": messages},
            "max_completion_tokens": tokens,
            "top_logprobs": logprobs,
            "tools": {"array": {"maxItems": limits.max_tools}},
            "chat_template_kwargs": {"object": {"maxProperties": limits.max_template_kwargs}},
        },
        "ResponsesRequest": {
            **sampled,
            "input": {"array": messages},
            "max_output_tokens": tokens,
            "top_logprobs": logprobs,
            "tools": {"array": {"maxItems": limits.max_tools}},
            "metadata": {"object": {"maxProperties": MAX_METADATA}},
            "chat_template_kwargs": {"object": {"maxProperties": limits.max_template_kwargs}},
        },
        "MessagesRequest": {**conversation, "max_tokens": {"integer": {"minimum": 0}}},
        "CountTokensRequest": {
            name: bounds
            for name, bounds in conversation.items()
            if name != "min_tokens"  # there is no answer whose tokens it could bound
        },
        "ContentBlock": {"type": {"string": {"enum": list(BLOCKS)}}},
        "TextBlock": {"type": {"string": {"enum": ["text"]}}},
        "TokenizeChatRequest": {"messages": {"array": messages}},
        "DetokenizeRequest": {
            "tokens": {
                "array": {
                    "maxItems": ByteLimits.resolve(limits, model.max_model_len).max_prompt,
                    "items": ids,
                }
            }
        },
        "Function": {"name": {"string": {"pattern": f"^{NAME.pattern}$"}}},
        "EmbeddingRequest": {"input": {"array": prompts}, "dimensions": _dimensions(model.vector)},
        "ChatMessage": {"role": {"string": {"enum": list(ROLES)}}},
        "ContentPart": {"type": {"string": {"enum": ["text"]}}},
    }


def _bias(limits: Limits) -> Schema:
    value = {"type": "number", "minimum": -100, "maximum": 100}
    ids = {"pattern": "^(0|[1-9][0-9]*)$"}
    return {"maxProperties": limits.max_logit_bias, "propertyNames": ids, "additionalProperties": value}


def _dimensions(vector: VectorShape) -> dict[str, Schema]:
    if vector.any_cut:
        return {"integer": {"minimum": 1, "maximum": vector.size}}
    return {"integer": {"enum": sorted({vector.size, *vector.cuts})}}


def _prompt_item(ids: Schema) -> Schema:
    return {"anyOf": [{"type": "string"}, ids, {"type": "array", "minItems": 1, "items": ids}]}
