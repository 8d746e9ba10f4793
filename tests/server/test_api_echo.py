"""Echoed and scored prompts, and no token at all, by the real `openai` client over a fake engine [G8]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fake_engine import BOS, SCORED_AT_ONCE, fake_score
from live_server import LiveServer, events
from penstock.server.answers import sse

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Grüße, 世界 👋"
IDS = [BOS, *PROMPT.encode()]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def offsets_of(text: str) -> list[int]:
    """Where in the text each byte's token begins: one that only completes a character, where that does."""
    return [0] + [place for place, character in enumerate(text) for _ in character.encode()]


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], IDS, [IDS]], ids=["text", "texts", "ids", "id lists"])
def test_echo_begins_the_text_with_the_prompt(client: openai.OpenAI, prompt: Any) -> None:
    (choice,) = client.completions.create(model="fake", prompt=prompt, max_tokens=4, echo=True).choices
    assert choice.text == PROMPT + "Gr" + "ü"
    assert choice.logprobs is None
    assert choice.finish_reason == "length"


def test_echo_with_logprobs_covers_prompt_and_output(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(
        model="fake", prompt=PROMPT, max_tokens=3, echo=True, logprobs=2
    ).choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    count = len(IDS)
    assert (len(found.tokens), len(found.top_logprobs), len(found.text_offset or [])) == (count + 3,) * 3
    assert found.token_logprobs == [None, *(-float(place) for place in range(1, count)), -0.5, -0.5, -0.5]
    assert found.top_logprobs[0] is None
    assert found.tokens[:4] == ["", "G", "r", "bytes:\\xc3"]
    assert found.top_logprobs[1] == {"N": -0.125, "O": -0.125, "G": -1.0}, "the prompt's own is always told"
    assert found.text_offset == [*offsets_of(PROMPT), len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2]
    assert choice.text == PROMPT + "Gr\N{REPLACEMENT CHARACTER}"


def test_echo_of_the_likeliest_none_tells_the_prompts_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=1, echo=True, logprobs=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.top_logprobs == [None, {"a": -1.0}, {"b": -2.0}, {"a": -0.5}]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_no_token_at_all(client: openai.OpenAI, echo: bool, logprobs: int | None) -> None:
    answer = client.completions.create(
        model="fake", prompt=[PROMPT, "x"], max_tokens=0, echo=echo, logprobs=logprobs
    )
    assert [choice.text for choice in answer.choices] == ([PROMPT, "x"] if echo else ["", ""])
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, len(IDS) + 2)
    for choice, ids in zip(answer.choices, (IDS, [BOS, *b"x"]), strict=True):
        if logprobs is None:
            assert choice.logprobs is None
        else:
            assert choice.logprobs is not None
            assert len(choice.logprobs.tokens or []) == (len(ids) if echo else 0)


def test_no_token_at_all_in_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a"}]
    for field in ({"max_tokens": 0}, {"max_completion_tokens": 0}):
        answer = client.chat.completions.create(model="fake", messages=messages, **field)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
    chunks = list(client.chat.completions.create(model="fake", messages=messages, max_tokens=0, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("prompt", [PROMPT, IDS, "", "x"])
def test_a_stream_has_what_a_whole_answer_has(
    client: openai.OpenAI, max_tokens: int, logprobs: int | None, prompt: Any
) -> None:
    asked: dict[str, Any] = {
        "model": "fake",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
    }
    whole = client.completions.create(**asked, echo=True).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, echo=True, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs is not None]
        joined = [entry for part in parts for entry in part]
        assert joined == (getattr(whole.logprobs, name) if whole.logprobs is not None else [])


def test_the_echo_is_the_first_chunk_or_comes_as_its_scores_do(live: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "stream": True}
    chunks = events(live.request("POST", TEXT, body)[1])
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == [PROMPT, "G", ""]
    chunks = events(live.request("POST", TEXT, body | {"logprobs": 0})[1])
    sizes = [len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks[:-2]]
    assert sizes[:2] == [1 + SCORED_AT_ONCE, SCORED_AT_ONCE]
    assert sum(sizes) == len(IDS) + 1


def test_stop_strings_are_not_looked_for_in_the_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="a stop b", stop=["stop"], max_tokens=20, echo=True
    )
    assert answer.choices[0].text == "a stop b" + "a "
    assert answer.choices[0].finish_reason == "stop"


