"""The exact grammar of event streams, byte by byte, and the comments that keep silent ones open."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from fake_engine import FakeEngine, fake_model
from live_server import LiveServer, events
from penstock.config.server import ServerConfig
from penstock.errors import NumericalError, OverloadedError, StageLostError
from penstock.request import SamplingParams
from penstock.server.app import create_app
from penstock.server.http.keep_alive import KeepAlive

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def _stream(live: LiveServer, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPResponse, list[Any]]:
    response, raw = live.request("POST", path, body | {"stream": True})
    return response, events(raw)


def _chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_chat_stream_is_role_contents_finish_done(live: LiveServer) -> None:
    response, got = _stream(live, CHAT, _chat("a", max_tokens=3))
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert got[-1] == "[DONE]"
    assert got.count("[DONE]") == 1
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in got[:-1]] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "u"}, None),
        ({"content": "s"}, None),
        ({"content": "e"}, None),
        ({}, "length"),
    ]
    assert {c["object"] for c in got[:-1]} == {"chat.completion.chunk"}
    assert all("usage" not in c for c in got[:-1])


def test_text_stream_is_contents_finish_usage_done(live: LiveServer) -> None:
    _, got = _stream(live, TEXT, {"prompt": "xy", "stream_options": {"include_usage": True}})
    *chunks, usage, done = got
    assert done == "[DONE]"
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("x", None),
        ("y", None),
        ("", "stop"),
    ]
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def _numbers(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_continuous_usage_counts_the_tokens_of_each_chunk_and_changes_nothing_else(
    live: LiveServer, path: str
) -> None:
    body = (_chat("é!") if path == CHAT else {"prompt": "é!"}) | {"max_tokens": 4, "return_token_ids": True}
    _, plain = _stream(live, path, body | {"stream_options": {"include_usage": True}})
    _, got = _stream(live, path, body | {"stream_options": CONTINUOUS})
    *chunks, last, done = got
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == plain[-2]["usage"]
    prompt, counted = last["usage"]["prompt_tokens"], 0
    for chunk, same in zip(chunks, plain, strict=False):
        counted += len(chunk["choices"][0]["token_ids"])
        assert _numbers(chunk["usage"]) == (prompt, counted, prompt + counted)
        assert same["usage"] is None
        assert chunk["choices"] == same["choices"]
    assert counted == last["usage"]["completion_tokens"] == 4
    assert len(got) == len(plain)


def test_continuous_usage_is_that_of_the_chunks_choice(live: LiveServer) -> None:
    body = {"prompt": ["a", "bcd"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 5, "ignore_eos": True}
    *chunks, last, _done = _stream(live, TEXT, body | {"stream_options": CONTINUOUS})[1]
    for index, prompt in enumerate((2, 2, 4, 4)):
        told = [_numbers(chunk["usage"]) for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert told == sorted(told)
        assert told[-1] == (prompt, 5, prompt + 5)
        assert {one[0] for one in told} == {prompt}
    assert _numbers(last["usage"]) == (6, 20, 26), "that of a prompt counts once for all of its choices"


def test_continuous_usage_counts_tokens_that_show_nothing_with_the_next_chunk(live: LiveServer) -> None:
    body = {"prompt": "👋!", "stop": ["!!"], "stream_options": CONTINUOUS}
    *chunks, _last, _done = _stream(live, TEXT, body)[1]
    told = [(c["choices"][0]["text"], c["usage"]["completion_tokens"]) for c in chunks]
    assert told == [("👋", 4), ("!", 6), ("", 6)]


def test_continuous_usage_needs_usage(live: LiveServer) -> None:
    for options in ({"continuous_usage_stats": True}, {**CONTINUOUS, "include_usage": False}):
        body = {"prompt": "a", "stream": True, "stream_options": options}
        status, answer = live.post(TEXT, body)
        assert (status, answer["error"]["param"]) == (400, "stream_options.continuous_usage_stats")
    _, got = _stream(live, TEXT, {"prompt": "a", "stream_options": {"continuous_usage_stats": False}})
    assert all("usage" not in chunk for chunk in got[:-1])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_returned_token_ids_of_chunks_add_up(live: LiveServer, path: str) -> None:
    prompt = _chat("é") if path == CHAT else {"prompt": "é"}
    _, streamed = _stream(live, path, prompt | {"return_token_ids": True, "max_tokens": 9})
    _, whole = live.post(path, prompt | {"return_token_ids": True, "max_tokens": 9})
    ids = [i for chunk in streamed[:-1] for i in chunk["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    first = streamed[0] if path == CHAT else streamed[0]["choices"][0]
    assert first["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    assert live.engine.added[-1][1] == first["prompt_token_ids"]


def test_held_back_text_makes_no_empty_chunks(live: LiveServer) -> None:
    _, got = _stream(live, TEXT, {"prompt": "👋!", "stop": ["!!"]})
    assert [c["choices"][0]["text"] for c in got[:-1]] == ["👋", "!", ""]


def test_failure_in_a_stream_is_one_error_event_without_done() -> None:
    failure = NumericalError("request 7: the logits of step 9 are not finite.")
    with LiveServer(FakeEngine(fail_after=2, failure=failure)) as live:
        response, got = _stream(live, CHAT, _chat("a"))
        assert response.status == 200
        *chunks, error = got
        assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "u", "s"]
        assert error == {
            "error": {
                "message": "request 7: the logits of step 9 are not finite.",
                "type": "server_error",
                "param": None,
                "code": "numerical",
            }
        }
        assert "error=numerical" in live.log.getvalue()


def test_failure_before_the_first_token_has_a_status_of_its_own() -> None:
    failure = OverloadedError("the queue holds 1024 requests.")
    with LiveServer(FakeEngine(fail_after=0, failure=failure)) as live:
        for stream in (True, False):
            response, raw = live.request("POST", TEXT, {"prompt": "a", "stream": stream})
            assert response.status == 429
            assert response.getheader("retry-after") == "1"
            assert json.loads(raw)["error"]["code"] == "queue_full"
        live.engine.failure = StageLostError("stage 0 died.", stage=0)
        response, raw = live.request("POST", TEXT, {"prompt": "a"})
        assert (response.status, json.loads(raw)["error"]["type"]) == (503, "service_unavailable")


def test_a_bug_in_one_request_is_a_500_without_a_trace_and_hurts_no_other() -> None:
    with LiveServer() as live:
        engine, add = live.engine, live.engine.add

        def broken(request_id: str, prompt: list[int], sampling: SamplingParams) -> Any:
            if b"bad" in bytes(prompt[1:]):
                raise RuntimeError("secret detail")
            return add(request_id, prompt, sampling)

        engine.add = broken  # type: ignore[method-assign]
        status, body = live.post(TEXT, {"prompt": "bad"}, {"x-request-id": "find-me"})
        assert status == 500
        assert body["error"]["code"] == "internal_error"
        assert "find-me" in body["error"]["message"]
        assert "secret" not in json.dumps(body)
        assert live.post(TEXT, {"prompt": "good"})[1]["choices"][0]["text"] == "good"
        assert "secret detail" in live.log.getvalue()
        assert len(engine.alive) == 0


def test_first_failure_of_several_prompts_ends_the_others() -> None:
    with LiveServer(FakeEngine(fail_after=1, failure=NumericalError("nan."))) as live:
        _, got = _stream(live, TEXT, {"prompt": ["aa", "bb"]})
        assert "error" in got[-1]
        assert live.engine.alive == set()


class _Silent:
    def __init__(self) -> None:
        self.last_sent_at = 0.0
        self.pings = 0

    def ping(self) -> None:
        self.pings += 1


def test_silent_streams_are_pinged_after_the_interval_only() -> None:
    now = 0.0
    keep_alive = KeepAlive(lambda: now, interval_s=15.0)
    silent, busy = _Silent(), _Silent()
    keep_alive.enter(silent)
    keep_alive.enter(busy)
    for now in (5.0, 14.9, 15.0):
        busy.last_sent_at = now
        keep_alive.tick()
    assert (silent.pings, busy.pings) == (1, 0)
    keep_alive.leave(silent)
    now = 40.0
    keep_alive.tick()
    assert (silent.pings, busy.pings) == (1, 1)


def test_event_loop_that_does_not_turn_is_not_live() -> None:
    now = 0.0
    keep_alive = KeepAlive(lambda: now)
    assert keep_alive.loop_turns
    now = 4.0
    assert not keep_alive.loop_turns
    keep_alive.tick()
    assert keep_alive.loop_turns


@pytest.mark.parametrize("hold_after", [0, 2])
def test_ping_comments_keep_the_grammar(hold_after: int) -> None:
    clock = [100.0]
    engine = FakeEngine(hold_after=hold_after)
    with LiveServer(engine, clock=lambda: clock[0]) as live, live.connect() as connection:
        body = json.dumps(_chat("a", stream=True, max_tokens=4)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        live.wait_for(lambda: len(engine.alive) == 1)
        keep_alive = live.app.context.keep_alive
        clock[0] += 16.0
        live.call(keep_alive.tick)
        seen = b""
        while b": ping" not in seen:
            seen += connection.recv(65536)
        assert b'"role":"assistant"' in seen
        assert seen.count(b"content-type:") == 1
        live.call(engine.released.set)
        while b"[DONE]" not in seen:
            seen += connection.recv(65536)
        assert seen.count(b'"role"') == 1
        assert seen.count(b"content-type:") == 1
        assert seen.count(b": ping") == 1


async def _turn_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it never came")


async def _asgi_chat(
    engine: FakeEngine, max_tokens: int, act: Any, send_gate: asyncio.Event | None = None
) -> list[Message]:
    """The messages of one streamed chat; `act(keep_alive, num_sends)` is called once its sequence waits.

    With a `send_gate`, sending blocks until the gate is open, as for a client that does not read.
    """
    sent: list[Message] = []
    sends = []
    now = [0.0]
    app = create_app(engine, ServerConfig(), fake_model(), clock=lambda: now[0])
    body = json.dumps(_chat("abc", stream=True, max_tokens=max_tokens)).encode()
    incoming = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return incoming.pop() if incoming else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sends.append(message)
        if send_gate is not None:
            await send_gate.wait()
            await asyncio.sleep(0)  # each piece may have to wait again
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    task = asyncio.create_task(app(scope | {"headers": [(b"host", b"localhost")]}, receive, send))
    await _turn_until(lambda: bool(engine.alive))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now[0] = 16.0
    await act(app.context.keep_alive, sends)
    await asyncio.wait_for(task, 10)
    return sent


def _check_role_first(sent: list[Message]) -> None:
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[0]["type"] == "http.response.start"
    got = events(b"".join(message["body"] for message in sent[1:]))
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in got[:-1]) == 1
    assert got[-1] == "[DONE]"


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_role_chunk_is_first_when_a_token_comes_with_the_ping(max_tokens: int) -> None:
    async def scenario() -> list[Message]:
        engine = FakeEngine(hold_after=0)

        async def act(keep_alive: KeepAlive, _sends: list[Message]) -> None:
            engine.released.set()  # the sequence's task runs before the ping's
            keep_alive.tick()

        return await _asgi_chat(engine, max_tokens, act)

    _check_role_first(asyncio.run(scenario()))


def test_a_ping_that_the_answer_overtakes_while_the_client_does_not_read_loses_nothing() -> None:
    async def scenario() -> list[Message]:
        engine, gate = FakeEngine(hold_after=0), asyncio.Event()

        async def act(keep_alive: KeepAlive, sends: list[Message]) -> None:
            keep_alive.tick()
            await _turn_until(lambda: bool(sends))
            engine.released.set()
            for _ in range(20):  # the answer is complete long before the client reads
                await asyncio.sleep(0)
            gate.set()

        return await _asgi_chat(engine, 1, act, gate)

    _check_role_first(asyncio.run(scenario()))
