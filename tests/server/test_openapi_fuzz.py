"""Requests made from our own OpenAPI document, good and bad ones, against the real HTTP server.

The document must be true: what it calls wrong is refused, every answer has a status, a media type and a shape
that it names, and nothing is a 5xx. Examples are the same in every run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from depth import depth
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.server.http.access import ADMIN_PATHS, PAGE_PATHS

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses")
TEXT = (
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions/render",
    "/v1/completions/render",
)
COUNTED = ("/v1/messages/count_tokens",)  # whose body is that of a request that is answered
REQUIRED_QUERY = {"/close_session": {"session_id": "a"}, "/slow_down": {"interval_ms": "1"}}
FEEDS = ("/debug/pipeline/events",)  # without an end: `test_pipeline_view`
PLAIN = (
    "/v1/models",
    "/v1/models/{model_id}",
    "/health",
    "/health/ready",
    "/health/live",
    "/health/generate",
    "/metrics",
    "/version",
    "/debug/trace",
    "/debug/pipeline",
    "/debug/pipeline/table",
    "/server_info",
)
STREAMS = ("/v1/streams/{request_id}",)  # of two methods: `test_resumed_streams`


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """With few messages in a request: too many of them would be refused for the bytes of the body."""
    with LiveServer(limits=Limits(max_messages=8)) as server:
        yield server


@pytest.fixture(scope="module")
def administered() -> Iterator[LiveServer]:
    with LiveServer(config=ServerConfig(admin_keys=["an-admin"])) as server:
        yield server


def fuzz(live: LiveServer, mode: GenerationMode, path: str, num_examples: int, key: str = "") -> Counter[int]:
    """Send examples of one operation; how often each status came."""
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    (operation,) = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        if key:
            session.headers["authorization"] = f"Bearer {key}"

        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            response = case.call(base_url=live.url, session=session)
            case.validate_response(response, checks=CHECKS)
            statuses[response.status_code] += 1

        run()
    return statuses


def check_good(live: LiveServer, path: str, num_examples: int) -> None:
    statuses = fuzz(live, GenerationMode.POSITIVE, path, num_examples)
    assert set(statuses) <= {200, 400, 404}  # what two fields are together, and sessions, no schema says
    assert statuses[200] >= num_examples // 8, "hardly an example got past the door"


def check_bad(live: LiveServer, path: str, num_examples: int) -> None:
    before = len(live.engine.added) + len(live.engine.embedded)
    statuses = fuzz(live, GenerationMode.NEGATIVE, path, num_examples)
    assert set(statuses) <= {400, 404}  # a model that is not here is named before other faults
    assert statuses[400] >= num_examples // 2, "hardly an example was read beyond the model's name"
    assert len(live.engine.added) + len(live.engine.embedded) == before


def test_the_document_is_openapi_and_names_every_route(live: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    schema.validate()
    named = [found.ok().path for found in schema.get_all_operations()]
    routes = live.app.routes.routes
    served = {getattr(route, "path", "").replace(":path", "") for route in routes}
    unlisted = {"/openapi.json", *PAGE_PATHS}
    of_kinds = [*GENERATING, *TEXT, *COUNTED, *PLAIN, *FEEDS, *STREAMS]
    assert sorted(set(named)) == sorted(served - unlisted) == sorted(of_kinds)


@pytest.mark.deep
@pytest.mark.parametrize("path", GENERATING)
def test_r8_good_requests_of_our_document_are_answered_as_it_says(live: LiveServer, path: str) -> None:
    check_good(live, path, depth(24, 120))


@pytest.mark.deep
@pytest.mark.parametrize("path", GENERATING)
def test_r8_bad_requests_of_our_document_are_refused(live: LiveServer, path: str) -> None:
    check_bad(live, path, depth(24, 120))


@pytest.mark.parametrize("path", TEXT)
def test_r8_text_routes_answer_as_our_document_says(live: LiveServer, path: str) -> None:
    before = len(live.engine.added)
    statuses = fuzz(live, GenerationMode.POSITIVE, path, 20)
    assert set(statuses) <= {200, 400, 404}
    assert statuses[200] >= 3, "hardly an example got past the door"
    statuses = fuzz(live, GenerationMode.NEGATIVE, path, 20)
    assert set(statuses) <= {400, 404}
    assert statuses[400] >= 10
    assert len(live.engine.added) == before, "nothing runs"


@pytest.mark.parametrize("path", PLAIN)
def test_r8_routes_without_bodies_answer_as_our_document_says(live: LiveServer, path: str) -> None:
    statuses = fuzz(live, GenerationMode.POSITIVE, path, 10)
    assert set(statuses) <= {200, 404}


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_r8_admin_routes_answer_as_our_document_says(administered: LiveServer, path: str) -> None:
    statuses = fuzz(administered, GenerationMode.POSITIVE, path, 15, "an-admin")
    assert set(statuses) <= {200, 400}
    assert statuses[200] or path.endswith("_profile"), "which need a directory"


def wrong_words(schema: dict[str, Any]) -> list[str]:
    """Values of a query parameter that its schema does not allow, whatever else it is made of."""
    kinds = {variant.get("type"): variant for variant in schema.get("anyOf", [schema])}
    if "array" in kinds:
        return []
    if "string" in kinds:
        return ["a b", "a\n", "x" * 65] if "pattern" in kinds["string"] else ["x"]
    if "boolean" in kinds:
        return ["", "x", "2"]
    (numbers,) = (variant for kind, variant in kinds.items() if kind in ("integer", "number"))
    return ["", "x", "nan", "-1", *map(str, edges(numbers)[1])]


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS - {"/is_paused"}))
def test_r8_admin_routes_refuse_what_their_parameters_may_not_be(administered: LiveServer, path: str) -> None:
    """Each by its name, and before anything is done."""
    before = len(administered.engine.operations)
    document = json.loads(administered.request("GET", "/openapi.json")[1])
    parameters = document["paths"][path]["post"]["parameters"]
    asked = [(one["name"], word) for one in parameters for word in wrong_words(one["schema"])]
    asked += [("request_id", word) for word in ("", "x" * 161)] if path == "/abort" else []
    assert "timeout_s" in {name for name, _ in asked}
    for name, word in asked:
        query = urlencode(REQUIRED_QUERY.get(path, {}) | {name: word})
        headers = {"authorization": "Bearer an-admin"}
        response, raw = administered.request("POST", f"{path}?{query}", headers=headers)
        assert (response.status, json.loads(raw)["error"]["param"]) == (400, name), (name, word)
    assert len(administered.engine.operations) == before


def test_the_one_model_is_answered_as_our_document_says(live: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    case = schema["/v1/models/{model_id}"]["GET"].Case(path_parameters={"model_id": "fake"})
    response = case.call(base_url=live.url)
    assert response.status_code == 200
    case.validate_response(response, checks=CHECKS)


# Bounds at their edges: generated data hardly ever stands one step beyond a bound and is right otherwise.

NEEDS_ANOTHER_FIELD = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"}
BASES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    "CompletionRequest": {"prompt": "a"},
    "TokenizeChatRequest": {},
    "DetokenizeRequest": {},
    "EmbeddingRequest": {"input": "a"},
    "ResponsesRequest": {"input": "a"},
    "MessagesRequest": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "CountTokensRequest": {"messages": [{"role": "user", "content": "x"}]},
}
BESIDE = {"top_logprobs": {"include": ["message.output_text.logprobs"]}}  # what else the field needs
BOUNDED = [
    ("/v1/chat/completions", "ChatRequest", 20),
    ("/v1/chat/completions/render", "ChatRequest", 4),
    ("/v1/completions", "CompletionRequest", 20),
    ("/v1/embeddings", "EmbeddingRequest", 0),
    ("/v1/messages", "MessagesRequest", 20),
    ("/v1/messages/count_tokens", "CountTokensRequest", 4),
    ("/v1/responses", "ResponsesRequest", 20),
    ("/tokenize", "TokenizeChatRequest", 1),
    ("/detokenize", "DetokenizeRequest", 2),
]


def edges(variant: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values just within the bounds of a schema, and one step beyond them."""
    kind, within, beyond = variant.get("type"), [], []
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 1e-9
        within += [variant[name] for name in ("minimum", "maximum") if name in variant]
        beyond += [variant["minimum"] - step] if "minimum" in variant else []
        beyond += [variant["maximum"] + step] if "maximum" in variant else []
        beyond += [variant["exclusiveMinimum"]] if "exclusiveMinimum" in variant else []
    elif kind == "string":
        within += ["a" * variant[name] for name in ("minLength", "maxLength") if name in variant]
        beyond += ["a" * (variant["maxLength"] + 1)] if "maxLength" in variant else []
        beyond += [""] if variant.get("minLength") else []
    elif kind == "array":
        items = [example(variant["items"], index) for index in range(variant.get("maxItems", 0) + 1)]
        within += [items[:-1]] if "maxItems" in variant else []
        beyond += [items] if "maxItems" in variant else []
        beyond += [[]] if variant.get("minItems") else []
        beyond += [[value] for value in edges(variant["items"])[1]]
    elif kind == "object" and "maxProperties" in variant:
        of_values = edges(variant["additionalProperties"])
        within += [{"0": value} for value in of_values[0]]
        beyond += [{"0": value} for value in of_values[1]]
        beyond += [{str(number): 0 for number in range(variant["maxProperties"] + 1)}]
    return within, beyond


