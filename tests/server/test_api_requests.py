"""What requests may carry, and how each wrong one is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from http.client import HTTPResponse
from typing import Any

import pytest

from fake_engine import BOS, VOCAB_SIZE, ByteCodec, FakeEngine, fake_model
from live_server import LiveServer
from paths import REPOSITORY
from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError, OverloadedError
from penstock.request import SamplingParams
from penstock.server.http.limits import parse_json
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.fields import OF_OTHER_ROUTES, REASONING_BUDGETS
from penstock.server.openai.openai_types import StreamOptions
from penstock.server.openai.sampling import fit_to_context

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def _refused(live: LiveServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    got, answer = live.post(path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_the_four_forms_of_a_prompt(live: LiveServer, prompt: Any, ids: list[list[int]]) -> None:
    before = len(live.engine.added)
    status, answer = live.post(TEXT, {"prompt": prompt})
    assert status == 200
    assert [prompt_ids for _, prompt_ids, _ in live.engine.added[before:]] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))


def test_a_whole_number_may_be_written_with_a_point(live: LiveServer) -> None:
    body = {
        "prompt": [97.0, 98],
        "max_tokens": 2.0,
        "top_k": 5.0,
        "temperature": 1,
        "logit_bias": {"97": 1.0},
    }
    assert live.post(TEXT, body)[0] == 200
    _, ids, sampling = live.engine.added[-1]
    assert (ids, sampling.max_tokens, sampling.top_k) == ([97, 98], 2, 5)
    assert _refused(live, TEXT, {"prompt": "a", "max_tokens": 2.0, "top_k": 5.5})["param"] == "top_k"
    assert _refused(live, TEXT, {"prompt": "a", "max_tokens": 1e300})["param"] == "max_tokens"


def test_a_salt_and_a_priority_reach_the_engine(live: LiveServer) -> None:
    assert live.post(TEXT, {"prompt": "a", "cache_salt": "mine", "priority": -5})[0] == 200
    _, _, sampling = live.engine.added[-1]
    assert (sampling.cache_salt, sampling.priority) == ("mine", -5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[None]]}, "prompt[0][0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [0, -1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**80}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "top_k": VOCAB_SIZE + 1}, "top_k"),
        ({"prompt": "a", "min_p": 1.1}, "min_p"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "min_tokens": 17, "max_tokens": 16}, "min_tokens"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": "x" * 257}, "stop"),
        ({"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "presence_penalty": -2.1}, "presence_penalty"),
        ({"prompt": "a", "presence_penalty": "much"}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": 2.1}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "repetition_penalty": 10.1}, "repetition_penalty"),
        ({"prompt": "a", "logit_bias": {"5": 100.1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9" * 40: 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"hello": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias[...]"),
        ({"prompt": "a", "logit_bias": [5, 1]}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
        ({"prompt": "a", "allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"prompt": "a", "bad_words": "b"}, "bad_words"),
        ({"prompt": "a", "bad_words": [7]}, "bad_words[0]"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream_options": 3}, "stream_options"),
        ({"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt": "a", "max_output_tokens": 5}, "max_output_tokens"),
        ({"prompt": "a", "top_logprobs": 0}, "top_logprobs"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_wrong_completion_fields_are_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    before = len(live.engine.added)
    assert _refused(live, TEXT, fields)["param"] == param
    assert len(live.engine.added) == before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": USER * 4097}, "messages"),
        ({"messages": USER, "logprobs": 0}, "logprobs"),
        ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": USER, "max_completion_tokens": -2}, "max_completion_tokens"),
        ({"messages": USER, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"messages": USER, "max_tokens": -2}, "max_tokens"),
        ({"messages": USER, "max_tokens": 5000}, "max_tokens"),
        ({"messages": USER, "echo": True}, "echo"),
        ({"messages": USER, "max_output_tokens": 5}, "max_output_tokens"),
        ({"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_wrong_chat_fields_are_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert _refused(live, CHAT, fields)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "code", "told"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "out_of_range", "between 0 and 20, got 21."),
        (CHAT, {"top_logprobs": 2}, "invalid_value", "needs logprobs: true. Set it, or leave"),
        (CHAT, {"tool_choice": "required"}, "invalid_value", "tool_choice is required, but there are no"),
        (
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "invalid_value",
            "tool_choice names 'f', but there are no tools. Give some in tools.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "unsupported_content",
            "messages[0].content[0] has no text; its type is 'text'.",
        ),
        (
            CHAT,
            {"max_completion_tokens": 5000},
            "context_length_exceeded",
            "Shorten the prompt or lower max_completion_tokens.",
        ),
        (CHAT, {"max_completion_tokens": -2}, "out_of_range", "max_completion_tokens must be between 0 and"),
        (TEXT, {"prompt": [1, 999]}, "token_id_out_of_range", "prompt: id 999 at position 1 is outside"),
        (CHAT, {"tool_choice": "any"}, "invalid_type", "'any'. Give one of: auto, none, required."),
        (CHAT, {"tools": [{"type": "f"}]}, "invalid_type", "tools[0].type: Invalid enum value 'f'. Give one"),
        (TEXT, {"prompt": [[]]}, "empty_prompt", "prompt has no tokens. Give a text that is not empty, or"),
    ],
)
def test_an_error_says_what_is_wrong_with_what_was_sent(
    live: LiveServer, path: str, fields: dict[str, Any], code: str, told: str
) -> None:
    error = _refused(live, path, {"messages": USER} | fields if path == CHAT else fields)
    assert error["code"] == code
    assert told in error["message"]


@pytest.mark.parametrize(
    ("num_tokens", "fields", "param", "told"),
    [
        (
            8,
            {},
            "prompt",
            "8 tokens, which with room for an answer is more than the model's context of 8 "
            "tokens. Shorten the prompt.",
        ),
        (9, {"max_tokens": 0}, "prompt", "9 tokens, more than the model's context of 8 tokens. Shorten the"),
        (8, {"max_tokens": 1}, "prompt", "8 tokens and max_tokens 1, together more than the model's context"),
        (6, {"max_tokens": 3}, "max_tokens", "Shorten the prompt or lower max_tokens."),
        (6, {"min_tokens": 3}, "min_tokens", "6 tokens and min_tokens 3, together more than the model's"),
    ],
)
def test_what_does_not_fit_the_context_is_told_with_what_helps(
    num_tokens: int, fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fit_to_context(SamplingParams(**({"max_tokens": None} | fields)), num_tokens, 8, default=16)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [97] * 100, "max_tokens": -1}),
        (CHAT, {"messages": USER, "max_tokens": -1}),
        (CHAT, {"messages": USER, "max_completion_tokens": -1, "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": -1}),
    ],
)
def test_a_bound_of_minus_one_is_no_bound(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    """Issue 25, point 17. As clients of llama.cpp write it; a completion without the field would get 16
    tokens."""
    status, answer = live.post(path, body)
    assert status == 200
    _, prompt, sampling = live.engine.added[-1]
    assert sampling.max_tokens == 4096 - len(prompt)
    assert answer.get("max_output_tokens") is None


UNSUPPORTED = [
    ("best_of", 3, 1),
    ("max_completion_tokens", 5, None),
    ("top_logprobs", 2, None),
    ("add_special_tokens", False, True),
    ("tools", [{"type": "function"}], []),
    ("tool_choice", "required", "none"),
    ("suffix", "end", ""),
    ("use_beam_search", True, False),
    ("chat_template", "{{ x }}", None),
    ("chat_template_kwargs", {"thinking": True}, {}),
    ("guided_regex", "a*", None),
    ("prompt_embeds", "AAAA", None),
]


@pytest.mark.parametrize(("name", "value", "neutral"), UNSUPPORTED)
def test_unsupported_features_are_refused_unless_neutral(
    live: LiveServer, name: str, value: Any, neutral: Any
) -> None:
    error = _refused(live, TEXT, {"prompt": "a", name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for harmless in (neutral, None):
        response, _ = live.request("POST", TEXT, {"prompt": "a", name: harmless})
        assert response.status == 200
        assert response.getheader("x-penstock-warning") is None


@pytest.mark.parametrize("name", REASONING_BUDGETS)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses"])
def test_a_bound_on_reasoning_is_refused_by_name_and_with_what_there_is(
    live: LiveServer, path: str, name: str
) -> None:
    prompt = {TEXT: {"prompt": "a"}, CHAT: {"messages": USER}}.get(path, {"input": "a"})
    error = _refused(live, path, prompt | {name: 64})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert f"Leave it out: {bound} limits reasoning" in error["message"]
    assert live.post(path, prompt | {name: None})[0] == 200


def test_fields_of_other_routes_and_stream_options_are_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    options = [f"stream_options.{name}" for name in StreamOptions.__struct_fields__]
    for name in {*options}.union(*OF_OTHER_ROUTES.values()):
        assert f"`{name}`" in page, name


def test_best_of_says_what_to_do_instead(live: LiveServer) -> None:
    message = _refused(live, TEXT, {"prompt": "a", "best_of": 3})["message"]
    assert message.endswith("Leave it out, because it has no bound on cost; use n with logprobs, and choose.")


def test_a_body_in_another_encoding_is_refused_by_its_name(live: LiveServer) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 1}).encode()
    response, raw = live.request("POST", TEXT, gzip.compress(body), {"Content-Encoding": "gzip"})
    error = json.loads(raw)["error"]
    assert (response.status, error["code"]) == (400, "unsupported_content_encoding")
    assert "content-encoding is 'gzip', which is not supported" in error["message"]
    assert live.request("POST", TEXT, body, {"Content-Encoding": "identity"})[0].status == 200


def test_unknown_fields_are_ignored_with_a_warning_header(live: LiveServer) -> None:
    body = {"prompt": "a", "gueß\r\nX-Evil: 1": 1, "top_q": 2, "stream_options": {"speed": 9}, "stream": True}
    response, raw = live.request("POST", TEXT, body)
    assert response.status == 200
    warning = response.getheader("x-penstock-warning")
    assert warning == "ignored unknown field(s): gue???X-Evil:?1, top_q, stream_options.speed"
    assert response.getheader("x-evil") is None
    assert raw.endswith(b"data: [DONE]\n\n")
    absent, _ = live.request("POST", TEXT, {"prompt": "a", "top_q": None, "messages": None})
    assert absent.getheader("x-penstock-warning") is None, "null is the same as leaving a field out"
    many, _ = live.request("POST", TEXT, {"prompt": "a"} | {f"f{i}" * 50: i for i in range(500)})
    assert len(many.getheader("x-penstock-warning") or "") < 2000


def test_sampling_fields_reach_the_engine(live: LiveServer) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "allowed_token_ids": [65, 66, 257],
        "seed": -3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["@@"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    bias, bad = {"5": -100, "299": 0.5}, ["ab", " ab", "c"]
    for path, rest in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": USER})):
        assert live.post(path, rest | fields | {"logit_bias": bias, "bad_words": bad})[0] == 200
        sampling = live.engine.added[-1][2]
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert sampling.logit_bias == {5: -100.0, 299: 0.5}
        assert sampling.bad_words == [], "what the core gets is ids"
        assert sampling.bad_word_ids == [[*b"ab"], [*b" ab"], [*b"c"], [*b" c"]]


def test_silent_requests_take_the_models_defaults_and_lengths() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    with LiveServer(model=fake_model(sampling_defaults=defaults)) as live:
        live.post(TEXT, {"prompt": "abc", "top_k": 5})
        text = live.engine.added[-1][2]
        live.post(CHAT, {"messages": USER})
        _, prompt, chat = live.engine.added[-1]
        assert (text.temperature, text.top_k, text.top_p, text.min_p) == (0.6, 5, 0.9, 0.0)
        assert text.repetition_penalty == chat.repetition_penalty == 1.1
        live.post(CHAT, {"messages": USER, "repetition_penalty": 1})
        assert live.engine.added[-1][2].repetition_penalty == 1.0
        assert text.max_tokens == 16
        assert chat.max_tokens == 4096 - len(prompt)
        live.post(CHAT, {"messages": USER, "max_tokens": 7, "max_completion_tokens": 5})
        assert live.engine.added[-1][2].max_tokens == 5


def test_prompt_and_output_beyond_the_context_name_both_numbers() -> None:
    with LiveServer(FakeEngine(max_model_len=20), model=fake_model(max_model_len=32)) as live:
        error = _refused(live, TEXT, {"prompt": [1] * 12, "max_tokens": 9})
        assert "12 tokens and max_tokens 9" in error["message"]
        assert "20 tokens" in error["message"]  # the pool holds less than the model's context
        assert error["code"] == "context_length_exceeded"
        assert _refused(live, TEXT, {"prompt": [1] * 20})["param"] == "prompt"
        assert live.post(TEXT, {"prompt": [1] * 12})[0] == 200
        assert live.engine.added[-1][2].max_tokens == 8  # the default gives way, a wish does not
        long = {"messages": [{"role": "user", "content": "x" * 513}]}
        error = _refused(live, CHAT, long)
        assert "513 bytes" in error["message"]
        assert error["param"] == "messages"


def test_body_limit_is_413_by_declared_and_by_true_length() -> None:
    limits = Limits(max_body_bytes=1000, max_prompt_bytes=10_000)
    with LiveServer(limits=limits) as live:
        for size, status in ((900, 200), (1001, 413), (500_000, 413)):
            body = json.dumps({"prompt": "a", "user": "x" * 10}).encode().ljust(size)
            assert live.request("POST", TEXT, body)[0].status == status
        with live.connect() as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + b"400\r\n" + b" " * 0x400 + b"\r\n")
            answer = HTTPResponse(connection)  # its head and its body may come one after the other
            answer.begin()
            assert (answer.version, answer.status) == (11, 413)
            assert b"body_too_large" in answer.read()


def test_long_prompts_are_tokenised_in_worker_threads_and_come_back_unharmed() -> None:
    threads: set[str] = set()

    class Watched(ByteCodec):
        def encode(self, text: str) -> list[int]:
            threads.add(threading.current_thread().name)
            return super().encode(text)

    model = fake_model(codec=Watched(), max_model_len=200_000)
    with LiveServer(FakeEngine(max_model_len=200_000), model=model) as live:
        prompts = ["wörter " * 3000 + str(index) for index in range(4)]
        _, answer = live.post(TEXT, {"prompt": prompts, "max_tokens": 48})
        assert [choice["text"] for choice in answer["choices"]] == [prompts[0].encode()[:48].decode()] * 4
        assert [bytes(ids[1:]).decode() for _, ids, _ in live.engine.added] == prompts
        assert all(name.startswith("text") for name in threads)
        live.post(TEXT, {"prompt": "short"})
        assert any(not name.startswith("text") for name in threads)


def test_worker_threads_have_a_bounded_queue() -> None:
    async def overfill() -> list[Any]:
        workers = TextWorkers(threads=1, max_pending=3, inline_bytes=0)
        release = threading.Event()
        works = [asyncio.create_task(workers.run(1, release.wait, 10)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="3 long prompts"):
            await workers.run(1, release.wait, 10)
        assert await workers.run(0, str, 7) == "7"
        release.set()
        results = await asyncio.gather(*works)
        assert await workers.run(1, str, 8) == "8"
        workers.close()
        return results

    assert asyncio.run(overfill()) == [True] * 3


def test_answers_neither_wait_for_new_requests_nor_are_refused_for_them() -> None:
    async def overfill() -> tuple[str, bool]:
        workers = TextWorkers(threads=1, max_pending=2, inline_bytes=0)
        release = threading.Event()
        works = [asyncio.create_task(workers.run(1, release.wait, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await workers.run(1, str, 7)
        answers = await asyncio.gather(*(workers.answer(1, threading.current_thread) for _ in range(9)))
        assert not any(work.done() for work in works)
        assert await workers.answer(0, threading.current_thread) is threading.current_thread()
        release.set()
        await asyncio.gather(*works)
        workers.close()
        (thread,) = set(answers)
        return thread.name, all(work.result() for work in works)

    name, were_done = asyncio.run(overfill())
    assert name.startswith("answers")
    assert were_done


def test_a_finished_answer_is_given_while_long_texts_fill_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of completions and chats, whose bodies are long."""
    run = TextWorkers.run

    async def full(self: TextWorkers, size: int, work: Any, *args: Any, **kwargs: Any) -> Any:
        if size > 16 << 10:
            raise OverloadedError("too many long prompts are waiting.")
        return await run(self, size, work, *args, **kwargs)

    monkeypatch.setattr(TextWorkers, "run", full)
    with LiveServer(FakeEngine(script="long " * 300)) as live:
        body = {"max_tokens": 1000, "return_token_ids": True}
        _, answer = live.post(TEXT, {"prompt": "a"} | body)
        assert len(answer["choices"][0]["text"]) == 1000
        _, answer = live.post(CHAT, {"messages": USER} | body)
        assert len(answer["choices"][0]["message"]["content"]) == 1000
        long_prompt = {"prompt": "x" * (17 << 10), "max_tokens": 1}
        assert live.post(TEXT, long_prompt)[0] == 429


