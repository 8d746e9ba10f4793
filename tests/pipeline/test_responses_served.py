"""The Responses API through the whole product: two stages, real processes, the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from served import Served

DEMO = ("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32", "--tool-parser", "json")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}]
HOT: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        Served(*DEMO) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_a_response_says_what_the_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": "Play."}, {"role": "user", "content": "ROMEO:"}],
        max_tokens=24,
        **HOT,
    )
    asked: dict[str, Any] = {"model": "demo", "instructions": "Play.", "max_output_tokens": 24, **HOT}
    whole = client.responses.create(input="ROMEO:", **asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    with client.responses.stream(input="ROMEO:", **asked) as events:
        assert events.get_final_response().output_text == whole.output_text


def test_a_conversation_goes_on_over_calls(client: openai.OpenAI) -> None:
    turn: list[Any] = [{"role": "user", "content": "How is Rome?"}]
    first = client.responses.create(
        model="demo", input=turn, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **HOT
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    turn += [
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."},
    ]
    second = client.responses.create(model="demo", input=turn, tools=TOOLS, max_output_tokens=8, **HOT)
    assert second.usage is not None
    assert second.usage.input_tokens > (first.usage.input_tokens if first.usage else 0)


def test_a_schema_binds_the_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="demo",
        input="How is Rome?",
        text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}},
        **HOT,
    )
    assert answer.status == "completed"
    assert set(json.loads(answer.output_text)) == {"city"}
