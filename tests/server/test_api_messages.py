"""`/v1/messages`: what becomes of a request, the grammar of its events, and its errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fake_engine import DEMO, FakeEngine, SeenCodec, Status, fake_model, syntax_of
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.errors import StageLostError

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}]
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>'
THOUGHT = f"<think>\nHm.\n</think>\n\nWell.{CALL}"
THINKING = {"type": "enabled", "budget_tokens": 1024}


def serving(answer: str | None = None, reasoning: str = "none", **changes: Any) -> LiveServer:
    values = {"syntax": syntax_of("hermes", reasoning), "grammar_model": DEMO} | changes
    return LiveServer(FakeEngine(script=answer), model=fake_model(**values))


def ask(live: LiveServer, **fields: Any) -> dict[str, Any]:
    status, answer = live.post(PATH, {"model": "fake", "max_tokens": 512, "messages": USER} | fields)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose lines agree with each other."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        first, second = block.splitlines()
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        found.append(event)
    return found


def stream(live: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 512, "messages": USER, "stream": True} | fields
    response, raw = live.request("POST", PATH, body)
    assert response.status == 200, raw
    return events_of(raw)


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events come to, as a client puts it together."""
    first, *others = [event for event in events if event["type"] != "ping"]
    assert first["type"] == "message_start"
    message: dict[str, Any] = copy.deepcopy(first["message"])
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in others:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                block[kinds[delta["type"]]] += delta[kinds[delta["type"]]]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert others[-1] == {"type": "message_stop"}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(message))
    for holder in (plain, *plain["content"]):
        holder.pop("id", None)
    return plain


def test_a_whole_answer(live: LiveServer) -> None:
    answer = ask(live, system="Be brief.")
    text = "system: Be brief.\nuser: hi\n"
    assert answer["id"].startswith("msg_")
    assert without_ids(answer) == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1 + len(text) - 3,  # and three of the cache
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(text) + 1,
        },
    }


def test_the_grammar_of_a_stream(live: LiveServer) -> None:
    got = stream(live, max_tokens=2)
    assert [event["type"] for event in got] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, block, _, first, _, stop, last, _ = got
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert start["message"]["usage"]["input_tokens"] == 1 + len("user: hi\n")
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert first["delta"] == {"type": "text_delta", "text": "u"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (last["usage"]["output_tokens"], last["usage"]["cache_read_input_tokens"]) == (2, 3)
    assert without_ids(accumulated(got)) == without_ids(ask(live, max_tokens=2))


def test_reasoning_text_and_calls_are_blocks_whole_and_streamed() -> None:
    with serving(THOUGHT + "Done." + CALL, "qwen3") as live:
        whole = ask(live, tools=TOOLS, thinking=THINKING)
        got = stream(live, tools=TOOLS, thinking=THINKING)
    thought, said, call, behind, other = whole["content"]
    assert (thought["type"], thought["thinking"], len(thought["signature"])) == ("thinking", "Hm.", 64)
    assert (said, behind) == ({"type": "text", "text": "Well."}, {"type": "text", "text": "Done."})
    assert (call["name"], call["input"], call["type"]) == ("look", {"city": "Rome"}, "tool_use")
    assert call["id"] != other["id"]
    assert whole["stop_reason"] == "tool_use"
    assert without_ids(accumulated(got)) == without_ids(whole)
    order = [
        (event["type"], event["delta"]["type"]) for event in got if "index" in event and "delta" in event
    ]
    assert order[-1] == ("content_block_delta", "input_json_delta")
    assert [kind for _, kind in order].index("signature_delta") == len("Hm.")
    begun = [event["content_block"] for event in got if event["type"] == "content_block_start"]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert begun[2]["input"] == {}


@pytest.mark.parametrize("cut", [CALL[: CALL.index("Rome")], CALL.replace('"Rome"}', '"Rome",}')])
def test_a_call_that_is_not_sound_is_text_whole_and_streamed(cut: str) -> None:
    with serving("Well." + cut) as live:
        whole = ask(live, tools=TOOLS)
        assert without_ids(accumulated(stream(live, tools=TOOLS))) == without_ids(whole)
    assert whole["stop_reason"] == "end_turn"
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert whole["content"][0]["text"].replace("\n", "").startswith("Well." + cut.replace("\n", "")[:40])


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, THINKING | {"display": "omitted"}])
def test_reasoning_is_only_told_to_who_asks_for_it(thinking: Any) -> None:
    codec = SeenCodec()
    with serving("<think>\nHm.\n</think>\n\nWell.", "qwen3", codec=codec) as live:
        assert ask(live, thinking=thinking)["content"] == [{"type": "text", "text": "Well."}]
        ask(live, thinking={"type": "adaptive"})
    thinks = thinking is not None and thinking["type"] != "disabled"
    assert [options["enable_thinking"] for _, options in codec.seen] == [thinks, True]


