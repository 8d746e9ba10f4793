"""What agents connect with: the real client of Anthropic, and for custom tools that of OpenAI."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fake_engine import DEMO, FakeEngine, Status, fake_model, syntax_of
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.errors import StageLostError
from served import Served

anthropic = pytest.importorskip("anthropic", reason="the extra `doors` has it")

pytestmark = pytest.mark.doors

USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SHORT = SCHEMA | {"properties": {"city": {"type": "string", "maxLength": 12}}}  # for a small model
TOOLS: Any = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nWell.{CALL}"
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def client_of(live: LiveServer, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    model = fake_model(syntax=syntax_of("hermes", "qwen3"), grammar_model=DEMO)
    with LiveServer(FakeEngine(script=ANSWER), model=model) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[Any]:
    with client_of(live) as made:
        yield made


def ask(client: Any, **fields: Any) -> Any:
    return client.messages.create(**{"model": "fake", "max_tokens": 512, "messages": USER} | fields)


def test_a_whole_answer_with_thinking_and_a_call(client: Any) -> None:
    answer = ask(client, tools=TOOLS, thinking=THINKING)
    thought, said, call = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (said.type, said.text) == ("text", "Well.")
    assert (call.type, call.name, call.input) == ("tool_use", "look", {"city": "Rome"})
    assert answer.stop_reason == "tool_use"
    assert answer.usage.cache_read_input_tokens == 3
    assert answer._request_id


def test_the_streams_helper_comes_to_the_whole_answer(client: Any) -> None:
    asked = {"model": "fake", "max_tokens": 512, "messages": USER, "tools": TOOLS, "thinking": THINKING}
    kinds = []
    with client.messages.stream(**asked) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    whole = ask(client, tools=TOOLS, thinking=THINKING)
    assert [block.to_dict() | {"id": ""} for block in final.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert (final.stop_reason, final.usage.to_dict()) == ("tool_use", whole.usage.to_dict())
    assert [kinds[0], kinds[1], kinds[-1]] == ["message_start", "content_block_start", "message_stop"]
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    raw = [event.type for event in client.messages.create(**asked, stream=True)]
    assert raw == [kind for kind in kinds if kind not in ("thinking", "signature", "text", "input_json")]


def test_an_agents_loop_of_a_call_and_its_result(client: Any) -> None:
    answer = ask(client, tools=TOOLS, thinking=THINKING)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": False}
    turns = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert ask(client, tools=TOOLS, messages=turns).content[0].text == "Well."
    assert client.messages.count_tokens(model="fake", messages=turns, tools=TOOLS).input_tokens > 0
    beta = client.beta.messages.create(
        model="fake", max_tokens=9, messages=USER, betas=["interleaved-thinking-2025-05-14"]
    )
    assert beta.stop_reason == "max_tokens"


def test_the_models_of_the_server_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_errors_are_those_of_the_clients_own_kinds(live: LiveServer) -> None:
    with client_of(live) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            ask(client, model="other")
        with pytest.raises(anthropic.BadRequestError) as refused:
            ask(client, extra_body={"temperature": 3})
        picture = base64.b64encode(b"x").decode()
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
        with pytest.raises(anthropic.BadRequestError, match="of type 'image'"):
            ask(client, messages=[{"role": "user", "content": [image]}])
    body = refused.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == refused.value.request_id
    config = ServerConfig(api_keys=["secret"], limits=Limits(max_body_bytes=2000))
    with LiveServer(FakeEngine(), config=config) as locked:
        with client_of(locked) as wrong, pytest.raises(anthropic.AuthenticationError):
            ask(wrong)
        with client_of(locked, "secret") as right:
            assert ask(right).stop_reason == "end_turn"
            with pytest.raises(anthropic.RequestTooLargeError):
                ask(right, system="a" * 3000)
        bearer = anthropic.Anthropic(base_url=locked.url, auth_token="secret", max_retries=0)
        with bearer:
            assert ask(bearer).stop_reason == "end_turn"
    full = LiveServer(FakeEngine(max_alive=0))
    with full, client_of(full) as client, pytest.raises(anthropic.RateLimitError):
        ask(client)
    with LiveServer(FakeEngine(state=Status(ready=False))) as loading, client_of(loading) as client:
        with pytest.raises(anthropic.InternalServerError) as away:
            ask(client)
        assert away.value.status_code == 503


def test_a_failure_in_a_stream_is_raised() -> None:
    engine = FakeEngine(fail_after=2, failure=StageLostError("Stage 1 is lost.", code="stage_lost"))
    lost = pytest.raises(anthropic.APIStatusError, match="Stage 1 is lost")
    with LiveServer(engine) as live, client_of(live) as client, lost:
        list(ask(client, stream=True))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", "--tool-parser", "json") as server:
        yield server


def test_two_stages_answer_both_clients(served: Served) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": "demo",
            "max_tokens": 200,
            "messages": USER,
            "tools": [TOOLS[0] | {"input_schema": SHORT, "strict": True}],
            "tool_choice": {"type": "tool", "name": "look"},
            "extra_body": {"temperature": 0},
        }
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            final = events.get_final_message()
        counted = client.messages.count_tokens(model="demo", messages=USER, tools=asked["tools"])
    (call,), (streamed,) = whole.content, final.content
    assert call.input == streamed.input
    assert set(call.input) == {"city"}
    read = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == read
    custom: Any = {
        "type": "custom",
        "name": "sum",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: /[0-9]{1,3}/ "+" /[0-9]{1,3}/'},
    }
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as of_openai:
        (item,) = of_openai.responses.create(
            model="demo", input="hi", tools=[custom, {"type": "web_search"}], tool_choice="required",
            parallel_tool_calls=False,
        ).output  # fmt: skip
    assert item.type == "custom_tool_call"
    first, second = item.input.split("+")
    assert json.loads(f"[{int(first)}, {int(second)}]")
