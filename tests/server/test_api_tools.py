"""Tools over HTTP: what goes to the template and the engine, what comes back whole and streamed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fake_engine import DEMO, FakeEngine, SeenCodec, fake_model, syntax_of
from live_server import LiveServer, events
from penstock.config.limits import GrammarLimits, Limits
from penstock.config.server import ServerConfig
from penstock.server.openai.tools import grammar_of
from penstock.server.routes import chat_reader
from penstock.tokenizer.model_syntax import ModelSyntax

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS} | fields}


TOOLS = [tool("look"), tool("add", description="Adds.")]
ROME = '{"city": "Rome", "n": [1, 2]}'
ANSWERS = {
    "hermes": f'Well.\n\n<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    "mistral": f'Well.[TOOL_CALLS] [{{"name": "look", "arguments": {ROME}}}, '
    '{"name": "add", "arguments": {}}]',
    "mistral_args": f"Well.[TOOL_CALLS]look[ARGS]{ROME}[TOOL_CALLS]add[ARGS]{{}}",
    "llama3_json": f'Well.<|python_tag|>{{"name": "look", "parameters": {ROME}}}; '
    '{"name": "add", "parameters": {}}',
    "json": f'[{{"name": "look", "arguments": {ROME}}}, {{"name": "add", "arguments": {{}}}}]',
}


def serving(
    answer: str,
    tools: str = "hermes",
    reasoning: str = "none",
    config: ServerConfig | None = None,
    **changes: Any,
) -> LiveServer:
    model = fake_model(
        syntax=syntax_of(tools, reasoning), **{"codec": SeenCodec(), "grammar_model": DEMO} | changes
    )
    return LiveServer(FakeEngine(script=answer), model=model, config=config)


def ask(live: LiveServer, **fields: Any) -> dict[str, Any]:
    status, answer = live.post(CHAT, {"messages": USER, "tools": TOOLS} | fields)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def stream(live: LiveServer, **fields: Any) -> list[Any]:
    _, raw = live.request("POST", CHAT, {"messages": USER, "tools": TOOLS, "stream": True} | fields)
    return events(raw)


def accumulated(chunks: list[Any]) -> dict[str, Any]:
    """The message that the deltas of a stream make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["function"]["arguments"] == ""
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("form", ANSWERS)
def test_calls_come_whole_and_streamed_alike(form: str) -> None:
    with serving(ANSWERS[form], form) as live:
        (choice,) = ask(live)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == (None if form == "json" else "Well.")
        assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
            ("function", {"name": "look", "arguments": ROME}),
            ("function", {"name": "add", "arguments": "{}"}),
        ]
        chunks = stream(live)
        streamed = accumulated(chunks)
        assert streamed["content"] == (message["content"] or "")
        assert [(c["name"], c["arguments"]) for c in streamed["tool_calls"]] == [
            ("look", ROME),
            ("add", "{}"),
        ]
        assert streamed["finish_reason"] == "tool_calls"
        pattern = r"[A-Za-z0-9]{9}" if form.startswith("mistral") else r"call_[A-Za-z0-9]{24}"
        ids = [call["id"] for call in message["tool_calls"] + streamed["tool_calls"]]
        assert len(set(ids)) == 4
        assert all(re.fullmatch(pattern, one) for one in ids)


def test_the_grammar_of_a_streamed_call() -> None:
    with serving('Hm <tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>') as live:
        chunks = stream(live, stream_options={"include_usage": True})
    *with_choice, usage, done = chunks
    assert (usage["choices"], done) == ([], "[DONE]")
    deltas = [chunk["choices"][0]["delta"] for chunk in with_choice]
    (begin,) = [delta for delta in deltas if "id" in delta.get("tool_calls", [{}])[0]]
    begun = deltas.index(begin)
    assert deltas[:begun] == [{"role": "assistant", "content": ""}, {"content": "H"}, {"content": "m"}]
    call = begin["tool_calls"][0]
    assert begin == {
        "tool_calls": [
            {"index": 0, "id": call["id"], "type": "function", "function": {"name": "look", "arguments": ""}}
        ]
    }
    assert deltas[begun + 1 :] == [
        *({"tool_calls": [{"index": 0, "function": {"arguments": character}}]} for character in '{"a": 1}'),
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in with_choice]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_continuous_usage_of_a_streamed_call_counts_every_token_once() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with serving(THOUGHT + ANSWERS["hermes"], reasoning="qwen3") as live:
        *chunks, last, _done = stream(live, stream_options=options, return_token_ids=True)
    counted = 0
    for chunk in chunks:
        counted += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == counted
        assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert counted == last["usage"]["completion_tokens"]
    assert accumulated([*chunks, "[DONE]"])["finish_reason"] == "tool_calls"


