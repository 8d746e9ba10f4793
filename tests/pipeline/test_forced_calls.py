"""Forced calls of tools through the whole product: two stages, real processes, the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from served import Served

DEMO = ("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32", "--tool-parser", "json")
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
def client() -> Iterator[openai.OpenAI]:
    with (
        Served(*DEMO) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", range(4))
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


def test_a_strict_tool_that_is_not_called_leaves_text_alone(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Speak."}],
        tools=TOOLS,
        max_tokens=16,
        temperature=0,
    ).choices
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert choice.message.content or choice.message.tool_calls
