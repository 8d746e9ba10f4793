"""`/tokenize`, `/detokenize` and the render routes: the ids that a request would run with, and no engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fake_engine import BOS, VOCAB_SIZE, ByteCodec, FakeEngine, fake_model
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.server.engine_port import ModelCodec
from penstock.tokenizer.chat_template import AbsentChatTemplate
from penstock.tokenizer.tokenizer import AbsentTokenizer

HELLO = [{"role": "user", "content": "hello"}]


def error(live: LiveServer, path: str, body: Any) -> tuple[int, str | None, str | None]:
    status, answer = live.post(path, body)
    return status, answer["error"]["param"], answer["error"]["code"]


def test_a_text_is_tokenized_as_vllm_does(live: LiveServer) -> None:
    whole = {"tokens": [BOS, 97, 195, 164], "count": 4, "max_model_len": 4096, "token_strs": None}
    assert live.post("/tokenize", {"model": "fake", "prompt": "aä"}) == (200, whole)
    _, answer = live.post(
        "/tokenize", {"prompt": "aä", "add_special_tokens": False, "return_token_strs": True}
    )
    assert answer["tokens"] == [97, 195, 164]
    assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa4"], "as in log-probabilities"
    assert live.post("/tokenize", {"prompt": "", "add_special_tokens": False})[1]["count"] == 0


def test_a_conversation_is_tokenized_through_the_template(live: LiveServer) -> None:
    _, answer = live.post("/tokenize", {"messages": HELLO})
    assert bytes(answer["tokens"][1:]) == b"user: hello\n"
    _, answer = live.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False})
    assert bytes(answer["tokens"][1:]) == b"user: hello\n."


def test_what_is_detokenized_is_what_was_tokenized(live: LiveServer) -> None:
    for text in ("", "a", "naïve – 你好", "x" * 30_000):
        _, answer = live.post("/tokenize", {"prompt": text})
        assert live.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})


def test_a_chat_is_rendered_as_it_would_run(live: LiveServer) -> None:
    body = {"messages": [*HELLO, {"role": "assistant", "content": "hi"}], "max_tokens": 3, "stream": True}
    status, rendered = live.post("/v1/chat/completions/render", body)
    assert status == 200
    assert rendered["prompt"] == "user: hello\nassistant: hi\n"
    assert (rendered["count"], rendered["max_model_len"]) == (len(rendered["token_ids"]), 4096)
    assert live.engine.added == [] or live.engine.added[-1][1] != rendered["token_ids"], "nothing runs"
    live.post("/v1/chat/completions", body | {"stream": False})
    assert live.engine.added[-1][1] == rendered["token_ids"]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), (["ab", [1, 2]], ["ab", None]), ([1, 2], [None]), ([[1], [2, 3]], [None, None])],
)
def test_completions_are_rendered_as_they_would_run(live: LiveServer, prompt: Any, texts: list[Any]) -> None:
    before = len(live.engine.added)
    status, rendered = live.post("/v1/completions/render", {"prompt": prompt})
    assert status == 200
    assert [one["prompt"] for one in rendered] == texts
    assert len(live.engine.added) == before
    live.post("/v1/completions", {"prompt": prompt})
    assert [one["token_ids"] for one in rendered] == [ids for _, ids, _ in live.engine.added[before:]]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/tokenize", {}, (400, "prompt", "missing_required_parameter")),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, (400, "prompt", "invalid_value")),
        ("/tokenize", {"prompt": 3}, (400, "prompt", "invalid_type")),
        ("/tokenize", {"prompt": "a", "model": "other"}, (404, "model", "model_not_found")),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": False},
            (400, "add_generation_prompt", "unsupported_parameter"),
        ),
        (
            "/tokenize",
            {"messages": HELLO, "add_special_tokens": True},
            (400, "add_special_tokens", "invalid_value"),
        ),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template": "x"},
            (400, "chat_template", "unsupported_parameter"),
        ),
        ("/tokenize", {"messages": []}, (400, "messages", "out_of_range")),
        ("/detokenize", {}, (400, "tokens", "missing_required_parameter")),
        ("/detokenize", {"tokens": ["a"]}, (400, "tokens[0]", "invalid_type")),
        ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, (400, "tokens", "token_id_out_of_range")),
        ("/detokenize", {"tokens": [-1]}, (400, "tokens", "token_id_out_of_range")),
        ("/detokenize", {"tokens": [1], "model": "other"}, (404, "model", "model_not_found")),
        ("/v1/chat/completions/render", {"prompt": "a"}, (400, "messages", "missing_required_parameter")),
        (
            "/v1/chat/completions/render",
            {"messages": HELLO, "temperature": 3},
            (400, "temperature", "out_of_range"),
        ),
        ("/v1/completions/render", {"prompt": [1, 5000]}, (400, "prompt", "token_id_out_of_range")),
    ],
)
def test_r8_bad_bodies_are_refused_by_name(live: LiveServer, path: str, body: Any, expected: Any) -> None:
    assert error(live, path, body) == expected


def test_r8_texts_and_lists_are_bounded() -> None:
    with LiveServer(limits=Limits(max_prompt_bytes=100, max_body_bytes=2000)) as live:
        assert live.post("/tokenize", {"prompt": "x" * 100})[0] == 200
        assert error(live, "/tokenize", {"prompt": "x" * 101}) == (400, "prompt", "context_length_exceeded")
        long = [{"role": "user", "content": "x" * 101}]
        for path in ("/tokenize", "/v1/chat/completions/render"):
            assert error(live, path, {"messages": long}) == (400, "messages", "context_length_exceeded")
        assert live.post("/detokenize", {"tokens": [1] * 100})[0] == 200
        assert error(live, "/detokenize", {"tokens": [1] * 101}) == (400, "tokens", "out_of_range")
        assert live.post("/detokenize", {"tokens": [1] * 2000})[0] == 413


def test_unknown_fields_are_named(live: LiveServer) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/chat/completions/render", {"messages": HELLO}),
        ("/v1/completions/render", {"prompt": "a"}),
    ):
        response, _ = live.request("POST", path, body | {"colour": 1})
        assert response.status == 200
        assert response.getheader("x-penstock-warning") == "ignored unknown field(s): colour"
        assert live.request("POST", path, body | {"stream_options": {}})[0].status in (200, 400)
        assert live.request("POST", path, body | {"stream_options": 7})[0].status in (200, 400)


def test_long_text_is_worked_on_off_the_loop() -> None:
    threads: set[str] = set()

    class Watched(ByteCodec):
        def decode(self, token_ids: list[int]) -> str:
            threads.add(threading.current_thread().name)
            return super().decode(token_ids)

        def token_bytes(self, token_id: int) -> bytes:
            threads.add(threading.current_thread().name)
            return super().token_bytes(token_id)

    with LiveServer(model=fake_model(codec=Watched())) as live:
        assert live.post("/detokenize", {"tokens": [97] * 20_000})[0] == 200
        assert live.post("/tokenize", {"prompt": "x" * 20_000, "return_token_strs": True})[0] == 200
    assert threads
    assert all(name.startswith("text") for name in threads)


def test_other_methods_are_refused(live: LiveServer) -> None:
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/completions/render"):
        for method in ("GET", "HEAD", "PUT"):
            assert live.request(method, path)[0].status == 405


def test_the_engine_need_not_be_there() -> None:
    engine = FakeEngine()
    engine.state.ready = False
    with LiveServer(engine) as live:
        assert live.post("/tokenize", {"prompt": "a"})[0] == 200
        assert live.post("/v1/chat/completions/render", {"messages": HELLO})[0] == 200
        assert live.post("/v1/completions", {"prompt": "a"})[0] == 503


def test_a_model_without_a_tokenizer_says_so() -> None:
    codec = ModelCodec(AbsentTokenizer(), AbsentChatTemplate())
    with LiveServer(model=fake_model(codec=codec)) as live:
        assert error(live, "/tokenize", {"prompt": "a"})[:2] == (400, "prompt")
        assert error(live, "/tokenize", {"messages": HELLO})[:2] == (400, "messages")
        assert error(live, "/detokenize", {"tokens": [1]})[:2] == (400, "tokens")