def client_of(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)


def test_the_openai_client_reads_calls_whole_streamed_and_by_its_own_helper() -> None:
    with serving(ANSWERS["hermes"]) as live, client_of(live) as client:
        asked: Any = {"model": "fake", "messages": USER, "tools": TOOLS}
        message = client.chat.completions.create(**asked).choices[0].message
        assert message.tool_calls is not None
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
            json.loads(ROME),
            {},
        ]  # type: ignore[union-attr]
        with client.chat.completions.stream(**asked) as helper:
            final = helper.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "Well."
        assert final.message.tool_calls is not None
        assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == [
            ("look", ROME),
            ("add", "{}"),
        ]
        # the next turn: what came goes back, with the results
        again = [
            *USER,
            message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls),
        ]
        client.chat.completions.create(**asked | {"messages": again})
        messages, options = live._model.codec.seen[-1]
        assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
        assert messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": ROME}
        assert messages[2]["tool_call_id"] == message.tool_calls[0].id
        assert [shown["function"]["name"] for shown in options["tools"]] == ["look", "add"]


@pytest.mark.parametrize(
    ("max_tokens", "begun", "reason"),
    [
        (4096 - 7, '{"city": yes}', "stop"),  # it is no JSON
        (59, '{"city": yes}', "length"),
        (52, '{"city"', "length"),
        (40, "", "length"),
    ],
)
def test_a_call_that_is_not_sound_is_content_where_it_still_can_be(
    max_tokens: int, begun: str, reason: str
) -> None:
    """Arguments that were streamed cannot be taken back; the end then says that there is no call to make."""
    text = 'So: <tool_call>{"name": "look", "arguments": {"city": yes}}</tool_call>'
    shown = text[:max_tokens]
    with serving(text) as live:
        (choice,) = ask(live, max_tokens=max_tokens)["choices"]
        assert choice["message"] == {"role": "assistant", "content": shown}
        assert choice["finish_reason"] == reason
        streamed = accumulated(stream(live, max_tokens=max_tokens))
        assert "".join(call["arguments"] for call in streamed["tool_calls"]) == begun
        assert streamed["content"] == ("So:" if begun else shown)
        assert streamed["finish_reason"] == reason


@pytest.mark.parametrize("text", ["<tool_call> no", '{"name": "look", "arguments": {}}', "<tool_call>"])
def test_text_that_is_no_call_is_content(text: str) -> None:
    with serving(text) as live:
        (choice,) = ask(live)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        streamed = accumulated(stream(live))
        assert (streamed["content"], streamed["finish_reason"]) == (text, "stop")


