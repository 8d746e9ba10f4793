"""`/v1/responses`: the official client's view, the grammar of its events, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from fake_engine import (
    DEMO,
    ByteCodec,
    ByteDetokenizer,
    FakeEngine,
    SeenCodec,
    fake_logprobs,
    fake_model,
    syntax_of,
)
from live_server import LiveServer
from penstock.engine.client.outputs import TextDelta
from penstock.errors import StageLostError
from penstock.server.answers.responses_output import Output
from penstock.server.answers.text_logprobs import PlacedLogprobs
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.responses_types import OutputMessage
from penstock.tokenizer.model_syntax import ModelSyntax

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "look", "description": "Looks.", "parameters": PARAMETERS}]
THOUGHT = (
    "<think>\nHm.\n</think>\n\nWell."
    '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def serving(answer: str | None = None, reasoning: str = "none", codec: ByteCodec | None = None) -> LiveServer:
    syntax = syntax_of("hermes", reasoning)
    model = fake_model(syntax=syntax, codec=codec or ByteCodec(), grammar_model=DEMO)
    return LiveServer(FakeEngine(script=answer), model=model)


def client_of(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(live) as client:
        yield client


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose lines agree with each other; `[DONE]` is checked by whoever wants it."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = block.splitlines()
        if len(lines) == 2:
            event = json.loads(lines[1].removeprefix("data: "))
            assert lines[0] == f"event: {event['type']}"
            found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(live: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    _, raw = live.request("POST", PATH, {"input": "hi", "stream": True} | fields)
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    return events_of(raw)


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request have in common: all but ids and times."""
    plain = json.loads(json.dumps(response))
    for holder in (plain, *plain["output"]):
        for name in ("id", "created_at", "completed_at", "call_id"):
            holder.pop(name, None)
    return plain  # type: ignore[no-any-return]


def test_the_client_reads_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="Grüße", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    text = "system: Be brief.\nuser: Grüße\n"
    assert answer.output_text == text
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.input_tokens == 1 + len(text.encode())
    assert answer.usage.output_tokens == len(text.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.store is False  # type: ignore[attr-defined]


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="abc", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.output_text, answer.max_output_tokens) == ("user", 4)
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_an_answer_of_nothing_is_one_empty_message(live: LiveServer, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="abc", max_output_tokens=0)
    (item,) = answer.output
    assert (item.type, answer.output_text) == ("message", "")
    got = stream(live, max_output_tokens=0)
    assert got[-1]["response"]["output"][0]["content"] == [
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    ]


def test_the_grammar_of_a_streamed_text(live: LiveServer) -> None:
    got = stream(live, max_output_tokens=3)
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    created, _, added, part, *deltas, text, part_done, item_done, last = got
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    item_id = added["item"]["id"]
    assert added["item"] == {
        "type": "message",
        "id": item_id,
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }
    assert {event["item_id"] for event in (part, *deltas, text, part_done)} == {item_id}
    assert {event["output_index"] for event in (added, part, *deltas, text, part_done, item_done)} == {0}
    assert "".join(event["delta"] for event in deltas) == text["text"] == part_done["part"]["text"] == "use"
    assert last["response"]["output"] == [item_done["item"]]
    assert last["response"]["usage"]["output_tokens"] == 3


