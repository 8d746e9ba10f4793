"""How HTTP requests ask for structured output, and what is refused by name; over a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fake_engine import DEMO, FakeEngine, fake_model
from live_server import LiveServer
from penstock.config.limits import GrammarLimits
from penstock.config.server import ServerConfig
from penstock.errors import ConstraintError
from penstock.request import StructuredOutputs

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"enum": [1, None]}},
    "required": ["b"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    config = ServerConfig(drain_s=5.0, grammars=GrammarLimits(max_schema_bytes=2000, max_enum_items=3))
    with LiveServer(config=config, model=fake_model(grammar_model=DEMO)) as live:
        yield live


def body(path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = (
        {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    )
    return base | {"max_tokens": 3} | fields


def asked_for(server: LiveServer, path: str, **fields: Any) -> StructuredOutputs | None:
    status, answer = server.post(path, body(path, **fields))
    assert status == 200, answer
    return server.engine.added[-1][2].structured_outputs


def refused(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    before = len(server.engine.added)
    status, answer = server.post(path, body(path, **fields))
    assert status == 400, answer
    assert len(server.engine.added) == before
    error: dict[str, Any] = answer["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_response_format(server: LiveServer, path: str) -> None:
    assert asked_for(server, path, response_format={"type": "text"}) is None
    assert asked_for(server, path, response_format={"type": "json_object"}) == StructuredOutputs(
        json_object=True
    )
    for strict in ({}, {"strict": True}, {"strict": False}):
        schema = {"name": "answer", "schema": SCHEMA, "description": "x", **strict}
        found = asked_for(server, path, response_format={"type": "json_schema", "json_schema": schema})
        assert found is not None
        assert found.json is not None
        assert json.loads(found.json) == SCHEMA
        assert list(json.loads(found.json)["properties"]) == ["b", "a"], "fields come in the schema's order"
        assert not found.whitespace


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "[ab]+"}, StructuredOutputs(regex="[ab]+")),
        ({"choice": ["yes", "no"]}, StructuredOutputs(choice=["yes", "no"])),
        ({"grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
        ({"json_object": True}, StructuredOutputs(json_object=True)),
        ({"json": '{"type":"null"}'}, StructuredOutputs(json='{"type":"null"}')),
        (
            {"json": {"type": "null"}, "whitespace": True},
            StructuredOutputs(json='{"type":"null"}', whitespace=True),
        ),
        ({"json": {"type": "null"}, "regex": None}, StructuredOutputs(json='{"type":"null"}')),
        (
            {"json": {"type": "null"}, "open_objects": True},
            StructuredOutputs(json='{"type":"null"}', open_objects=True),
        ),
    ],
)
def test_structured_outputs(
    server: LiveServer, path: str, given: dict[str, Any], expected: StructuredOutputs
) -> None:
    assert asked_for(server, path, structured_outputs=given) == expected


def test_how_json_is_written_may_be_said_beside_a_response_format(server: LiveServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    for options in ({"open_objects": True}, {"whitespace": True}, {"open_objects": False, "json": None}):
        found = asked_for(server, CHAT, response_format=schema, structured_outputs=options)
        given = {name: value for name, value in options.items() if value is not None}
        assert found == StructuredOutputs(json='{"type":"null"}', **given)
    error = refused(
        server,
        CHAT,
        response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        structured_outputs={"open_objects": True},
    )
    assert error["param"] == "response_format"


def test_objects_are_open_where_the_server_says_so_and_the_request_does_not() -> None:
    """Issue 25, point 15. `--json-open-objects`; a request may say otherwise."""
    config = ServerConfig(json_open_objects=True)
    with LiveServer(config=config, model=fake_model(grammar_model=DEMO)) as live:
        for path in (CHAT, TEXT):
            for options, expected in (({}, True), ({"open_objects": False}, False)):
                found = asked_for(live, path, structured_outputs={"json": {"type": "null"}} | options)
                assert found is not None
                assert found.open_objects is expected
        found = asked_for(live, CHAT, response_format={"type": "json_object"})
        assert found == StructuredOutputs(json_object=True, open_objects=True)


FORMAT, OUTPUTS = "response_format", "structured_outputs"
JSON = {"type": "json_schema"}
REFUSED = [
    ({FORMAT: {"type": "xml"}}, "response_format.type", "invalid_type"),
    ({FORMAT: {}}, "response_format.type", "missing_required_parameter"),
    ({FORMAT: JSON}, "response_format.json_schema", "missing_required_parameter"),
    (
        {FORMAT: JSON | {"json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {FORMAT: JSON | {"json_schema": {"schema": "{}"}}},
        "response_format.json_schema.schema",
        "invalid_type",
    ),
    ({FORMAT: JSON | {"json_schema": {"schema": {"not": {}}}}}, FORMAT, "unsupported_schema"),
    ({FORMAT: JSON | {"json_schema": {"schema": {"$ref": "http://x/"}}}}, FORMAT, "unsupported_schema"),
    ({FORMAT: JSON | {"json_schema": {"schema": {"enum": [1, 2, 3, 4]}}}}, FORMAT, "out_of_range"),
    ({FORMAT: JSON | {"json_schema": {"schema": {"$ref": "#"}}}}, FORMAT, "invalid_grammar"),
    ({FORMAT: {"type": "json_object"}, OUTPUTS: {"regex": "a"}}, FORMAT, "invalid_value"),
    ({OUTPUTS: {}}, OUTPUTS, "invalid_value"),
    ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS, "invalid_value"),
    ({OUTPUTS: {"json_object": False}}, OUTPUTS, "invalid_value"),
    ({OUTPUTS: {"choice": []}}, OUTPUTS, "invalid_value"),
    ({OUTPUTS: {"choice": [1]}}, "structured_outputs.choice[0]", "invalid_type"),
    ({OUTPUTS: {"structural_tag": "{}"}}, OUTPUTS, "invalid_type"),
    ({OUTPUTS: {"regex": "a" * 2001}}, OUTPUTS, "out_of_range"),
    ({OUTPUTS: {"regex": "["}}, OUTPUTS, "invalid_grammar"),
    ({OUTPUTS: {"regex": "(?=a)"}}, OUTPUTS, "unsupported_schema"),
    ({OUTPUTS: {"grammar": "root ::= root"}}, OUTPUTS, "invalid_grammar"),
    ({OUTPUTS: {"json": "{"}}, OUTPUTS, "invalid_schema"),
    ({OUTPUTS: {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "invalid_combination"),
    ({OUTPUTS: {"regex": "a"}, "min_tokens": 2}, "min_tokens", "invalid_combination"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_r8_what_cannot_be_had_is_refused_and_named(
    server: LiveServer, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(server, path, **fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_former_names_are_refused_with_the_new_one(server: LiveServer, kind: str) -> None:
    error = refused(server, CHAT, **{f"guided_{kind}": "a"})
    assert (error["param"], error["code"]) == (f"guided_{kind}", "unsupported_parameter")
    assert f'structured_outputs: {{"{kind}": ...}}' in error["message"]


def test_a_model_without_a_tokenizer_says_so() -> None:
    with LiveServer() as live:
        error = refused(live, TEXT, response_format={"type": "json_object"})
        assert (error["param"], error["code"]) == ("response_format", "unsupported_by_model")
        assert live.post(TEXT, body(TEXT, response_format={"type": "text"}))[0] == 200


def test_a_row_without_a_token_is_answered_400_and_in_a_stream_by_an_event() -> None:
    unmet = ConstraintError("no token is allowed", param="structured_outputs")
    with LiveServer(FakeEngine(failure=unmet, fail_after=1)) as live:
        status, answer = live.post(TEXT, body(TEXT, max_tokens=9))
        assert (status, answer["error"]["code"]) == (400, "constraint_unmet")
        assert answer["error"]["type"] == "invalid_request_error"