def test_one_call_at_most_where_the_client_wants_no_parallel_ones() -> None:
    with serving(ANSWERS["hermes"]) as live:
        message = ask(live, parallel_tool_calls=False)["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
        streamed = accumulated(stream(live, parallel_tool_calls=False))
        assert [call["name"] for call in streamed["tool_calls"]] == ["look"]


def test_choice_none_keeps_tools_from_the_model_and_leaves_its_text_alone() -> None:
    with serving(ANSWERS["hermes"]) as live:
        (choice,) = ask(live, tool_choice="none")["choices"]
        assert choice["message"]["content"] == ANSWERS["hermes"]
        assert choice["finish_reason"] == "stop"
        assert live._model.codec.seen[-1][1] == {}
        assert live.engine.added[-1][2].structured_outputs is None


@pytest.mark.parametrize(
    ("choice", "num_calls"),
    [("required", 2), ({"type": "function", "function": {"name": "add"}}, 1)],
)
def test_forced_calls_go_to_the_engine_as_a_grammar(choice: Any, num_calls: int) -> None:
    with serving(ANSWERS["hermes"]) as live:
        ask(live, tool_choice=choice)
        wanted = live.engine.added[-1][2].structured_outputs
        assert wanted is not None
        assert wanted.grammar is not None
        assert len(re.findall(r"%json", wanted.grammar)) == num_calls
        ask(live)
        assert live.engine.added[-1][2].structured_outputs is None


def test_arguments_are_as_open_as_the_server_and_the_request_say() -> None:
    """Issue 25, point 15. The grammar of calls is made here; what it says of open objects follows from
    neither of its schemas."""
    for is_open in (False, True):
        with serving(ANSWERS["hermes"], config=ServerConfig(json_open_objects=is_open)) as live:
            for options in ({}, {"json_object": True, "open_objects": not is_open}):
                ask(live, tools=[tool("look", strict=True)], structured_outputs=options or None)
                wanted = live.engine.added[-1][2].structured_outputs
                assert wanted is not None
                assert wanted.grammar is not None
                assert wanted.open_objects is (is_open if not options else not is_open)


def test_strict_tools_bind_their_own_calls_only() -> None:
    with serving(ANSWERS["hermes"]) as live:
        ask(live, tools=[tool("look", strict=True), tool("add")])
        wanted = live.engine.added[-1][2].structured_outputs
        assert wanted is not None
        assert wanted.grammar is not None
        first, second = re.findall(r"%json (.*)", wanted.grammar)
        assert json.loads(first)["required"] == ["city"]
        assert set(json.loads(second)) == {"type", "x-guidance"}
        assert "strict" not in str(live._model.codec.seen[-1][1])


def test_markers_that_are_special_tokens_stay_in_the_text_that_is_read() -> None:
    syntax = syntax_of("mistral", "qwen3")
    syntax = ModelSyntax(tools=syntax.tools, template_knows_tools=True, marker_ids={"[TOOL_CALLS]": 5})
    with LiveServer(model=fake_model(syntax=syntax)) as live:
        ask(live)
        assert live.engine.added[-1][2].shown_special_tokens == ["[TOOL_CALLS]"]
        ask(live, tool_choice="none")
        assert live.engine.added[-1][2].shown_special_tokens == []


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    limits = Limits(max_tools=5, max_tool_bytes=900, max_template_kwargs=3)
    with LiveServer(model=fake_model(syntax=syntax_of("hermes")), limits=limits) as server:
        yield server


NAMED = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "look"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("look"), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("é")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("x\n")]}, "tools[0].function.name"),
        ({"tools": [tool("x", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("x", parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("x", parameters={"type": ["object"]})]}, "tools[0].function.parameters"),
        ({"tools": [tool("x"), tool("x")]}, "tools"),
        ({"tools": [tool(f"x{i}") for i in range(6)]}, "tools"),
        ({"tools": [tool("x", description="y" * 1000)]}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": {"name": "x"}}, "function_call"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs[...]"),
        ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(4)}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "x"}}]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "messages[0].function_call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 7}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages[0].tool_call_id"),
    ],
)
def test_wrong_fields_are_named(narrow: LiveServer, fields: dict[str, Any], param: str) -> None:
    status, answer = narrow.post(CHAT, {"messages": USER, "tools": TOOLS} | fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert narrow.engine.added == []


def test_deprecated_functions_are_refused_with_what_to_use(live: LiveServer) -> None:
    for field, remedy in (("functions", "use tools."), ("function_call", "use tool_choice.")):
        _, answer = live.post(CHAT, {"messages": USER, field: [{"name": "x"}]})
        assert remedy in answer["error"]["message"]


@pytest.mark.parametrize(
    ("syntax", "fields", "word"),
    [
        (ModelSyntax(), {}, "--tool-parser json"),
        (ModelSyntax(tools=syntax_of("hermes").tools), {}, "does not support tools"),
        (ModelSyntax(template_knows_tools=True), {}, "tool-call format"),
        (
            ModelSyntax(template_knows_tools=True, is_tool_parser_off=True),
            {"tool_choice": "required"},
            "tool-call format",
        ),
    ],
)
def test_a_model_that_cannot_call_tools_says_so(
    syntax: ModelSyntax, fields: dict[str, Any], word: str
) -> None:
    with LiveServer(model=fake_model(syntax=syntax)) as live:
        status, answer = live.post(CHAT, {"messages": USER, "tools": TOOLS} | fields)
        assert status == 400
        assert word in answer["error"]["message"]
        assert answer["error"]["code"] == "unsupported_parameter"
        ask(live, tool_choice="none")  # asks for nothing


def test_without_a_parser_the_model_is_told_of_tools_and_its_text_is_content() -> None:
    syntax = ModelSyntax(template_knows_tools=True, is_tool_parser_off=True)
    codec = SeenCodec()
    with LiveServer(FakeEngine(script="<tool_call>{}"), model=fake_model(syntax=syntax, codec=codec)) as live:
        assert ask(live)["choices"][0]["message"] == {"role": "assistant", "content": "<tool_call>{}"}
        assert len(codec.seen[-1][1]["tools"]) == 2


def test_a_template_that_knows_no_tools_is_told_in_plain_text_if_the_parser_is_json() -> None:
    json_form, codec = syntax_of("json").tools, SeenCodec()
    model = fake_model(syntax=ModelSyntax(tools=json_form), codec=codec)
    called = {"id": "c1", "function": {"name": "look", "arguments": ROME}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    with LiveServer(FakeEngine(script=ANSWERS["json"]), model=model) as live:
        assert len(ask(live, messages=messages)["choices"][0]["message"]["tool_calls"]) == 2
        (system, user, assistant, results), options = codec.seen[-1]
        assert options == {}
        assert system["content"].startswith("Be brief.\n\nYou can call these functions:\n")
        assert '{"name":"look","parameters":' in system["content"]
        assert user == {"role": "user", "content": "hi"}
        assert assistant == {"role": "assistant", "content": f'{{"name": "look", "arguments": {ROME}}}'}
        assert results == {"role": "user", "content": "Result of look:\nsun\n\nResult of the call:\nrain"}
        ask(live, messages=[*USER, *USER], tools=None)
        assert codec.seen[-1][0] == [*USER, *USER]
    with LiveServer(model=fake_model(syntax=ModelSyntax())) as live:
        status, answer = live.post(CHAT, {"messages": messages})
        assert (status, answer["error"]["param"]) == (400, "messages[2].tool_calls")


def test_messages_reach_the_template_complete() -> None:
    codec = SeenCodec()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ROME}}
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "x", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning_content": "hm",
            "refusal": None,
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    with LiveServer(model=fake_model(codec=codec)) as live:
        ask(live, messages=sent)
    assert codec.seen[-1][0] == [
        {"role": "developer", "content": "a\nb"},
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]