def test_an_answer_of_nothing_is_one_empty_text(live: LiveServer) -> None:
    whole = ask(live, max_tokens=0)
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": ""}], "max_tokens")
    assert without_ids(accumulated(stream(live, max_tokens=0))) == without_ids(whole)


def test_a_stop_sequence_ends_the_answer_and_is_named(live: LiveServer) -> None:
    for answer in (
        ask(live, stop_sequences=["x", "hi"]),
        accumulated(stream(live, stop_sequences=["x", "hi"])),
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "hi")
        assert answer["content"] == [{"type": "text", "text": "user: "}]


def test_more_tokens_than_fit_fill_the_context() -> None:
    with LiveServer(FakeEngine(max_model_len=14)) as live:
        answer = ask(live, max_tokens=32_000)
        assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == (
            "model_context_window_exceeded",
            4,
        )
        assert live.engine.added[0][2].max_tokens == 4
        assert ask(live, max_tokens=4)["stop_reason"] == "max_tokens"


def test_the_conversation_becomes_messages_of_a_chat() -> None:
    codec = SeenCodec()
    asked: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"city": "x"}},
                {"type": "text", "text": "e"},
                {"type": "tool_use", "id": "2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}],
                },
                {"type": "text", "text": "f"},
            ],
        },
        {"role": "assistant", "content": []},
        {"role": "user", "content": []},
    ]
    with serving(codec=codec) as live:
        ask(
            live,
            messages=asked,
            tools=TOOLS,
            system=[{"type": "text", "text": "i"}],
            temperature=0.5,
            top_k=3,
        )
        sampling = live.engine.added[0][2]
    (messages, options) = codec.seen[0]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "x"}}},
        {"id": "2", "type": "function", "function": {"name": "look", "arguments": {}}},
    ]
    assert messages == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "de", "tool_calls": calls, "reasoning_content": "t"},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: no\nway", "tool_call_id": "2"},
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
    assert options["tools"] == [{"type": "function", "function": function}]
    assert (sampling.temperature, sampling.top_k) == (0.5, 3)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    codec = SeenCodec()
    with serving(codec=codec) as live:
        ask(live, messages=[*USER, {"role": "assistant", "content": "The"}])
        ask(live)
        body = {"max_tokens": 9, "messages": [*USER, {"role": "assistant", "content": [call_block()]}]}
        status, answer = live.post(PATH, body | {"tools": TOOLS})
        assert live.post(COUNT, body | {"tools": TOOLS})[0] == 200
    assert [options.get("continue_final_message") for _, options in codec.seen] == [True, None, None]
    assert status == 400
    assert answer["error"]["message"].startswith("messages[1].content[0] is a tool_use block")


def call_block(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "1", "name": "look", "input": {}} | fields


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "auto"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "look"}, True),
        ({"type": "none"}, False),
    ],
)
def test_tool_choice_binds_the_answer_as_in_a_chat(choice: dict[str, Any], grammar: bool) -> None:
    codec = SeenCodec()
    with serving(CALL, codec=codec) as live:
        answer = ask(live, tools=TOOLS, tool_choice=choice)
        structured = live.engine.added[0][2].structured_outputs
    assert (structured is not None) == grammar
    assert ("tools" in codec.seen[0][1]) == (choice["type"] != "none")
    assert answer["stop_reason"] == ("end_turn" if choice["type"] == "none" else "tool_use")


