"""Published chat templates: rendered as transformers does, and the calls that they show are read back."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jinja2
import pytest
from transformers.utils import chat_template_utils

from paths import shared_data
from penstock.errors import InvalidRequestError
from penstock.tokenizer.call_writer import written_calls, written_tools
from penstock.tokenizer.chat_template import JinjaChatTemplate
from penstock.tokenizer.model_syntax import ModelSyntax, model_syntax
from penstock.tokenizer.reasoning import reasoning_splitter
from penstock.tokenizer.tokenizer import load_tokenizer
from penstock.tokenizer.tool_calls import ToolCallParser

# How each model calls tools and thinks. None: it does not, as far as its template shows.
FORMS: dict[str, tuple[str | None, str | None]] = {
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "GigaChat3-10B-A1.8B": ("gigachat", None),
    "HuggingFaceTB-SmolLM3-3B": (None, "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
    "LFM2-8B-A1B": ("lfm2", None),
    "MiMo-VL": ("hermes", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_args", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "qwen3"),
    "llama-cpp-rwkv-world": (None, "qwen3"),
    "meetkai-functionary-medium-v3.1": ("functionary_v3", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_args", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "stepfun-ai-Step-3.5-Flash": ("qwen3_coder", "qwen3"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_args", None),
}
CALLERS = [name for name, (tools, _) in FORMS.items() if tools is not None]

SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "", "pad_token": ""}
TODAY = datetime.datetime(2026, 11, 28, 12, 30)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks <up>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "zip": {"type": "string", "description": "code"},
                    "days": {"type": "integer", "description": "how long"},
                    "deep": {
                        "type": "object",
                        "description": "more",
                        "additionalProperties": {"type": "integer"},
                    },
                    "flags": {"type": "array", "description": "some", "items": {"type": "string"}},
                    "on": {"type": "boolean", "description": "whether"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
ARGUMENTS = {
    "city": 'Zürich "x"\n<b> {1: 2}',
    "zip": "00501",
    "days": 3,
    "deep": {"a": 1},
    "flags": ["p", "it's"],
    "on": True,
}
USER = {"role": "user", "content": "How is it é <b>?"}
IDS = ("a1b2c3d4e", "f1b2c3d4e")

Turn = tuple[list[dict[str, Any]], dict[str, Any]]


@cache
def template(name: str) -> JinjaChatTemplate:
    source = shared_data("templates", f"{name}.jinja").read_text()
    tokenizer = load_tokenizer(shared_data("models", "stories260K"))
    return JinjaChatTemplate(source, SPECIAL, tokenizer, clock=lambda: TODAY)


def syntax(name: str) -> ModelSyntax:
    return model_syntax(template(name), {})


def calling(name: str, content: str | None, *, num_calls: int = 1, **more: str) -> dict[str, Any]:
    """A message with calls, their arguments in the form that the template takes."""
    given = [("look", ARGUMENTS), ("now", {})][:num_calls]
    is_text = template(name).call_form.is_text
    calls = [
        {
            "id": id_,
            "type": "function",
            "function": {
                "name": tool,
                "arguments": json.dumps(arguments, ensure_ascii=False) if is_text else arguments,
            },
        }
        for id_, (tool, arguments) in zip(IDS, given, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def turns(name: str) -> Iterator[tuple[str, Turn]]:
    system, answer = {"role": "system", "content": " Be kind. "}, {"role": "assistant", "content": "Well."}
    result = {"role": "tool", "tool_call_id": IDS[0], "name": "look", "content": "sunny"}
    second = {"role": "tool", "tool_call_id": IDS[1], "name": "now", "content": "noon"}
    empty = template(name).call_form.content
    tools = {"tools": TOOLS}
    yield "plain", ([USER, answer, USER], {})
    yield "system", ([system, USER], {})
    yield "thinking", ([USER, answer | {"reasoning_content": "Hm."}, USER], {"enable_thinking": True})
    yield "not thinking", ([USER], {"enable_thinking": False})
    yield "tools", ([USER], tools)
    yield "tools, system", ([system, USER], tools)
    yield "call", ([USER, calling(name, empty), result], tools)
    yield "call, text", ([USER, calling(name, "I see."), result], tools)
    yield "call, thought", ([USER, calling(name, empty, reasoning_content="Hm."), result], tools)
    yield "calls", ([USER, calling(name, empty, num_calls=2), result, second], tools)
    yield "result", ([USER, calling(name, empty), result, answer, USER], tools)


WITH_CALLS = {"call", "call, text", "call, thought", "calls", "result"}
WITH_TOOLS = {"tools", "tools, system"} | WITH_CALLS
WITHOUT_TOOLS = {"plain", "system", "thinking", "not thinking"}
# What a template and a turn differ by from transformers, and why.
DIFFERENCES: dict[str, tuple[set[str], str]] = {
    "CohereForAI-c4ai-command-r-plus-tool_use": (
        WITHOUT_TOOLS | WITH_TOOLS,
        "Jinja2 cannot go through tools that are none, and `items` of a schema is to it a method",
    ),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": (WITHOUT_TOOLS, "the same"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": (WITHOUT_TOOLS, "the same"),
    "Kimi-K2-Instruct": (WITH_CALLS, "transformers forbids that a list is appended to"),
    "Kimi-K2-Thinking": (WITH_CALLS, "the same"),
    "llama-cpp-deepseek-r1": (WITH_TOOLS, "Jinja2 has no JSON of what map gives; tools are told"),
    "meetkai-functionary-medium-v3.1": (WITH_TOOLS, "Jinja2 escapes what is added to text that is safe"),
    "LFM2-8B-A1B": (WITH_CALLS, "the template leaves calls out, and we write them"),
    "ibm-granite-granite-3.3-2B-Instruct": (WITH_CALLS, "the same"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (
        WITH_TOOLS,
        "the template leaves tools out, and we tell them",
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (WITH_TOOLS, "the same"),
    "deepseek-ai-DeepSeek-V3.1": (WITH_TOOLS, "the same"),
}
REFUSED = "refused"


def by_transformers(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text; that of firefunction with what its template takes in place of tools."""
    options = {"tools": None, "add_generation_prompt": True} | options
    if name == "fireworks-ai-llama-3-firefunction-v2":
        functions = [tool["function"] for tool in options["tools"] or []]
        options |= {"functions": json.dumps(functions, indent=4), "datetime": "2026-11-28 12:30:00"}
    try:
        with patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: TODAY)):
            rendered, _ = chat_template_utils.render_jinja_template(
                [messages], chat_template=template(name).source, **options, **SPECIAL
            )
    except (jinja2.TemplateError, TypeError):
        return REFUSED
    return str(rendered[0])