def test_text_in_calls_and_tools_counts_towards_the_prompts_bound() -> None:
    call = {"function": {"name": "look", "arguments": "x" * 200}}
    long = {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": None}
    with LiveServer(limits=Limits(max_prompt_bytes=150)) as live:
        for fields in (
            long,
            {"tools": [tool("x", description="y" * 200)]},
            {"messages": [{"role": "assistant", "reasoning_content": "z" * 200}]},
        ):
            status, answer = live.post(CHAT, {"messages": USER} | fields)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_options_reach_the_template_and_those_without_effect_are_named() -> None:
    with serving("ok") as live:
        body = {
            "messages": [*USER, {"role": "assistant", "content": "So"}],
            "reasoning_effort": "low",
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False, "date": "x", "style": None},
        }
        response, _ = live.request("POST", CHAT, body)
        warning = response.getheader("x-penstock-warning")
        assert (
            warning == "without effect on this model: chat_template_kwargs.date, chat_template_kwargs.style"
        )
        assert live._model.codec.seen[-1][1] == {
            "reasoning_effort": "low",
            "enable_thinking": False,
            "continue_final_message": True,
        }
        ask(live, add_generation_prompt=False, tools=None)
        assert live._model.codec.seen[-1][1] == {"add_generation_prompt": False}
    with LiveServer(model=fake_model(syntax=ModelSyntax())) as live:
        response, _ = live.request("POST", CHAT, {"messages": USER, "reasoning_effort": "low", "top_q": 1})
        assert response.getheader("x-penstock-warning") == (
            "ignored unknown field(s): top_q; without effect on this model: reasoning_effort"
        )