def example(schema: dict[str, Any], index: int) -> Any:
    if "$ref" in schema:
        of = schema["$ref"].rpartition("/")[2]
        message, name = {"role": "user", "content": "x"}, f"f{index}"
        return {
            "ChatMessage": message,
            "InputMessage": message,
            "InputItem": message,
            "Tool": {"type": "function", "function": {"name": name}},
            "FunctionTool": {"type": "function", "name": name},
            "TextBlock": {"type": "text", "text": "x"},
            "ToolParam": {"name": name, "input_schema": {}},
        }[of]
    return schema.get("minimum", "a") if schema.get("type") == "integer" else "a"


@pytest.mark.parametrize(("path", "name", "at_least"), BOUNDED)
def test_r8_every_bound_of_our_document_is_the_servers(path: str, name: str, at_least: int) -> None:
    with LiveServer(limits=Limits(max_messages=5)) as live:
        document = json.loads(live.request("GET", "/openapi.json")[1])
        num_refused = 0
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            for variant in schema.get("anyOf", [schema]):
                within, beyond = edges(variant)
                base = BASES[name] | BESIDE.get(field, {})
                for value in within if field not in NEEDS_ANOTHER_FIELD else []:
                    assert live.post(path, base | {field: value})[0] == 200, (field, value)
                for value in beyond:
                    status, answer = live.post(path, base | {field: value})
                    assert status == 400, (field, value)
                    assert answer["error"].get("param", field), (field, value)  # messages tell none
                    num_refused += 1
        assert num_refused > at_least
