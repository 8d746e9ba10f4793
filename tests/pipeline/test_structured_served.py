"""Structured output from a running server of two stages: the real client, and processes that are lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from depth import sampled
from disturbed import Server, Stream, named
from served import is_alive, wait_until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["small", "large", None]},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 6}, "maxItems": 5},
    },
    "required": ["name", "kind", "marks"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Tell me of a thing."}]


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "kind", "marks"]
    assert len(found["name"]) <= 20
    assert found["kind"] in ("small", "large", None)
    assert all(1 <= mark <= 6 for mark in found["marks"])


def test_the_openai_client_gets_what_its_schema_says(client: openai.OpenAI) -> None:
    for seed in range(4):
        whole = client.chat.completions.create(
            model="demo", messages=MESSAGES, response_format=FORMAT, seed=seed, max_tokens=200
        )
        assert whole.choices[0].finish_reason == "stop"
        check(whole.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, response_format=FORMAT, seed=seed, max_tokens=200, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == whole.choices[0].message.content


def test_a_schema_of_plain_classes_ends_by_itself(client: openai.OpenAI) -> None:
    """Issue 25, point 15. Without `additionalProperties: false`, as Pydantic writes it: where it may, the
    model goes on."""
    part = {
        "properties": {"n": {"maximum": 9, "minimum": 0, "title": "N", "type": "integer"}},
        "required": ["n"],
        "title": "Part",
        "type": "object",
    }
    plain = {
        "$defs": {"Part": part},
        "properties": {
            "whole": {"$ref": "#/$defs/Part"},
            "kind": {"default": "small", "enum": ["small", "large"], "title": "Kind", "type": "string"},
        },
        "required": ["whole"],
        "title": "Thing",
        "type": "object",
    }
    schema: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": plain}}
    for seed in range(5):
        whole = client.chat.completions.create(
            model="demo", messages=MESSAGES, response_format=schema, seed=seed, max_tokens=100
        )
        assert whole.choices[0].finish_reason == "stop"
        assert json.loads(whole.choices[0].message.content or "").keys() <= {"whole", "kind"}


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, "[a-z]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "<" /[ab]{1,4}/ ">"'}, "<[ab]{1,4}>"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}, r"\[[truefals,]*\]"),
    ],
)
def test_the_openai_client_gets_other_forms_by_extra_fields(
    client: openai.OpenAI, asked: dict[str, Any], pattern: str
) -> None:
    whole = client.completions.create(
        model="demo", prompt="So ", seed=3, max_tokens=60, extra_body={"structured_outputs": asked}
    )
    assert whole.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, whole.choices[0].text)


def test_the_openai_client_hears_what_is_not_supported(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format=schema)
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_schema")
    assert '"not"' in str(caught.value)


def test_r8_a_grammar_without_end_is_refused_and_the_server_serves_on(
    server: Server, client: openai.OpenAI
) -> None:
    """What is being built ends with its process, which is not one of the server's own."""
    endless = {"type": "integer", "multipleOf": 99_999_999}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format=schema)
    assert caught.value.code == "grammar_too_complex"
    assert server.get("/health")
    whole = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=FORMAT, max_tokens=200
    )
    check(whole.choices[0].message.content or "")


def long_text(seed: int) -> dict[str, Any]:
    things = {"type": "array", "items": SCHEMA, "minItems": 12, "maxItems": 12}
    return {
        "prompt": "Things: ",
        "structured_outputs": {"json": things},
        "seed": seed,
        "ignore_eos": False,
        "max_tokens": 900,
    }


@pytest.mark.parametrize(
    "victim", sampled(["penstock core", "penstock stage 1 tp 0", "penstock stage 0 tp 0"], 1)
)
def test_r4_d12_a_text_goes_on_when_a_process_is_killed(server: Server, victim: str) -> None:
    """The last stage, or another, gets the tokens that there are, and goes on at the same place."""
    expected = [*Stream(server, long_text(5))]
    before = server.num_recoveries
    stream = iter(Stream(server, long_text(5)))
    found = [next(stream) for _ in range(9)]
    named(server, victim).kill()
    found += stream
    assert found == expected
    wait_until(lambda: server.num_recoveries == before + 1, 30)


@pytest.mark.soak
def test_r6_no_process_is_left_of_a_server_that_has_built_grammars() -> None:
    with Server(1) as served:
        assert [*Stream(served, long_text(1))]
        family: list[psutil.Process] = served.family()
        assert any("proving_process" in " ".join(process.cmdline()) for process in family)
        assert served.stop() == 0
        wait_until(lambda: not any(map(is_alive, family)), 10)