THOUGHT = "<think>\nHm, 1 < 2.\n</think>\n\nYes."


def test_reasoning_is_split_from_content_whole_and_streamed() -> None:
    with serving(THOUGHT, reasoning="qwen3") as live:
        answer = ask(live, tools=None)
        assert answer["choices"][0]["message"] == {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "Hm, 1 < 2.",
        }
        streamed = accumulated(stream(live, tools=None))
        assert (streamed["reasoning_content"], streamed["content"]) == ("Hm, 1 < 2.", "Yes.")
        assert streamed["finish_reason"] == "stop"
        quiet = ask(live, tools=None, include_reasoning=False)
        assert quiet["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
        cut = ask(live, tools=None, max_tokens=15)["choices"][0]
        assert cut["message"]["reasoning_content"] == "Hm, 1 <"
        assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")


def test_reasoning_that_the_prompt_has_opened() -> None:
    with serving("Hm.\n</think>\n\nYes.", reasoning="qwen3", codec=SeenCodec(" <think>\n")) as live:
        message = ask(live, tools=None)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        continued = [*USER, {"role": "assistant", "content": "<think>a"}]
        message = ask(live, tools=None, messages=continued, continue_final_message=True)["choices"][0][
            "message"
        ]
        assert message["reasoning_content"] == "Hm."
        continued = [*USER, {"role": "assistant", "content": "<think>a</think>b"}]
        message = ask(live, tools=None, messages=continued, continue_final_message=True)["choices"][0][
            "message"
        ]
        assert message["content"] == "Hm.\n</think>\n\nYes."
    with serving("Hm.", reasoning="deepseek_r1") as live:
        assert ask(live, tools=None)["choices"][0]["message"]["reasoning_content"] == "Hm."
    with serving("Hm.", reasoning="deepseek_r1", codec=SeenCodec("<think></think>\n")) as live:
        assert ask(live, tools=None)["choices"][0]["message"]["content"] == "Hm."


def test_reasoning_then_calls_and_stop_strings_over_all_of_the_text() -> None:
    text = (
        f'<think>I <tool_call> it.</think>\n\n<tool_call>{{"name": "look", "arguments": {ROME}}}</tool_call>'
    )
    with serving(text, reasoning="qwen3") as live:
        message = ask(live)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("I <tool_call> it.", None)
        assert message["tool_calls"][0]["function"]["arguments"] == ROME
        stopped = ask(live, stop=["it."])["choices"][0]
        assert stopped["message"]["reasoning_content"] == "I <tool_call> "
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "it.")


def test_reasoning_tokens_are_counted_where_one_token_ends_the_reasoning() -> None:
    syntax = syntax_of("hermes", "qwen3")
    end = ord("!")  # in place of the marker's own token
    model = fake_model(syntax=ModelSyntax(reasoning=syntax.reasoning, marker_ids={"</think>": end}))
    for script, fields, counted in (
        ("<think>abc!</think>yes!", {}, "<think>abc!"),
        ("<think>abc!</think>yes!", {"max_tokens": 9}, "<think>ab"),
        ("yes!", {}, ""),
    ):
        with LiveServer(FakeEngine(script=script), model=model) as live:
            usage = ask(live, tools=None, **fields)["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": len(counted)}
            *_, last, _done = stream(live, tools=None, stream_options={"include_usage": True}, **fields)
            assert last["usage"] == usage
    with serving(THOUGHT, reasoning="qwen3") as live:
        assert "completion_tokens_details" not in ask(live, tools=None)["usage"]


