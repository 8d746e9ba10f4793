"""Custom and hosted tools of `/v1/responses`: what the model is told, what binds it, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fake_engine import DEMO, FakeEngine, SeenCodec, fake_model, syntax_of
from live_server import LiveServer
from penstock.grammar.matcher import Matcher, load_vocabulary
from penstock.request import StructuredOutputs
from penstock.server.openai.custom_tools import input_of
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.tokenizer import load_tokenizer

PATH = "/v1/responses"
LARK = 'start: line+\nline: "+" /.+/ LF\n%import common.LF'
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
FREE = {"type": "custom", "name": "say"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
TEXT = '+print("é")\n+\\t\n'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WRITTEN = call("patch", json.dumps({"input": TEXT}, ensure_ascii=False))


def serving(answer: str, tools: str = "hermes", **changes: Any) -> LiveServer:
    values = {"syntax": syntax_of(tools), "grammar_model": DEMO, "codec": SeenCodec()} | changes
    return LiveServer(FakeEngine(script=answer), model=fake_model(**values))


def stream(live: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    _, raw = live.request("POST", PATH, {"input": "hi", "stream": True} | fields)
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_call_of_a_custom_tool_is_an_item_whole_and_streamed() -> None:
    with serving("Well." + WRITTEN + call("look", "{}")) as live:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            answer = client.responses.create(model="fake", input="hi", tools=[PATCH, LOOK])  # type: ignore[list-item]
        got = stream(live, tools=[PATCH, LOOK])
    _, custom, function = answer.output
    assert custom.type == "custom_tool_call"
    assert (custom.name, custom.input, custom.call_id[:5]) == ("patch", TEXT, "call_")
    assert function.type == "function_call"
    added, *between, done = [event for event in got if event.get("output_index") == 1]
    assert added["item"] == done["item"] | {"status": "in_progress", "input": ""}
    assert (done["item"]["input"], done["item"]["status"], done["item"]["id"][:4]) == (
        TEXT,
        "completed",
        "ctc_",
    )
    assert [(event["type"], event["item_id"]) for event in between] == [
        ("response.custom_tool_call_input.delta", done["item"]["id"]),
        ("response.custom_tool_call_input.done", done["item"]["id"]),
    ]
    assert between[0]["delta"] == between[1]["input"] == TEXT
    assert got[-1]["response"]["output"][1] == done["item"]


def test_a_custom_call_that_breaks_off_is_incomplete() -> None:
    with serving(WRITTEN[: WRITTEN.index("print")]) as live:
        _, answer = live.post(PATH, {"input": "hi", "tools": [FREE, PATCH]})
        got = stream(live, tools=[FREE, PATCH])
    (item,) = answer["output"]
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", '{"input": "+')
    assert got[-1]["response"]["output"][0]["input"] == item["input"]


def test_the_model_is_told_of_a_function_with_one_text() -> None:
    with serving("") as live:
        history = [
            {"role": "user", "content": "a"},
            {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": TEXT},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        ]
        status, answer = live.post(PATH, {"input": history, "tools": [PATCH, FREE]})
        codec = live._model.codec
    assert status == 200, answer
    assert answer["tools"][0]["format"] == PATCH["format"]
    messages, options = codec.seen[0]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": TEXT}}
    assert messages[2] == {"role": "tool", "content": "done", "tool_call_id": "1"}
    told, free = (tool["function"] for tool in options["tools"])
    assert told["parameters"]["properties"] == {"input": {"type": "string"}}
    assert told["description"].startswith("Patches.\n\nThe argument input is free text")
    assert told["description"].endswith(LARK)
    assert free["description"] == "The argument input is free text, and not JSON."


def fits(structured: StructuredOutputs, text: str) -> bool:
    tokens = load_tokenizer(DEMO.directory).encode(text, add_special_tokens=False)
    matcher = Matcher(load_vocabulary(DEMO.directory, DEMO.eos_token_ids), structured)
    return matcher.num_allowed([*tokens, DEMO.eos_token_ids[0]]) == len(tokens) + 1


REGEX = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": r"(\+[^\n]+\n)+"}}
NAMED = {"type": "custom", "name": "patch"}


@pytest.mark.parametrize(
    ("tool", "choice"), [(PATCH, "auto"), (PATCH, "required"), (PATCH, NAMED), (REGEX, "auto")]
)
def test_a_grammar_binds_the_text_of_a_call(tool: dict[str, Any], choice: Any) -> None:
    with serving(WRITTEN) as live:
        status, answer = live.post(PATH, {"input": "hi", "tools": [LOOK, tool], "tool_choice": choice})
        assert status == 200, answer
        structured = live.engine.added[0][2].structured_outputs
    assert structured is not None
    assert fits(structured, WRITTEN)
    assert not fits(structured, WRITTEN.replace("+print", "print"))
    assert not fits(structured, WRITTEN.replace('\\n"}', '"}'))
    assert fits(structured, "Only words.") == (choice == "auto")
    assert fits(structured, call("look", "{}")) == isinstance(choice, str)


def test_a_grammar_that_a_model_cannot_be_bound_by_is_named_in_the_header() -> None:
    off = ModelSyntax(is_tool_parser_off=True, template_knows_tools=True)
    with serving("", syntax=off) as live:
        response, _ = live.request("POST", PATH, {"input": "hi", "tools": [{"type": "mcp"}, PATCH]})
    assert response.status == 200
    assert response.getheader("x-penstock-warning") == (
        "without effect on this model: tools[1].format; "
        "skipped tool(s) that this server does not run: tools[0]:mcp"
    )


def test_hosted_tools_are_skipped_and_said_so() -> None:
    hosted = ["web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"]
    with serving("") as live:
        tools = [*({"type": kind} for kind in hosted), LOOK]
        response, raw = live.request("POST", PATH, {"input": "hi", "tools": tools})
        assert [tool["function"]["name"] for tool in live._model.codec.seen[0][1]["tools"]] == ["look"]
    assert [tool["type"] for tool in json.loads(raw)["tools"]] == ["function"]
    said = ", ".join(f"tools[{index}]:{kind}" for index, kind in enumerate(hosted))
    assert (
        response.getheader("x-penstock-warning") == f"skipped tool(s) that this server does not run: {said}"
    )


@pytest.fixture(scope="module")
def model() -> Iterator[LiveServer]:
    with serving("", max_model_len=8192) as live:  # room for a text that is longer than a grammar may be
        yield live


def formatted(**fields: Any) -> list[Any]:
    return [LOOK, PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": LARK} | fields}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": formatted(syntax=None)}, "tools[1].format.syntax"),
        ({"tools": formatted(definition=None)}, "tools[1].format.definition"),
        ({"tools": formatted(syntax="bnf")}, "tools[1].format.syntax"),
        ({"tools": formatted(definition="start: nowhere")}, "tools[1].format"),
        ({"tools": formatted(definition='start: %json {"type": "object"}')}, "tools[1].format"),
        ({"tools": formatted(definition="start: /a/" + " " * 70_000)}, "tools[1].format"),
        ({"tools": formatted(definition="start: /a/ | start /./")}, "tools[1].format"),
        ({"tools": formatted(syntax="regex", definition="(")}, "tools[1].format"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [PATCH, LOOK | {"name": "patch"}]}, "tools"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "a"}]}, "input[0].input"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_what_is_wrong_with_custom_tools_is_named(
    model: LiveServer, fields: dict[str, Any], param: str
) -> None:
    status, answer = model.post(PATH, {"input": "hi"} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "a"}', "a"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": "a', '{"input": "a'),
        ("[1]", "[1]"),
    ],
)
def test_the_text_is_found_in_what_the_model_writes(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
