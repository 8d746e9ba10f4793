"""Several choices (`n`): indices, usage, streams and refusals over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fake_engine import VOCAB_SIZE, FakeEngine
from live_server import LiveServer, events
from penstock.engine.client.siblings import sibling_seed
from penstock.errors import NumericalError

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def test_completions_have_n_choices_for_each_prompt_in_order(live: LiveServer) -> None:
    status, answer = live.post(TEXT, {"prompt": ["ab", "xyz"], "n": 3, "max_tokens": 2, "seed": 9})
    assert status == 200
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "ab"), (3, "xy"), (4, "xy"), (5, "xy")
    ]  # fmt: skip
    asked = live.engine.added[-6:]
    assert [sampling.seed for _, _, sampling in asked] == [sibling_seed(9, i) for i in (0, 1, 2)] * 2
    assert {sampling.n for _, _, sampling in asked} == {1}
    assert len({name for name, _, _ in asked}) == 6


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_usage_counts_the_prompt_once_and_all_outputs(live: LiveServer, path: str) -> None:
    base: dict[str, Any] = {"prompt": "abc"} if path == TEXT else {"messages": USER}
    base |= {"max_tokens": 2}
    one, four = (live.post(path, base | {"n": n})[1]["usage"] for n in (1, 4))
    assert four["prompt_tokens"] == one["prompt_tokens"]
    assert four["prompt_tokens_details"] == one["prompt_tokens_details"]
    assert four["completion_tokens"] == 4 * one["completion_tokens"] == 8
    assert four["total_tokens"] == four["prompt_tokens"] + 8


def test_a_chat_stream_has_a_role_chunk_and_one_finish_for_each_choice(live: LiveServer) -> None:
    body = {
        "messages": USER,
        "n": 3,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = events(live.request("POST", CHAT, body)[1])
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 6
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "us"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]


def test_a_text_stream_of_several_prompts_has_all_indices(live: LiveServer) -> None:
    body = {"prompt": ["ab", "xy"], "n": 2, "stream": True, "return_token_ids": True}
    *chunks, _ = events(live.request("POST", TEXT, body)[1])
    texts, prompts = dict.fromkeys(range(4), ""), {}
    for choice in (chunk["choices"][0] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        prompts.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert texts == {0: "ab", 1: "ab", 2: "xy", 3: "xy"}
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_chat_choices_each_have_a_message(live: LiveServer) -> None:
    _, answer = live.post(CHAT, {"messages": USER, "n": 2, "max_tokens": 3, "logprobs": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["use"] * 2
    assert all(len(choice["logprobs"]["content"]) == 3 for choice in answer["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_r8_all_choices_are_taken_or_none(stream: bool) -> None:
    with LiveServer(FakeEngine(max_alive=3)) as live:
        status, answer = live.post(TEXT, {"prompt": "ab", "n": 4, "stream": stream})
        assert status == 429
        assert answer["error"]["type"] == "rate_limit_error"
        assert live.engine.added == []
        assert live.post(TEXT, {"prompt": "ab", "n": 3})[0] == 200


def test_the_failure_of_one_choice_ends_the_answer_and_the_others() -> None:
    with LiveServer(FakeEngine(failure=NumericalError("NaN."), fail_after=1)) as live:
        assert live.post(TEXT, {"prompt": "abcdef", "n": 3})[0] == 500
        live.wait_for(lambda: not live.engine.alive)
        *_, last = events(live.request("POST", TEXT, {"prompt": "abcdef", "n": 3, "stream": True})[1])
        assert "error" in last
        live.wait_for(lambda: not live.engine.alive)


def test_best_of_stays_refused(live: LiveServer) -> None:
    status, answer = live.post(TEXT, {"prompt": "a", "n": 2, "best_of": 2})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (
        400, "best_of", "unsupported_parameter"
    )  # fmt: skip


def test_the_document_tells_the_bounds(live: LiveServer) -> None:
    schemas = json.loads(live.request("GET", "/openapi.json")[1])["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
        bias = fields["logit_bias"]["anyOf"][0]
        assert bias["additionalProperties"] == {"type": "number", "minimum": -100, "maximum": 100}
        assert bias["maxProperties"] == 1024
        ids = fields["allowed_token_ids"]["anyOf"][0]
        assert (ids["minItems"], ids["maxItems"], ids["items"]["maximum"]) == (1, 1024, VOCAB_SIZE - 1)
        words = fields["bad_words"]["anyOf"][0]
        assert (words["maxItems"], words["items"]["maxLength"]) == (128, 128)