def test_the_clients_stream_helper_comes_to_the_whole_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="Grüße, 世界 👋") as events:
        seen = [event for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert final.output_text == "user: Grüße, 世界 👋\n" == "".join(event.delta for event in seen)
    assert seen[-1].snapshot == final.output_text


def test_reasoning_text_and_calls_are_items_whole_and_streamed() -> None:
    with serving(THOUGHT, reasoning="qwen3") as live, client_of(live) as client:
        answer = client.responses.create(model="fake", input="hi", tools=TOOLS)
        thought, said, call = answer.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert [part.text for part in thought.content] == ["Hm."]
        assert (said.type, answer.output_text) == ("message", "Well.")
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("look", '{"city": "Rome"}', "completed")
        got = stream(live, tools=TOOLS)
        assert without_times(got[-1]["response"]) == without_times(json.loads(answer.to_json()))
    items = got[-1]["response"]["output"]
    done = [event for event in got if event["type"] == "response.output_item.done"]
    assert [(event["output_index"], event["item"]) for event in done] == list(enumerate(items))
    arguments = [event for event in got if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in arguments) == '{"city": "Rome"}'
    (whole,) = (event for event in got if event["type"] == "response.function_call_arguments.done")
    assert (whole["arguments"], whole["item_id"]) == ('{"city": "Rome"}', items[2]["id"])
    assert not any("logprobs" in event for event in got if "reasoning_text" in event["type"])


def test_a_call_that_breaks_off_is_incomplete() -> None:
    with serving('<tool_call>\n{"name": "look", "arguments": {"city": "Ro') as live:
        _, answer = live.post(PATH, {"input": "hi", "tools": TOOLS})
        (call,) = answer["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"city": "Ro')
        assert without_times(stream(live, tools=TOOLS)[-1]["response"]) == without_times(answer)


CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("answer", "reasoning", "room", "status"),
    [
        (CALL, "none", len(CALL) - 1, "completed"),  # its arguments end before the last bracket
        (CALL, "none", len(CALL) - 2, "incomplete"),
        (THOUGHT, "qwen3", THOUGHT.index("</think>") + len("</think>"), "completed"),
        (THOUGHT, "qwen3", THOUGHT.index("</think>") + len("</think>") - 1, "incomplete"),
        (THOUGHT, "qwen3", THOUGHT.index("Well.") + len("Well."), "incomplete"),
    ],
)
def test_an_item_that_has_come_to_its_end_is_complete_in_an_answer_that_is_cut(
    answer: str, reasoning: str, room: int, status: str
) -> None:
    with serving(answer, reasoning) as live:
        _, whole = live.post(PATH, {"input": "hi", "tools": TOOLS, "max_output_tokens": room})
        got = stream(live, tools=TOOLS, max_output_tokens=room)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][-1]["status"] == status
    assert [item["status"] for item in whole["output"][:-1]] == ["completed"] * (len(whole["output"]) - 1)
    assert without_times(got[-1]["response"]) == without_times(whole)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def test_the_conversation_becomes_messages_of_turns() -> None:
    codec = SeenCodec()
    with serving(codec=codec) as live, client_of(live) as client:
        asked: Any = [
            {"role": "user", "content": [text_part("a"), text_part("b")]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"city": "x"}'},
            {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "sun"},
            {"type": "function_call_output", "call_id": "2", "output": [text_part("rain")]},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": "e", "type": None},
            {"type": "function_call", "call_id": "3", "name": "look", "arguments": "{}"},
            {"role": "assistant", "content": "g"},
            {"type": "function_call_output", "call_id": "3", "output": "fog"},
            {"role": "developer", "content": "f"},
        ]
        client.responses.create(
            model="fake", instructions="i", input=asked, tools=TOOLS, reasoning={"effort": "low"}
        )
        client.responses.create(model="fake", instructions="", input="alone")
        (messages, options), (alone, _) = codec.seen
    assert alone == [{"role": "user", "content": "alone"}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city": "x"}'}},
        {"id": "2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        {"id": "3", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    assert messages == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": calls[:2], "reasoning_content": "t"},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "tool", "content": "rain", "tool_call_id": "2"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "eg", "tool_calls": calls[2:]},
        {"role": "tool", "content": "fog", "tool_call_id": "3"},
        {"role": "developer", "content": "f"},
    ]
    assert options["reasoning_effort"] == "low"
    assert options["tools"][0]["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": PARAMETERS,
    }


