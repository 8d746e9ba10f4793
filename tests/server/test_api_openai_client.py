"""The real `openai` client against the real server: streams, logprobs, an error, a 429."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from fake_engine import EOS, FakeEngine, oracle
from live_server import LiveServer
from penstock.config.server import ServerConfig
from penstock.errors import StageLostError

PROMPT = "Grüße, 世界 👋"
IDS = [256, *PROMPT.encode()]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_gives_the_whole_answer_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": PROMPT}])
    text = f"user: {PROMPT}\n"
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + len(text.encode())
    assert answer.usage.completion_tokens == len(text.encode()) + 1  # and the end-of-sequence id
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_has_the_same_text_and_one_finish(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": PROMPT}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *with_choice, last = chunks
    assert with_choice[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in with_choice) == f"user: {PROMPT}\n"
    reasons = [c.choices[0].finish_reason for c in with_choice]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(f"user: {PROMPT}\n".encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_with_token_ids_logprobs_and_returned_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=IDS, max_tokens=8, logprobs=2, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    want = [oracle(IDS, i) for i in range(8)]
    assert choice.text == bytes(want).decode(errors="replace")
    assert choice.finish_reason == "length"
    assert choice.token_ids == want  # type: ignore[attr-defined]
    assert choice.prompt_token_ids == IDS  # type: ignore[attr-defined]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\x9f", "e", ","]
    assert logprobs.token_logprobs == [-0.5] * 8
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"H": -0.25, "G": -0.5}
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 3, 4, 5]


def test_logprobs_zero_gives_the_chosen_token_alone(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=2, logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}]


def test_chat_stream_logprobs_cover_every_token(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "é"}],
        stream=True,
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=8,
    )
    entries = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert bytes(byte for entry in entries for byte in entry.bytes or []) == "user: é".encode()
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 8


def test_several_prompts_stream_as_choices_of_their_own(client: openai.OpenAI) -> None:
    prompts = ["one", "twenty", "x"]
    texts = {0: "", 1: "", 2: ""}
    finishes: list[int] = []
    for chunk in client.completions.create(model="fake", prompt=prompts, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finishes.append(choice.index)
    assert list(texts.values()) == prompts
    assert sorted(finishes) == [0, 1, 2]


def test_stop_strings_cut_text_and_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello world", stop=["lo w"], max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hel", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("hello w")
    assert answer.choices[0].stop_reason == "lo w"  # type: ignore[attr-defined]


def test_models_are_listed_and_found_by_exact_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("../etc/passwd")
    assert caught.value.code == "model_not_found"


def test_bad_request_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="a", temperature=3.0)
    assert (caught.value.param, caught.value.code) == ("temperature", "out_of_range")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_429_carries_retry_after_and_is_retried_by_the_client() -> None:
    with LiveServer(FakeEngine(max_alive=0)) as live:
        client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="fake", prompt="a", stream=True)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"


def test_error_inside_a_stream_raises_api_error() -> None:
    failure = StageLostError("stage 1 was killed by signal 9.", stage=1)
    with LiveServer(FakeEngine(fail_after=3, failure=failure)) as live:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="fake", prompt="abcdef", stream=True)
            assert [next(stream).choices[0].text for _ in range(3)] == ["a", "b", "c"]
            with pytest.raises(openai.APIError, match="stage 1 was killed") as caught:
                next(stream)
        assert caught.value.code == "stage_lost"


def test_wrong_key_raises_authentication_error() -> None:
    with LiveServer(config=ServerConfig(api_keys=["right", "also"])) as live:
        for key, works in (("right", True), ("also", True), ("wrong", False), ("righ", False)):
            with openai.OpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0) as client:
                if works:
                    assert client.models.list().data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


def test_end_of_sequence_is_not_in_the_text_but_counted(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="hi", max_tokens=10, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == "hi"
    assert answer.choices[0].token_ids == [*b"hi", EOS]  # type: ignore[attr-defined]


def test_g8_penalties_bias_and_several_choices_are_taken(client: openai.OpenAI, live: LiveServer) -> None:
    common = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"65": -100}, "n": 2}
    more = {"repetition_penalty": 1.25, "allowed_token_ids": [66, 67], "bad_words": ["no"]}
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, extra_body=more, **common
    )
    text = client.completions.create(model="fake", prompt="hi", max_tokens=2, extra_body=more, **common)
    assert [(choice.index, choice.message.content) for choice in chat.choices] == [(0, "use"), (1, "use")]
    assert [(choice.index, choice.text) for choice in text.choices] == [(0, "hi"), (1, "hi")]
    for _, _, sampling in live.engine.added[-4:]:
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
        assert (sampling.repetition_penalty, sampling.allowed_token_ids) == (1.25, [66, 67])
        assert sampling.logit_bias == {65: -100.0}
        assert sampling.bad_word_ids == [[*b"no"], [*b" no"]]
