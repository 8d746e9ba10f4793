"""`/v1/embeddings` of the HTTP server over a fake engine, by plain requests and by the `openai` client."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from fake_engine import BOS, VOCAB_SIZE, FakeEngine, fake_model, fake_vector
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.errors import NumericalError, OverloadedError
from penstock.request import VectorShape
from penstock.server.routes.embeddings import AT_ONCE

PATH = "/v1/embeddings"
AB = [BOS, 97, 98]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def numbers(prompt: list[int], pooling: str = "last") -> list[float]:
    return list(struct.unpack("<4f", fake_vector(prompt, pooling)))


def of_length_one(values: list[float]) -> Any:
    return pytest.approx(list(np.array(values) / np.linalg.norm(values)), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [AB]),
        (["ab", "c"], [AB, [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_the_four_forms_of_input_and_the_shape_of_the_answer(
    live: LiveServer, given: Any, prompts: list[list[int]]
) -> None:
    status, answer = live.post(PATH, {"input": given, "model": "fake"})
    assert status == 200
    assert set(answer) == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "fake")
    count = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert [entry["object"] for entry in answer["data"]] == ["embedding"] * len(prompts)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(prompts)))
    for entry, prompt in zip(answer["data"], prompts, strict=True):
        assert entry["embedding"] == of_length_one(numbers(prompt))


def test_the_openai_client_reads_base64_and_floats_alike(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="fake", input=["ab", "c"], encoding_format="float")
    packed = client.embeddings.create(model="fake", input=["ab", "c"])  # asks for base64 by itself
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    assert plain.data[0].embedding == of_length_one(numbers(AB))
    assert packed.usage.prompt_tokens == 5


def test_base64_is_float32_lowest_byte_first(live: LiveServer) -> None:
    body = {"input": "ab", "encoding_format": "base64", "normalize": False}
    (entry,) = live.post(PATH, body)[1]["data"]
    assert struct.unpack("<4f", base64.b64decode(entry["embedding"])) == tuple(numbers(AB))


def test_dimensions_cut_and_have_length_one_again(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input="ab", dimensions=2)
    assert answer.data[0].embedding == of_length_one(numbers(AB)[:2])
    raw = client.embeddings.create(
        model="fake", input="ab", dimensions=2, extra_body={"normalize": False, "pooling": "mean"}
    )
    assert raw.data[0].embedding == numbers(AB, "mean")[:2]


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pooling_and_normalize_are_extras(client: openai.OpenAI, pooling: str) -> None:
    extra = {"pooling": pooling, "normalize": False}
    answer = client.embeddings.create(model="fake", input="ab", extra_body=extra)
    assert answer.data[0].embedding == numbers(AB, pooling)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "out_of_range"),
        ({"input": [[]]}, "input", "empty_prompt"),
        ({"input": 7}, "input", "invalid_type"),
        ({"input": [1, "a"]}, "input", "invalid_type"),
        ({"input": [1.5]}, "input[0]", "invalid_type"),
        ({"input": [VOCAB_SIZE]}, "input", "token_id_out_of_range"),
        ({"input": [1] * 4097}, "input", "context_length_exceeded"),
        ({"input": "x" * (16 * 4096 + 1)}, "input", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", "out_of_range"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_type"),
        ({"input": "a", "dimensions": 3}, "dimensions", "out_of_range"),
        ({"input": "a", "dimensions": 0}, "dimensions", "out_of_range"),
        ({"input": "a", "dimensions": "4"}, "dimensions", "invalid_type"),
        ({"input": "a", "pooling": "max"}, "pooling", "invalid_type"),
        ({"input": "a", "normalize": 1}, "normalize", "invalid_type"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
    ],
)
def test_r8_wrong_fields_are_named(live: LiveServer, fields: dict[str, Any], param: str, code: str) -> None:
    before = len(live.engine.embedded)
    status, answer = live.post(PATH, fields)
    assert status == 400, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert len(live.engine.embedded) == before


def test_a_model_that_was_not_trained_for_it_refuses_a_cut_by_name() -> None:
    with LiveServer(model=fake_model(vector=VectorShape(size=4))) as live:
        status, answer = live.post(PATH, {"input": "a", "dimensions": 2})
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert "matryoshka_dimensions" in answer["error"]["message"]
        assert live.post(PATH, {"input": "a", "dimensions": 4})[0] == 200


def test_the_whole_context_is_taken_and_other_models_are_not_here(live: LiveServer) -> None:
    assert live.post(PATH, {"input": [1] * 4096})[0] == 200
    status, answer = live.post(PATH, {"input": "a", "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_fields_that_nobody_knows_are_named_in_a_header(live: LiveServer) -> None:
    response, _ = live.request("POST", PATH, {"input": "a", "stream_options": 3, "task": "search"})
    assert response.status == 200
    assert response.headers["x-penstock-warning"] == "ignored unknown field(s): stream_options, task"


def test_limits_of_inputs_and_tokens_are_settings() -> None:
    with LiveServer(limits=Limits(max_embedding_inputs=3, max_embedding_tokens=6)) as live:
        assert live.post(PATH, {"input": ["a", "b", "c"]})[0] == 200
        for given, told in (["a"] * 4, "1 to 3 prompts, got 4"), (["abc", "de"], "7 tokens in all"):
            status, answer = live.post(PATH, {"input": given})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (
                400,
                "input",
                "out_of_range",
            )
            assert told in answer["error"]["message"]


def test_many_inputs_go_to_the_engine_a_few_at_a_time() -> None:
    engine = FakeEngine(max_alive=AT_ONCE)
    with LiveServer(engine) as live:
        prompts = [[index % 250 + 1] * (index % 3 + 1) for index in range(500)]
        status, answer = live.post(PATH, {"input": prompts, "normalize": False})
        assert status == 200
        assert [entry["embedding"] for entry in answer["data"]] == [numbers(prompt) for prompt in prompts]
        assert len(engine.embedded) == 500


def test_a_full_engine_is_a_429_and_a_failed_input_ends_the_others() -> None:
    with LiveServer(FakeEngine(max_alive=1)) as live:
        status, answer = live.post(PATH, {"input": ["a", "b"]})
        assert (status, answer["error"]["type"]) == (429, OverloadedError.error_type)
        live.wait_for(lambda: not live.engine.alive)
    failure = NumericalError("the model gave NaN or infinity in the vector of request 1 (step 4).")
    with LiveServer(FakeEngine(failure=failure)) as live:
        status, answer = live.post(PATH, {"input": ["a", "b"]})
        assert status == NumericalError.http_status
        assert "NaN or infinity" in answer["error"]["message"]
        live.wait_for(lambda: not live.engine.alive)


def test_r13_a_client_that_leaves_cancels_all_its_inputs() -> None:
    engine = FakeEngine(hold_after=0)
    with LiveServer(engine) as live:
        with live.connect() as connection:
            raw = b'{"input": ["a", "b", "c"]}'
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            live.wait_for(lambda: len(engine.alive) == 3)
        live.wait_for(lambda: not engine.alive)
        assert len(engine.cancelled) == 3