def test_logprobs_are_those_of_the_messages_text(live: LiveServer, client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="é", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=8
    )
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs] == [*"user: ", "bytes:\\xc3", "bytes:\\xa9"]  # type: ignore[union-attr]
    assert [top.logprob for top in part.logprobs[0].top_logprobs] == [-0.25, -0.5]  # type: ignore[union-attr]
    got = stream(
        live, input="é", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=8
    )
    deltas = [event for event in got if event["type"] == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event["logprobs"]]
    text, part_done, item_done, last = got[-4:]
    for shown in (
        text,
        part_done["part"],
        item_done["item"]["content"][0],
        last["response"]["output"][0]["content"][0],
    ):
        assert shown["logprobs"] == streamed
    assert [entry["token"] for entry in streamed] == [entry.token for entry in part.logprobs]  # type: ignore[union-attr]
    assert "".join(event["delta"] for event in deltas) == "user: é"


@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_logprobs_of_a_message_beside_reasoning_and_calls(shows_reasoning: bool) -> None:
    """Issue 25, point 18. A token is a byte here, and the whole answer has one more, which ends it."""
    asked = {
        "tools": TOOLS,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "include_reasoning": shows_reasoning,
    }
    with serving(THOUGHT + "Né", reasoning="qwen3") as live:
        _, answer = live.post(PATH, {"input": "hi"} | asked)
        got = stream(live, **asked)
    *_, first, call, last = answer["output"]
    (said,), (behind,) = first["content"], last["content"]
    assert [entry["token"] for entry in said["logprobs"]] == [*"Well."]
    assert [entry["token"] for entry in behind["logprobs"]] == ["N", "bytes:\\xc3", "bytes:\\xa9", ""]
    assert "logprobs" not in call
    assert without_times(got[-1]["response"]) == without_times(answer)
    deltas = [event for event in got if event["type"] == "response.output_text.delta"]
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert entries == said["logprobs"] + behind["logprobs"]
    done = [event["logprobs"] for event in got if event["type"] == "response.output_text.done"]
    assert done == [said["logprobs"], behind["logprobs"]]


def test_logprobs_are_the_same_where_tools_could_have_been_called(live: LiveServer) -> None:
    """Issue 25, point 18."""
    asked = {"input": "Grüße", "include": ["message.output_text.logprobs"]}
    _, plain = live.post(PATH, asked)
    with serving() as other:
        _, beside = other.post(PATH, asked | {"tools": TOOLS})
    assert beside["output"][0]["content"] == plain["output"][0]["content"]
    assert plain["output"][0]["content"][0]["logprobs"]


def test_log_probabilities_are_encoded_once() -> None:
    logprobs = PlacedLogprobs(lambda token_id: bytes([token_id]), ByteDetokenizer())
    output = Output("u", Reading().reader("r", 0), logprobs)
    deltas = [
        TextDelta(text="ab", token_ids=[97, 98], logprobs=[fake_logprobs(97, 1), fake_logprobs(98, 1)]),
        TextDelta(text="", token_ids=[], logprobs=[]),
        TextDelta(text="c", token_ids=[99], logprobs=[fake_logprobs(99, 1)], finish_reason="stop"),
    ]
    got = [event["logprobs"] for delta in deltas for event in output.take(delta) if "logprobs" in event]
    (message,) = output.items
    assert isinstance(message, OutputMessage)
    got.append(message.content[0].logprobs)
    assert all(isinstance(one, msgspec.Raw) for one in got)
    shown = [[entry["token"] for entry in json.loads(output.lists.encode(one))] for one in got]
    assert shown == [["a", "b"], ["c"], ["a", "b", "c"], ["a", "b", "c"]]