@pytest.mark.parametrize("text", [ANSWERS["hermes"], THOUGHT + ANSWERS["hermes"]])
def test_every_tokens_logprob_and_id_is_in_one_chunk(text: str) -> None:
    fields = {"logprobs": True, "return_token_ids": True}
    with serving(text, reasoning="qwen3") as live:
        whole = ask(live, **fields)["choices"][0]
        choices = [chunk["choices"][0] for chunk in stream(live, **fields)[:-1]]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert entries == whole["logprobs"]["content"]
    assert len(entries) == len(whole["token_ids"]) == len(text) + 1


def test_the_document_names_tools_and_their_bounds(live: LiveServer) -> None:
    schemas = json.loads(live.request("GET", "/openapi.json")[1])["components"]["schemas"]
    (tools, _null) = schemas["ChatRequest"]["properties"]["tools"]["anyOf"]
    assert tools["maxItems"] == Limits().max_tools
    assert schemas["Function"]["properties"]["name"]["pattern"] == "^[A-Za-z0-9_-]{1,64}$"
    assert {"tool_calls", "reasoning_content"} <= set(schemas["AssistantMessage"]["properties"])


CITY = {"type": "json_schema", "json_schema": {"name": "c", "schema": PARAMETERS}}


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_a_bound_answer_comes_behind_the_reasoning(reasoning: str) -> None:
    """Else the model could never end it, and all of the answer would be reasoning."""
    model = fake_model(
        syntax=syntax_of("hermes", reasoning), codec=SeenCodec("<think>\n"), grammar_model=DEMO
    )
    answer = f"So.</think>\n{ROME}"
    with LiveServer(FakeEngine(script=answer), model=model) as live:
        for format_ in (CITY, {"type": "json_object"}):
            message = ask(live, tools=None, response_format=format_)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("So.", ROME)
            bound = live.engine.added[-1][2].structured_outputs
            assert bound is not None
            start, thought, answer_rule = (bound.grammar or "").strip().split("\n")
            assert start.startswith("start: (thought")
            assert "think" in thought
            assert answer_rule.startswith("answer: %json")
        status, refused = live.post(CHAT, {"messages": USER, "structured_outputs": {"regex": "a+"}})
        assert (status, refused["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json", "json"])
def test_d12_tools_that_may_be_called_and_an_answer_that_is_bound(form: str) -> None:
    with serving(ANSWERS[form], tools=form) as live:
        for tools in (TOOLS, [tool("look", strict=True)]):
            assert ask(live, tools=tools, response_format=CITY)["choices"][0]["message"]["tool_calls"]
            bound = live.engine.added[-1][2].structured_outputs
            assert bound is not None
            start, text, *_ = (bound.grammar or "").split("\n")
            assert start.startswith("start: ")
            assert start.endswith(" | text")
            assert json.loads(text.removeprefix("text: %json "))["required"] == ["city"]
    with serving(ROME, tools=form) as live:
        (choice,) = ask(live, response_format={"type": "json_object"})["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", ROME)
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": 7}}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": {"uniqueItems": True, "type": "array"}}}, "structured_outputs"),
    ],
)
def test_what_cannot_stand_in_place_of_calls_is_refused(fields: dict[str, Any], param: str) -> None:
    with serving(ANSWERS["hermes"]) as live:
        status, answer = live.post(CHAT, {"messages": USER, "tools": TOOLS} | fields)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert live.engine.added == []


def test_a_bound_answer_is_refused_with_tools_whose_calls_nobody_looks_for() -> None:
    syntax = ModelSyntax(is_tool_parser_off=True, template_knows_tools=True)
    with LiveServer(model=fake_model(syntax=syntax, codec=SeenCodec(), grammar_model=DEMO)) as live:
        status, answer = live.post(CHAT, {"messages": USER, "tools": TOOLS, "response_format": CITY})
        assert (status, answer["error"]["param"]) == (400, "response_format")


def test_an_answer_is_bound_alone_where_tools_are_not_asked_or_must_be_called() -> None:
    with serving(ANSWERS["hermes"]) as live:
        for choice, field in (("none", "json"), ("required", "grammar")):  # only calls: there is no text
            ask(live, response_format=CITY, tool_choice=choice)
            assert getattr(live.engine.added[-1][2].structured_outputs, field) is not None