def test_each_prompt_of_several_has_its_own_echo_in_a_stream(client: openai.OpenAI) -> None:
    prompts = ["one", "twenty", "x"]
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(
        model="fake", prompt=prompts, stream=True, echo=True, logprobs=1, max_tokens=0
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == prompts


def test_prompt_logprobs_have_vllms_shape_in_both_routes(live: LiveServer) -> None:
    status, answer = live.post(TEXT, {"prompt": ["ab", [5, 6]], "prompt_logprobs": 1, "max_tokens": 1})
    assert status == 200
    first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
    score = fake_score(ord("a"), 1, 1)
    assert first[0] is second[0] is None
    assert first[1] == {
        "97": {"logprob": score.logprob, "rank": score.rank, "decoded_token": "a"},
        str(score.top_ids[0]): {"logprob": score.top_logprobs[0], "rank": 1, "decoded_token": "h"},
    }
    assert next(iter(first[1])) == "97"
    assert [len(entry or {}) for entry in second] == [0, 2]
    chat = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0, "max_tokens": 0}
    _, answer = live.post(CHAT, chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (
        len(answer["prompt_logprobs"]) - 1
    )
    assert "prompt_logprobs" not in live.post(TEXT, {"prompt": "a"})[1]["choices"][0]


def test_echo_and_prompt_logprobs_may_ask_for_different_numbers(live: LiveServer) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    choice = live.post(TEXT, body)[1]["choices"][0]
    assert [len(entry or {}) for entry in choice["logprobs"]["top_logprobs"]] == [0, 2, 2]
    assert [len(entry or {}) for entry in choice["prompt_logprobs"]] == [0, 4, 4]
    assert live.engine.added[-1][2].prompt_logprobs == 3
    body = {"prompt": "ab", "echo": True, "logprobs": 3, "prompt_logprobs": 0, "max_tokens": 0}
    choice = live.post(TEXT, body)[1]["choices"][0]
    assert [len(entry or {}) for entry in choice["prompt_logprobs"]] == [0, 1, 1]
    assert [len(entry or {}) for entry in choice["logprobs"]["top_logprobs"]] == [0, 4, 4]


def test_echo_alone_asks_the_engine_for_no_score(live: LiveServer) -> None:
    live.post(TEXT, {"prompt": "ab", "echo": True, "max_tokens": 1})
    assert live.engine.added[-1][2].prompt_logprobs is None
    live.post(TEXT, {"prompt": "ab", "logprobs": 1, "max_tokens": 1})
    assert live.engine.added[-1][2].prompt_logprobs is None


def test_returned_ids_stand_before_the_echo(live: LiveServer) -> None:
    body = {"prompt": "ab", "echo": True, "max_tokens": 1, "return_token_ids": True}
    whole = live.post(TEXT, body)[1]["choices"][0]
    assert (whole["text"], whole["prompt_token_ids"], whole["token_ids"]) == ("aba", [BOS, 97, 98], [97])
    chunks = events(live.request("POST", TEXT, body | {"stream": True})[1])[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == [BOS, 97, 98]
    assert "".join(choice["text"] for choice in choices) == "aba"
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == [97]


def test_a_prompt_is_encoded_once_for_all_of_its_choices(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, seen = sse._encode, []

    def watched(value: Any) -> bytes:
        seen.append(value)
        return encode(value)

    monkeypatch.setattr(sse, "_encode", watched)
    body = {"prompt": ["ab", "cd"], "n": 3, "echo": True, "max_tokens": 1, "return_token_ids": True}
    chunks = events(live.request("POST", TEXT, body | {"stream": True})[1])[:-1]
    found = [chunk["choices"][0] for chunk in chunks]
    for index, text in enumerate(["ab"] * 3 + ["cd"] * 3):
        own = [choice for choice in found if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == [BOS, *text.encode()]
        assert "".join(choice["text"] for choice in own) == text + text[0]
    for prompt in ("ab", "cd"):
        assert seen.count(prompt) == seen.count([BOS, *prompt.encode()]) == 1


def test_what_lm_evaluation_harness_sends(client: openai.OpenAI) -> None:
    """Token ids of context and continuation, one token that it throws away, several prompts at once."""
    prompts = [[BOS, *b"question answer"], [BOS, *b"other"], [BOS, *b"q a"]]
    answer = client.completions.create(
        model="fake", prompt=prompts, echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        values, tokens = choice.logprobs.token_logprobs or [], choice.logprobs.tokens or []
        tops = choice.logprobs.top_logprobs or []
        assert values[3:-1] == [-float(place) for place in range(3, len(prompt))]
        assert len(tokens[3:-1]) == len(tops[3:-1]) == len(prompt) - 3
        assert all(token in top for token, top in zip(tokens[3:-1], tops[3:-1], strict=True))