def by_us(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return template(name).render(messages, **options)
    except InvalidRequestError:
        return REFUSED


def test_all_published_templates_are_tried() -> None:
    assert {path.stem for path in shared_data("templates").glob("*.jinja")} == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_templates_render_as_transformers_does(name: str) -> None:
    differing, _why = DIFFERENCES.get(name, (set(), ""))
    for turn, (messages, options) in turns(name):
        ours, theirs = by_us(name, messages, **options), by_transformers(name, messages, **options)
        assert (ours != theirs) == (turn in differing), turn
        if turn in differing:
            assert ours != REFUSED, turn


def test_what_a_template_leaves_out_is_told_in_the_models_form() -> None:
    for name in ("LFM2-8B-A1B", "ibm-granite-granite-3.3-2B-Instruct"):
        form = syntax(name).tools
        assert form is not None
        calls = written_calls(form, [("look", ARGUMENTS)])
        for turn, (messages, options) in turns(name):
            if turn in WITH_CALLS - {"calls"}:
                ours = by_us(name, messages, **options)
                assert ours.replace(calls, "") == by_transformers(name, messages, **options)
    form = syntax("deepseek-ai-DeepSeek-V3.1").tools
    assert form is not None
    for turn, (messages, options) in turns("deepseek-ai-DeepSeek-V3.1"):
        ours = by_us("deepseek-ai-DeepSeek-V3.1", messages, **options)
        assert (written_tools(form, TOOLS) in ours) == (turn in WITH_TOOLS)
    assert syntax("deepseek-ai-DeepSeek-V3.1").template_knows_tools


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_of_a_model_are_found_by_its_template(name: str) -> None:
    found = syntax(name)
    tools, reasoning = found.tools, found.reasoning
    assert (tools and tools.name, reasoning and reasoning.name) == FORMS[name]
    assert found.template_knows_tools == (tools is not None)


def answer_of(name: str, message: dict[str, Any]) -> str:
    """What the model has written, if the template shows this message; without the mark that ends a turn."""
    chat, sign = template(name), "I have said so."
    whole = chat.render([USER, message], add_generation_prompt=False, tools=TOOLS)
    prompt = chat.render([USER], tools=TOOLS)
    answer = {"role": "assistant", "content": sign}
    end = chat.render([USER, answer], add_generation_prompt=False, tools=TOOLS).rpartition(sign)[2]
    text = whole[len(prompt) :] if whole.startswith(prompt) else whole.rpartition(USER["content"])[2]
    return text.removesuffix(end) if end else text


def read(name: str, cut: Callable[[str], list[str]], text: str) -> tuple[str, list[tuple[str, Any, str]]]:
    """What our readers find: the content, and each call's name, arguments and id."""
    found = syntax(name)
    assert found.tools is not None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser = ToolCallParser(found.tools, frozenset(schemas), schemas)
    splitter = None if found.reasoning is None else reasoning_splitter(found.reasoning, is_open=False)
    pieces = []
    for chunk in cut(text):
        shown = [chunk] if splitter is None else said_in(splitter.feed(chunk))
        pieces += [piece for part in shown for piece in parser.feed(part)]
    for part in [] if splitter is None else said_in(splitter.finish()):
        pieces += parser.feed(part)
    content, calls = "", []
    for piece in [*pieces, *parser.finish()]:
        assert piece.kind != "broken", piece
        if piece.kind == "content":
            content += piece.text
        elif piece.kind == "call":
            calls.append([piece.text, "", piece.id])
        else:
            calls[-1][1] += piece.text
    return content, [(tool, json.loads(arguments), id_) for tool, arguments, id_ in calls]


def said_in(pieces: list[Any]) -> list[str]:
    return [piece.text for piece in pieces if piece.kind == "content"]


@pytest.mark.parametrize("name", CALLERS)
def test_the_calls_that_a_template_shows_are_read_back(name: str) -> None:
    """In one piece, in characters, and in any two."""
    for message, expected in (
        (calling(name, template(name).call_form.content), [("look", ARGUMENTS)]),
        (calling(name, "I see."), [("look", ARGUMENTS)]),
        (calling(name, template(name).call_form.content, num_calls=2), [("look", ARGUMENTS), ("now", {})]),
    ):
        try:
            text = answer_of(name, message)
        except InvalidRequestError:
            assert len(expected) == 2  # the family makes one call in an answer
            continue
        expected = [call for call in expected if call[0] in text]  # some show one call, or none beside text
        assert expected or message["content"]
        content, calls = read(name, lambda text: [text], text)
        assert [(tool, arguments) for tool, arguments, _ in calls] == expected, text
        assert "look" not in content.replace("I see.", ""), text
        assert read(name, list, text) == (content, calls)
        for at in range(1, len(text), max(1, len(text) // 16)):
            assert read(name, lambda text, at=at: [text[:at], text[at:]], text) == (content, calls)


def test_ids_that_a_model_gives_its_calls_are_kept() -> None:
    text = answer_of("moonshotai-Kimi-K2", calling("moonshotai-Kimi-K2", "", num_calls=2))
    _, calls = read("moonshotai-Kimi-K2", lambda text: [text], text)
    assert [id_ for _, _, id_ in calls] == ["functions.look:0", "functions.now:1"]