def test_schemas_of_tools_that_bind_are_within_the_bounds_of_schemas() -> None:
    many = {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**9}}}
    ignored = {"type": "object", "properties": {"a": {"type": "array", "additionalItems": False}}}
    with serving(ANSWERS["hermes"]) as live:
        for parameters in (many, ignored):
            tools = [tool("look"), tool("add", parameters=parameters, strict=True)]
            status, answer = live.post(CHAT, {"messages": USER, "tools": tools})
            assert (status, answer["error"]["param"]) == (400, "tools[1].function.parameters"), answer
            tools[1]["function"]["strict"] = False
            ask(live, tools=tools)


def test_r8_schemas_of_tools_are_as_long_as_tools_may_be_and_no_longer() -> None:
    """`max_schema_bytes` is of one schema, expression or grammar that a client gives as such."""
    text = "of a city, wherever it is. " * 40
    parameters = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": text} for i in range(90)},
        "additionalProperties": False,
    }
    limits = Limits(max_tool_bytes=250_000, max_prompt_bytes=1 << 20)
    config = ServerConfig(limits=limits, grammars=GrammarLimits(max_schema_bytes=2000))
    tools = [tool("look", parameters=parameters, strict=True), tool("add", parameters=parameters)]
    size = len(json.dumps(tools))
    assert 200_000 < size < 250_000
    with serving(ANSWERS["hermes"], config=config) as live:
        for fields in ({}, {"tool_choice": "required"}, {"response_format": CITY}):
            ask(live, tools=tools, **fields)
            bound = live.engine.added[-1][2].structured_outputs
            assert bound is not None
            assert len(bound.grammar or "") > 100_000
        longer = [*tools, tool("more", parameters=parameters)]
        status, answer = live.post(CHAT, {"messages": USER, "tools": longer})
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "--max-tool-bytes" in answer["error"]["message"]
        format_ = {"type": "json_schema", "json_schema": {"name": "c", "schema": parameters}}
        status, answer = live.post(CHAT, {"messages": USER, "tools": TOOLS, "response_format": format_})
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert "--max-schema-bytes" in answer["error"]["message"]


def test_the_grammar_of_large_tools_is_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noted_grammar(*arguments: Any, **options: Any) -> str | None:
        threads.append(threading.current_thread().name)
        return grammar_of(*arguments, **options)

    monkeypatch.setattr(chat_reader, "grammar_of", noted_grammar)
    large = PARAMETERS | {"description": "d" * (17 << 10)}
    with serving(ANSWERS["hermes"]) as live:
        ask(live, tools=[tool("look", parameters=large)], tool_choice="required")
        ask(live, tool_choice="required")
    assert [name.startswith("text") for name in threads] == [True, False]


def test_r8_a_schema_behind_reasoning_is_as_long_as_one_without() -> None:
    """The grammar that is made of it is longer than the schema."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
    size = len(json.dumps(schema, separators=(",", ":")))
    config = ServerConfig(grammars=GrammarLimits(max_schema_bytes=size))
    with serving("</think>{}", reasoning="qwen3", config=config) as live:
        format_ = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
        ask(live, tools=None, response_format=format_)
        bound = live.engine.added[-1][2].structured_outputs
        assert bound is not None
        assert len(bound.grammar or "") > size


def test_arguments_of_former_calls_may_be_nested_as_deep_as_they_like() -> None:
    deep = '{"a":' + "[" * 700 + "]" * 700 + "}"
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": deep}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    with serving(ANSWERS["hermes"]) as live:
        status, answer = live.post(CHAT, {"messages": messages, "tools": TOOLS})
        assert status == 200, answer


def test_a_broken_call_that_hides_another_is_no_reason_to_call() -> None:
    answer = '<tool_call>\n{"name": "look", "arguments": {bad}}\n</tool_call>\n' + ANSWERS["hermes"][7:]
    with serving(answer) as live:
        (choice,) = ask(live, parallel_tool_calls=False)["choices"]
        assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("stop", None)
