"""Forced calls of tools through the whole product: two stages, real processes, the openai client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from depth import sampled
from disturbed import Server
from penstock.families.registry import resolve_model_directory
from penstock.tokenizer.tokenizer import load_tokenizer

CITY = {"type": "string", "maxLength": 12}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", sampled(range(4), 2))
def test_forced_calls_are_sound_whole_and_streamed(client: openai.OpenAI, choice: Any, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How is Rome?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 300,
    }
    (whole,) = client.chat.completions.create(**asked).choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    if call.function.name == "look":  # type: ignore[union-attr]
        assert set(arguments) == {"city", "days"}
        assert 0 <= arguments["days"] <= 99
        assert len(arguments["city"]) <= 12
    else:
        assert (choice, arguments) == ("required", {})
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls is not None
    assert [c.function.arguments for c in streamed.message.tool_calls] == [call.function.arguments]  # type: ignore[union-attr]


def test_d12_an_answer_is_calls_or_fits_its_format_whole_and_streamed(client: openai.OpenAI) -> None:
    person = {
        "type": "object",
        "properties": {"who": CITY},
        "required": ["who"],
        "additionalProperties": False,
    }
    tools = [TOOLS[0], {"type": "function", "function": {"name": "now", "strict": True}}]
    tokenizer, kinds = load_tokenizer(resolve_model_directory("demo")), set()
    to_name = {str(i): 20 for text in ("n", "na", "name") for i in tokenizer.encode(text)[-1:]}
    for seed in range(8):
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Who is there?"}],
            "tools": tools,
            "parallel_tool_calls": False,
            "logit_bias": to_name if seed % 2 else {},  # this model calls nothing by itself
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person}},
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 400,
        }
        (whole,) = client.chat.completions.create(**asked).choices
        kinds.add(whole.finish_reason)
        if whole.message.tool_calls:
            for call in whole.message.tool_calls:
                assert call.function.name in ("look", "now")  # type: ignore[union-attr]
                json.loads(call.function.arguments)  # type: ignore[union-attr]
        else:
            assert set(json.loads(whole.message.content or "")) == {"who"}
        with client.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices
        assert (streamed.message.content or "") == (whole.message.content or "")
        assert said(streamed) == said(whole)
    assert kinds == {"tool_calls", "stop"}


def said(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def test_a_strict_tool_that_is_not_called_leaves_text_alone(client: openai.OpenAI) -> None:
    def spoken(tools: Any) -> Any:
        (choice,) = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Speak."}],
            tools=tools,
            max_tokens=16,
            temperature=0,
        ).choices
        return choice

    loose = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}, TOOLS[1]]
    bound, free = spoken(TOOLS), spoken(loose)
    assert not said(bound)
    assert bound.message.content
    assert (bound.message.content, bound.finish_reason) == (free.message.content, free.finish_reason)


LARK = 'start: WORD (" " WORD)~1..2 LF\n%import common.LF\nWORD: /[a-z]{1,6}/'
CUSTOM: Any = {
    "type": "custom",
    "name": "say",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}


@pytest.mark.parametrize("seed", sampled(range(4), 1))
def test_a_custom_tools_text_follows_its_grammar_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "input": "Who is there?",
        "tools": [CUSTOM],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "extra_body": {"seed": seed},
    }
    (whole,) = client.responses.create(**asked).output
    assert whole.type == "custom_tool_call"
    assert re.fullmatch(r"[a-z]{1,6}( [a-z]{1,6}){1,2}\n", whole.input)
    got = list(client.responses.create(**asked, stream=True))
    (text,) = (event.delta for event in got if event.type == "response.custom_tool_call_input.delta")
    assert text == whole.input


@pytest.mark.parametrize("seed", sampled(range(4), 1))
def test_calls_and_texts_of_messages_are_those_of_a_chat(demo_server: Server, seed: int) -> None:
    user = [{"role": "user", "content": "How is Rome?"}]
    common: dict[str, Any] = {"messages": user, "temperature": 1.0, "seed": seed, "max_tokens": 300}
    forced: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = demo_server.post("/v1/chat/completions", **common, **forced)["choices"]
    (call,) = choice["message"]["tool_calls"]
    tools = [{"name": "look", "input_schema": SCHEMA}]
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    answer = demo_server.post("/v1/messages", **common, tools=tools, tool_choice=any_one)
    (block,) = answer["content"]
    assert (block["name"], block["input"]) == ("look", json.loads(call["function"]["arguments"]))
    assert answer["stop_reason"] == "tool_use"
    common |= {"max_tokens": 12}
    said = demo_server.post("/v1/chat/completions", **common)
    answer = demo_server.post("/v1/messages", **common)
    (block,) = answer["content"]
    assert block["text"] == said["choices"][0]["message"]["content"]
    usage, of_chat = answer["usage"], said["usage"]
    cached = usage["cache_read_input_tokens"]
    assert usage["input_tokens"] + cached == of_chat["prompt_tokens"]
    assert cached >= of_chat["prompt_tokens_details"]["cached_tokens"]
    counted = demo_server.post("/v1/messages/count_tokens", messages=user)
    assert counted == {"input_tokens": of_chat["prompt_tokens"]}