def test_output_config_binds_the_text_and_is_told_to_the_template() -> None:
    codec, schema = SeenCodec(), {"type": "object", "properties": {}, "additionalProperties": False}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    with serving(codec=codec) as live:
        ask(live, output_config=config)
        ask(live, output_format=config["format"])
        bound = [sampling.structured_outputs for _, _, sampling in live.engine.added]
    assert [json.loads(one.json or "") for one in bound if one is not None] == [schema] * 2
    assert codec.seen[0][1]["reasoning_effort"] == "low"


# A body as coding agents send them: fields of several betas, caches marked, who is billed, a server's tool.
AGENT: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32_000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=1a2b3;"},
        {"type": "text", "text": "You help with code.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nBe short.\n</system-reminder>"},
                {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        }
    ],
    "tools": [
        {
            "name": "look",
            "description": "Looks.",
            "input_schema": PARAMETERS | {"$schema": "https://json-schema.org/draft/2020-12/schema"},
            "eager_input_streaming": True,
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "service_tier": "auto",
    "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
}
AGENT_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
    "x-api-key": "none",
    "x-app": "cli",
}


def test_a_coding_agents_body_is_served() -> None:
    codec = SeenCodec()
    with serving(THOUGHT, "qwen3", codec=codec) as live:
        response, raw = live.request("POST", f"{PATH}?beta=true", AGENT, AGENT_HEADERS)
    assert response.status == 200, raw
    assert [block["type"] for block in accumulated(events_of(raw))["content"]] == [
        "thinking",
        "text",
        "tool_use",
    ]
    assert response.getheader("x-penstock-warning") == (
        "ignored unknown field(s): context_management, betas; without effect on this model: "
        "thinking.budget_tokens; skipped tool(s) that this server does not run: tools[1]:web_search_20250305"
    )
    messages, options = codec.seen[0]
    assert messages == [
        {"role": "system", "content": "You help with code."},
        {"role": "user", "content": "<system-reminder>\nBe short.\n</system-reminder>\nLook."},
    ]
    assert [tool["function"]["name"] for tool in options["tools"]] == ["look"]


def test_tokens_are_counted_without_running_anything(live: LiveServer) -> None:
    before = len(live.engine.added)
    status, answer = live.post(COUNT, {"model": "fake", "messages": USER, "system": "a"})
    assert (status, answer) == (200, {"input_tokens": 1 + len("system: a\nuser: hi\n")})
    long = {"messages": [{"role": "user", "content": "a" * 5000}], "foo": 1}
    response, raw = live.request("POST", COUNT, long)
    assert json.loads(raw)["input_tokens"] > 5000  # more than the context
    assert response.getheader("x-penstock-warning") == "ignored unknown field(s): foo"
    assert len(live.engine.added) == before