def test_a_schema_binds_the_text(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    engine = FakeEngine()
    with LiveServer(engine, model=fake_model(grammar_model=DEMO)) as live:
        body = {"input": "a", "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}}
        status, answer = live.post(PATH, body)
    assert status == 200
    assert answer["text"]["format"] == body["text"]["format"]  # type: ignore[index]
    structured = engine.added[0][2].structured_outputs
    assert structured is not None
    assert json.loads(structured.json or "") == schema


def test_a_failure_in_the_middle_is_an_error_and_a_failed_response() -> None:
    engine = FakeEngine(fail_after=2, failure=StageLostError("Stage 1 is lost.", code="stage_lost"))
    with LiveServer(engine) as live:
        _, raw = live.request("POST", PATH, {"input": "hi", "stream": True})
        with client_of(live) as client, pytest.raises(openai.APIError, match="Stage 1 is lost"):
            list(client.responses.create(model="fake", input="hi", stream=True))
        assert live.post(PATH, {"input": "hi"})[0] == 503
    assert b"[DONE]" not in raw
    *_, error, failed = events_of(raw)
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", "stage_lost", "stage_lost")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "stage_lost", "message": "Stage 1 is lost."}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "c"}}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"max_output_tokens": -2}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"input": "a" * 5000}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format"),
    ({"reasoning": {"effort": "immense"}}, "reasoning.effort"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"user": "u" * 513}, "user"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"echo": True}, "echo"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"reasoning": {"max_tokens": 64}}, "reasoning.max_tokens"),
    ({"reasoning": {"effort": "low", "budget_tokens": 64}}, "reasoning.budget_tokens"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "messages[99]"}}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "messages[9] "}]}, "tools[0].name"),
    ({"chat_template_kwargs": {"messages[7]": 1}}, "chat_template_kwargs"),
    ({"text": {"format": {"type": "json_schema", "schema": {"$ref": "messages[3]"}}}}, "text.format"),
    ({"tools": TOOLS, "structured_outputs": {"json": "nonsense"}}, "structured_outputs"),
    ({"tools": TOOLS, "structured_outputs": {"json": "[1]"}}, "structured_outputs"),
    ({"tools": TOOLS, "structured_outputs": {"json": "[" * 20_000}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named_as_the_client_named_it(
    live: LiveServer, fields: dict[str, Any], param: str
) -> None:
    status, answer = live.post(PATH, {"input": "hi"} | fields)
    assert status == 400
    assert answer["error"]["param"] == param
    assert not re.match(r"messages|.*[^'\"]messages", answer["error"]["message"])
    assert not live.engine.alive


def test_another_model_is_not_found(live: LiveServer) -> None:
    status, answer = live.post(PATH, {"model": "other", "input": "hi"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_an_error_about_calls_names_the_first_call_of_the_turn() -> None:
    model = fake_model(syntax=ModelSyntax())
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
    ]
    with LiveServer(FakeEngine(), model=model) as live:
        status, answer = live.post(PATH, {"input": items, "instructions": "c"})
    assert (status, answer["error"]["param"]) == (400, "input[3]")
    assert answer["error"]["message"].startswith("input[3] is a function_call, but the model")


def test_what_changes_nothing_is_named_in_a_header(live: LiveServer) -> None:
    fields = {
        "store": True,
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto", "effort": "low"},
        "prompt_cache_key": "k",
        "frobnicate": 3,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
    }
    response, raw = live.request("POST", PATH, {"input": "hi"} | fields)
    assert response.status == 200
    warning = response.getheader("x-penstock-warning")
    assert warning == (
        "ignored unknown field(s): frobnicate; without effect on this model: store, prompt_cache_key, "
        "text.verbosity, reasoning.summary"
    )
    assert json.loads(raw)["prompt_cache_key"] == "k"
    for neutral in ({"store": False}, {"n": 1, "logprobs": False, "return_token_ids": False}, {"n": None}):
        response, _ = live.request("POST", PATH, {"input": "hi"} | neutral)
        assert (response.status, response.getheader("x-penstock-warning")) == (200, None)


def test_nothing_is_kept(live: LiveServer) -> None:
    _, answer = live.post(PATH, {"input": "hi"})
    response, _ = live.request("GET", f"{PATH}/{answer['id']}")
    assert response.status == 404
