"""Each bound of what a request may carry, at its edge: what is just within is served, one more is refused.

The error tells the field, the number and what to do. Bounds of connections are in `test_api_connections`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fake_engine import VOCAB_SIZE, ByteCodec, FakeEngine, fake_model
from live_server import LiveServer
from penstock.config.engine import SchedulerConfig
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits
from penstock.server.http.limits import ByteLimits
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.openai_types import ChatMessage
from penstock.server.openai.prompts import PromptReader

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def user(content: str = "x") -> dict[str, str]:
    return {"role": "user", "content": content}


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels - 1):
        found = [found]
    return found


SMALL = Limits(
    max_body_bytes=3000,
    max_prompt_bytes=100,
    max_json_depth=5,
    max_messages=3,
    max_prompts=2,
    max_prompt_scores=20,
    max_logprobs=4,
    max_stop_strings=2,
    max_stop_string_bytes=6,
    max_stop_token_ids=3,
    max_logit_bias=2,
    max_allowed_token_ids=3,
    max_bad_words=2,
    max_bad_word_bytes=6,
    max_n=2,
    max_choices=3,
)


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    with LiveServer(limits=SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def wide() -> Iterator[LiveServer]:
    with LiveServer(FakeEngine(max_alive=256)) as server:
        yield server


# Path, field at fault, a value within the bound of `SMALL`, one beyond it, and the number that is told.
SETTABLE = [
    (CHAT, "messages", [user()] * 3, [user()] * 4, "3"),
    (CHAT, "messages", [user("é" * 50)], [user("é" * 50 + "a")], "101 bytes"),
    (TEXT, "prompt", ["a", "b"], ["a", "b", "c"], "2"),
    (TEXT, "prompt", "é" * 50, "é" * 50 + "a", "100"),
    (TEXT, "logprobs", 4, 5, "allows 4"),
    (TEXT, "prompt_logprobs", 4, 5, "allows 4"),
    (CHAT, "prompt_logprobs", 1, 2, "the limit is 20"),
    (TEXT, "stop", ["a", "b"], ["a", "b", "c"], "allows 2"),
    (TEXT, "stop", "ééé", "éééa", "allows 6"),
    (TEXT, "stop_token_ids", [1, 2, 3], [1, 2, 3, 4], "allows 3"),
    (CHAT, "n", 2, 3, "allows 2"),
    (CHAT, "logit_bias", {"1": 1, "2": 1}, {"1": 1, "2": 1, "3": 1}, "allows 2"),
    (TEXT, "allowed_token_ids", [1, 2, 3], [1, 2, 3, 4], "allows 3"),
    (TEXT, "bad_words", ["a", "b"], ["a", "b", "c"], "allows 2"),
    (CHAT, "bad_words", ["ééé"], ["a", "éééa"], "allows 6"),
]


@pytest.mark.parametrize(("path", "field", "within", "beyond", "told"), SETTABLE)
def test_r8_limits_can_be_set(
    small: LiveServer, path: str, field: str, within: Any, beyond: Any, told: str
) -> None:
    base = {"prompt": "a"} if path == TEXT else {"messages": [user()]}
    assert small.post(path, base | {field: within})[0] == 200
    before = len(small.engine.added)
    status, answer = small.post(path, base | {field: beyond})
    assert (status, answer["error"]["param"]) == (400, field)
    assert told in answer["error"]["message"]
    assert answer["error"]["code"] in ("out_of_range", "context_length_exceeded")
    assert len(small.engine.added) == before


def test_r8_choices_are_bounded_together(small: LiveServer) -> None:
    assert small.post(TEXT, {"prompt": ["a"], "n": 2})[0] == 200
    status, answer = small.post(TEXT, {"prompt": ["a", "b"], "n": 2})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "together 4 choices; this server allows 3" in answer["error"]["message"]


def test_r8_top_logprobs_have_the_same_bound(small: LiveServer) -> None:
    asked = {"messages": [user()], "logprobs": True}
    assert small.post(CHAT, asked | {"top_logprobs": 4})[0] == 200
    assert small.post(CHAT, asked | {"top_logprobs": 5})[0] == 400


def test_r8_json_depth_can_be_set(small: LiveServer) -> None:
    assert small.request("POST", TEXT, {"prompt": "a", "x": nested(4)})[0].status == 200
    status, answer = small.post(TEXT, {"prompt": "a", "x": nested(5)})
    assert (status, answer["error"]["code"]) == (400, "json_too_deep")
    assert "5 levels" in answer["error"]["message"]
    assert "--max-json-depth" in answer["error"]["message"]


def test_r8_body_bytes_can_be_set(small: LiveServer) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    assert small.request("POST", TEXT, body.ljust(3000))[0].status == 200
    status, answer = small.post(TEXT, body.ljust(3001))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert "3000" in answer["error"]["message"]
    assert "--max-body-bytes" in answer["error"]["message"]


def test_r8_the_documents_bounds_are_the_servers(small: LiveServer) -> None:
    schemas = json.loads(small.request("GET", "/openapi.json")[1])["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["logprobs"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 4}
    assert schemas["ChatRequest"]["properties"]["messages"]["maxItems"] == 3


# The numbers of the table of limits, each once more: a default that is changed is meant to be noticed here.
DEFAULTS: dict[msgspec.Struct, dict[str, Any]] = {
    Limits(): {
        "max_body_bytes": None,  # these two follow from the context
        "max_prompt_bytes": None,
        "max_json_depth": 64,
        "max_messages": 4096,
        "max_prompts": 256,
        "max_prompt_scores": 524_288,
        "max_event_streams": 16,
        "max_resumable_streams": 64,
        "max_profile_s": 60.0,
        "max_profile_bytes": 268_435_456,
        "max_profiles": 16,
        "max_tools": 128,
        "max_tool_bytes": 262_144,
        "max_template_kwargs": 16,
        "max_choices": 256,
        "max_embedding_inputs": 2048,
        "max_embedding_tokens": 300_000,
        "session_idle_s": 600.0,
        "max_session_idle_s": 86_400.0,
        "max_logprobs": 20,
        "max_stop_strings": 16,
        "max_stop_string_bytes": 256,
        "max_stop_token_ids": 64,
        "max_logit_bias": 1024,
        "max_allowed_token_ids": 1024,
        "max_bad_words": 128,
        "max_bad_word_bytes": 128,
        "max_n": 128,
    },
    GrammarLimits(): {
        "max_schema_bytes": 65_536,
        "max_schema_depth": 32,
        "max_enum_items": 4096,
        "max_pattern_bytes": 512,
        "max_repeats": 10_000,
        "max_compiling": 2,
        "max_compile_waiting": 64,
        "compile_timeout_s": 1.0,
        "grammar_cache_bytes": 67_108_864,
    },
    ConnectionLimits(): {
        "max_connections": 4096,
        "max_request_line": 8192,
        "max_header_bytes": 16_384,
        "max_headers": 64,
        "header_timeout_s": 10.0,
        "body_timeout_s": 75.0,
        "keep_alive_timeout_s": 75.0,
        "write_timeout_s": 60.0,
        "min_body_rate": 1024,
        "max_discarded_bytes": 67_108_864,
        "max_pipelined": 16,
    },
}


@pytest.mark.parametrize("limits", DEFAULTS, ids=lambda limits: type(limits).__name__)
def test_r8_every_default_is_finite(limits: msgspec.Struct) -> None:
    assert msgspec.structs.asdict(limits) == DEFAULTS[limits]


def test_r8_the_queue_and_what_follows_from_the_context_are_finite() -> None:
    scheduler = SchedulerConfig()
    assert (scheduler.max_waiting_requests, scheduler.queue_timeout_s) == (1024, 60.0)
    assert (scheduler.max_sessions, scheduler.built_grammar_bytes) == (64, 536_870_912)
    assert ByteLimits.resolve(Limits(), 1000) == ByteLimits(max_body=2 * 2**20 + 8000, max_prompt=16_000)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 2, 1e-300]),
        ("top_p", [1e-300, 1]),
        ("top_k", [-1, 0, 1, VOCAB_SIZE]),
        ("min_p", [0, 1]),
        ("seed", [-(2**63), 2**63 - 1]),
        ("logprobs", [0, 20]),
        ("stop", [["x"] * 16, "x" * 256]),
        ("stop_token_ids", [[0, VOCAB_SIZE - 1], [1] * 64]),
        ("n", [1, 128]),
        ("presence_penalty", [-2, 2]),
        ("frequency_penalty", [-2, 2]),
        ("repetition_penalty", [1e-300, 10]),
        ("logit_bias", [{}, {"0": -100, str(VOCAB_SIZE - 1): 100}, {str(i): 1 for i in range(VOCAB_SIZE)}]),
        ("allowed_token_ids", [[0, VOCAB_SIZE - 1], [1] * 1024]),
        ("bad_words", [[], ["a"], ["a"] * 128, ["x" * 128]]),
        ("prompt", [["a"] * 256, [0, VOCAB_SIZE - 1]]),
        ("max_tokens", [-1, 0, 1, 4094]),
        ("prompt_logprobs", [0, 20]),
        ("cache_salt", ["", "x" * 256]),
        ("priority", [-(2**31), 2**31 - 1]),
        ("session_id", ["", "A.z_0-9", "x" * 64]),
    ],
)
def test_r8_the_edges_of_ranges_are_within(wide: LiveServer, field: str, values: list[Any]) -> None:
    for value in values:
        assert wide.post(TEXT, {"prompt": "a", "max_tokens": 1, field: value})[0] == 200, value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.0000001),
        ("temperature", -5e-324),
        ("top_p", 0.0),
        ("top_p", 1.0000001),
        ("top_k", -2),
        ("min_p", -0.1),
        ("logprobs", -1),
        ("n", 0),
        ("n", 129),
        ("n", 10**6),
        ("presence_penalty", 2.0000001),
        ("frequency_penalty", -2.0000001),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10.000001),
        ("logit_bias", {"1": -100.0000001}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1] * 1025),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["a", ""]),
        ("bad_words", ["a", " \n"]),
        ("bad_words", ["x" * 129]),
        ("max_tokens", 4095),
        ("max_tokens", -2),
        ("prompt_logprobs", 21),
        ("stop_token_ids", [-1]),
        ("cache_salt", "x" * 257),
        ("priority", 2**31),
    ],
)
def test_r8_a_step_beyond_a_range_is_refused(live: LiveServer, field: str, value: Any) -> None:
    status, answer = live.post(TEXT, {"prompt": "a", field: value})
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("prompt_embeds", "AAAA"),
        ("suffix", "b"),
        ("functions", [{"name": "x"}]),
        ("guided_regex", "(a+)+$"),
        ("chat_template", "{{ 1 }}"),
        ("documents", [{"text": "x"}]),
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_r8_what_is_not_done_here_is_refused_by_name(
    live: LiveServer, path: str, field: str, value: Any
) -> None:
    base = {"prompt": "a"} if path == TEXT else {"messages": [user()]}
    status, answer = live.post(path, base | {field: value})
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["code"] == "unsupported_parameter"
    assert "Leave it out" in answer["error"]["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
        {"type": "text"},
    ],
)
def test_r8_parts_that_are_not_text_are_refused(live: LiveServer, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "look"}, part]
    status, answer = live.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]")
    assert answer["error"]["code"] == "unsupported_content"


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_r8_no_output_is_promised_that_the_context_cannot_hold(live: LiveServer, path: str) -> None:
    """`min_tokens` alone asks for output too: it is not cut in silence."""
    base = {"prompt": [1] * 90} if path == TEXT else {"messages": [user("x" * 83)]}  # BOS, "user: " and "\n"
    status, answer = live.post(path, base | {"min_tokens": 4007})
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
    assert "91 tokens" in answer["error"]["message"] or "90 tokens" in answer["error"]["message"]
    assert "min_tokens 4007" in answer["error"]["message"]
    assert live.post(path, base | {"min_tokens": 4005, "ignore_eos": True})[0] == 200
    assert live.engine.added[-1][2].max_tokens >= 4005


class WatchedCodec(ByteCodec):
    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return super().encode(text)


def thread_of_chat(messages: list[ChatMessage]) -> str:
    """Where a conversation was rendered."""
    codec = WatchedCodec()
    workers = TextWorkers()
    try:
        asyncio.run(PromptReader(fake_model(codec=codec), Limits(), 1 << 20, workers).chat(messages))
    finally:
        workers.close()
    return codec.threads[-1]


def test_r8_names_and_many_messages_count_as_work_for_a_thread() -> None:
    """A template runs over each message and its name, however short its text."""
    here = threading.current_thread().name
    assert thread_of_chat([ChatMessage(role="user", content="x")] * 10) == here
    assert thread_of_chat([ChatMessage(role="user", content="")] * 1000).startswith("text")
    assert thread_of_chat([ChatMessage(role="user", content="", name="n" * 20_000)]).startswith("text")


def test_r8_names_count_as_text(live: LiveServer) -> None:
    status, answer = live.post(CHAT, {"messages": [user("") | {"name": "n" * (16 * 4096 + 1)}]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_r8_the_queue_is_429_with_retry_after() -> None:
    engine = FakeEngine(max_alive=1, hold_after=0)
    with LiveServer(engine) as live, live.connect() as first:
        body = json.dumps({"prompt": "a"}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        first.sendall(head.encode() + body)
        live.wait_for(lambda: len(engine.alive) == 1)
        response, raw = live.request("POST", TEXT, {"prompt": "b"})
        assert (response.status, response.getheader("retry-after")) == (429, "1")
        assert json.loads(raw)["error"]["type"] == "rate_limit_error"