def test_tokens_of_tools_and_of_an_agents_body_are_counted() -> None:
    with serving(reasoning="qwen3") as live:
        _, plain = live.post(COUNT, {key: AGENT[key] for key in ("messages", "system")})
        status, all_of_it = live.post(COUNT, AGENT)
    assert (status, all_of_it) == (200, plain)  # the fake's template shows no tools


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0] is a block of type 'image'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0] is a block of type 'document'",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}
            ]
        },
        "messages[0].content[0].content[0] is a block of type 'image'",
    ),
    ({"messages": [{"role": "user", "content": [call_block()]}]}, "messages[0].content[0] is a block"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "assistant", "content": [call_block(name=None)]}]},
        "messages[0].content[0].name",
    ),
    ({"messages": [{"role": "assistant", "content": [call_block(id=None)]}]}, "messages[0].content[0].id"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]},
        "messages[0].content[0].thinking",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": []}, "messages must hold 1 to"),
    ({"messages": USER * 9}, "messages must hold 1 to 8"),
    ({"system": [IMAGE]}, "system[0] is a block of type 'image'"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens must be at least 0"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"messages": [{"role": "user", "content": "a" * 5000}]}, "prompt is too long: The prompt has 50"),
    (
        {"messages": [{"role": "user", "content": "a" * 70_000}]},
        "prompt is too long: messages has 70000 bytes",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_1"}, {"name": "a b", "input_schema": {}}]}, "tools[1].name is 'a b'"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema has the type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names 'other'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{"type": "web_search_1"}], "tool_choice": {"type": "any"}}, "tool_choice is required"),
    ({"thinking": {"type": "perhaps"}}, "thinking.type"),
    ({"thinking_budget": 5}, "thinking_budget is not supported"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"stop_sequences": ["a"] * 17}, "number of stop strings must be"),
    ({"stop": ["a"]}, "stop is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"n": 2}, "n is not supported"),
    ({"temperature": 3}, "temperature"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
]


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    with LiveServer(limits=Limits(max_messages=8)) as server:
        yield server


@pytest.mark.parametrize(("fields", "begins"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named_in_the_apis_own_form(
    small: LiveServer, fields: dict[str, Any], begins: str
) -> None:
    response, raw = small.request("POST", PATH, {"max_tokens": 9, "messages": USER} | fields)
    answer = json.loads(raw)
    assert response.status == 400, answer
    assert set(answer) == {"type", "error", "request_id"}
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert begins in answer["error"]["message"]
    assert answer["request_id"] == response.getheader("request-id") == response.getheader("x-request-id")
    assert not small.engine.alive


def failed(
    live: LiveServer, path: str = PATH, body: Any = None, **headers: str
) -> tuple[int, str, str | None]:
    """The status, the kind and Retry-After of the answer to a request that fails."""
    body = {"max_tokens": 9, "messages": USER} if body is None else body
    response, raw = live.request(
        "POST", path, body, {name.replace("_", "-"): headers[name] for name in headers}
    )
    answer = json.loads(raw)
    assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})
    return response.status, answer["error"]["type"], response.getheader("retry-after")


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_every_error_of_the_path_has_the_apis_own_form(path: str) -> None:
    other = {"model": "other", "max_tokens": 9, "messages": USER}
    config = ServerConfig(api_keys=["secret"], limits=Limits(max_body_bytes=2000))
    with LiveServer(config=config) as live:
        assert failed(live, path) == (401, "authentication_error", None)
        assert failed(live, path, x_api_key="wrong") == (401, "authentication_error", None)
        for headers in ({"x_api_key": "secret"}, {"authorization": "Bearer secret"}):
            assert failed(live, path, other, **headers) == (404, "not_found_error", None)
        assert failed(live, path, {"a": "b" * 3000}, x_api_key="secret") == (413, "request_too_large", None)
        assert failed(live, path, b"{", x_api_key="secret") == (400, "invalid_request_error", None)
        assert failed(live, path, x_api_key="secret", origin="http://evil.example")[1] == "permission_error"
        response, raw = live.request("GET", path, None, {"x-api-key": "secret"})
        assert (response.status, response.getheader("allow")) == (405, "POST")
        assert json.loads(raw)["error"]["type"] == "invalid_request_error"
        assert failed(live, f"{PATH}/batches", x_api_key="secret") == (404, "not_found_error", None)
        response, raw = live.request("POST", "/v1/messagesx", other, {"x-api-key": "secret"})
        assert json.loads(raw)["error"]["code"] == "not_found"  # the form of the other routes


def test_what_the_engine_refuses_has_the_apis_own_form() -> None:
    with LiveServer(FakeEngine(max_alive=0)) as live:
        assert failed(live) == (429, "rate_limit_error", "1")
    with LiveServer(FakeEngine(state=Status(ready=False, reason="loading"))) as live:
        assert failed(live) == (503, "overloaded_error", "1")
    with LiveServer(FakeEngine(failure=RuntimeError("secret"))) as live:  # type: ignore[arg-type]
        assert failed(live) == (500, "api_error", None)
        live.wait_for(lambda: "RuntimeError" in live.log.getvalue())


def test_a_failure_in_the_middle_is_an_error_event() -> None:
    engine = FakeEngine(fail_after=2, failure=StageLostError("Stage 1 is lost.", code="stage_lost"))
    with LiveServer(engine) as live:
        got = stream(live)
    assert [event["type"] for event in got[-2:]] == ["content_block_delta", "error"]
    assert got[-1]["error"] == {"type": "overloaded_error", "message": "Stage 1 is lost."}
    assert got[-1]["request_id"]