@pytest.mark.parametrize(
    "body", [b"", b"null", b"3", b"[]", b'"prompt"', b'{"prompt": "a"', b'{"prompt": "\xff"}']
)
def test_bodies_that_are_no_proper_json_object_are_400(live: LiveServer, body: bytes) -> None:
    error = _refused(live, TEXT, body)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
    assert ("it is empty" in error["message"]) == (not body)


def test_json_depth_is_counted_exactly_and_not_within_strings() -> None:
    for depth, fits in ((63, True), (64, True), (65, False)):
        for opening, closing in (("[", "]"), ('{"a":[],"b":', "}")):
            text = opening * (depth - 1) + '["[[[{{{\\""]' + closing * (depth - 1)
            if fits:
                parse_json(text.encode(), 64)
            else:
                with pytest.raises(ValueError, match="64 levels"):
                    parse_json(text.encode(), 64)


def test_a_method_that_a_path_does_not_have_is_405_and_names_those_that_it_has(live: LiveServer) -> None:
    """GET does not bring HEAD with it, but for the probes of health and the description."""
    for path, allowed in (("/v1/models", "GET"), ("/v1/completions", "POST"), ("/v1/models/fake", "GET")):
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"} - {allowed}:
            response, raw = live.request(method, path)
            assert (response.status, response.getheader("allow")) == (405, allowed), (method, path)
            assert method == "HEAD" or json.loads(raw)["error"]["code"] == "method_not_allowed"
    for path in ("/health", "/health/live", "/health/ready", "/health/generate", "/openapi.json"):
        response, raw = live.request("HEAD", path)
        assert (response.status, raw) == (200, b""), path


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page.js/",
        "/docs",
        "/redoc",
        "/v1/models/",
        "/version/",
        "//health",
        "/Health",
        "/health/",
        "/v1",
    ],
)
def test_a_path_is_meant_word_for_word_and_nothing_is_redirected(live: LiveServer, path: str) -> None:
    response, raw = live.request("GET", path)
    error = json.loads(raw)["error"]
    assert (response.status, response.getheader("location")) == (404, None)
    assert error["code"] == ("model_not_found" if path == "/v1/models/" else "not_found")
