"""The pages of the docs name every parameter, where its request is described, and each limit as it is."""

from __future__ import annotations

from typing import get_args

import pytest

from pages import page, rows, section, told_of, words, written
from paths import REPOSITORY
from penstock.config.declared import declared
from penstock.config.engine import SchedulerConfig
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits
from penstock.server.anthropic import messages_types
from penstock.server.anthropic.messages_types import MessagesRequest
from penstock.server.anthropic.turns import BLOCKS
from penstock.server.http.limits import ByteLimits
from penstock.server.openai import openai_types, responses_types
from penstock.server.openai.fields import NEUTRAL_VALUES
from penstock.server.openai.openai_types import ChatRequest, CompletionRequest, EmbeddingRequest, Function
from penstock.server.routes.text_routes import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from penstock.tokenizer.form_table import REASONING_FORMATS, TOOL_FORMATS

LIMITS = declared(Limits, GrammarLimits, ConnectionLimits)
KEYS = {limit.name: limit.key for limit in LIMITS}
DEFAULTS = {limit.key: limit.default for limit in LIMITS} | {"max-sessions": SchedulerConfig().max_sessions}
PAGES = sorted(path.stem for path in (REPOSITORY / "docs").glob("*.md"))


def sections(name: str, *titles: str) -> str:
    return "\n".join(section(name, title) for title in titles)


@pytest.mark.parametrize(
    ("of", "where"),
    [
        (CompletionRequest, ("api", "All three", "Completions")),
        (ChatRequest, ("api", "All three", "Chat")),
        (Function, ("api", "Tools")),
        (EmbeddingRequest, ("embeddings", "Embeddings")),
        (TokenizeTextRequest, ("endpoints", "Text and ids")),
        (TokenizeChatRequest, ("endpoints", "Text and ids")),
    ],
)
def test_every_parameter_has_a_row(of: type, where: tuple[str, ...]) -> None:
    assert set(of.__struct_fields__) - rows(sections(*where)).keys() == set()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("of", "where"),
    [
        (openai_types.StreamOptions, ("api", "All three")),
        (openai_types.StructuredOutputFields, ("api", "All three")),
        (openai_types.StructuredOutputFields, ("structured-output", "Asking for it")),
        (openai_types.ResponseFormat, ("structured-output", "Asking for it")),
        (openai_types.ChatMessage, ("api", "Messages", "Refused")),
        (openai_types.ContentPart, ("api", "Messages")),
        (openai_types.ToolCall, ("api", "Messages")),
        (openai_types.FunctionCall, ("api", "Messages")),
        (openai_types.Tool, ("api", "Tools")),
        (openai_types.NamedTool, ("api", "Chat")),
        (openai_types.RenderedPrompt, ("endpoints", "Text and ids")),
        (openai_types.ModelCard, ("endpoints", "Models, health and metrics")),
        (responses_types.ResponsesRequest, ("api", "All three", "Responses")),
        (responses_types.InputItem, ("api", "Responses")),
        (responses_types.InputPart, ("api", "Responses")),
        (responses_types.FunctionTool, ("api", "Responses")),
        (responses_types.NamedChoice, ("api", "Responses")),
        (responses_types.TextOptions, ("api", "Responses")),
        (responses_types.ReasoningOptions, ("api", "Responses")),
        (responses_types.ResponsesStreamOptions, ("api", "Responses")),
        (DetokenizeRequest, ("endpoints", "Text and ids")),
        (DetokenizeResponse, ("endpoints", "Text and ids")),
        (TokenizeResponse, ("endpoints", "Text and ids")),
    ],
)
def test_every_field_of_a_nested_type_or_an_answer_is_named_where_it_belongs(
    of: type, where: tuple[str, ...]
) -> None:
    assert set(of.__struct_fields__) - words(sections(*where)) == set()  # type: ignore[attr-defined]


def test_every_field_of_the_messages_api_is_on_the_page_of_clients() -> None:
    described = section("clients", "The Messages API")
    named = rows(described).keys() | rows(section("api", "All three")).keys()
    assert set(MessagesRequest.__struct_fields__) - named == set()
    assert set(BLOCKS) - rows(described).keys() == set()
    for of in (
        messages_types.ContentBlock,
        messages_types.InputMessage,
        messages_types.ToolParam,
        messages_types.ToolChoice,
        messages_types.Thinking,
        messages_types.OutputConfig,
        messages_types.OutputFormat,
        messages_types.TokenCount,
    ):
        assert set(of.__struct_fields__) - words(described) == set()
    assert set(get_args(messages_types.StopReason)) - words(described) == set()
    assert (
        set(responses_types.CustomFormat.__struct_fields__) - words(section("clients", "Custom tools"))
        == set()
    )


def test_everything_that_is_refused_is_on_the_page() -> None:
    assert set(NEUTRAL_VALUES) - words(section("api")) == set()


def test_every_form_of_calls_and_of_reasoning_has_a_row() -> None:
    assert {form.name for form in TOOL_FORMATS} <= rows(section("api", "Tools")).keys()
    assert {form.name for form in REASONING_FORMATS} <= rows(section("api", "Reasoning")).keys()


@pytest.mark.parametrize(("limits", "name"), [(Limits(), "api"), (GrammarLimits(), "structured-output")])
def test_every_limit_of_a_request_is_on_its_page_with_its_flag(
    limits: Limits | GrammarLimits, name: str
) -> None:
    for field in limits.__struct_fields__:
        flag, value = KEYS[field], getattr(limits, field)
        assert DEFAULTS[flag] == value
        assert f"`--{flag}`" in page(name)
        assert value is None or told_of(flag, page(name)), flag


@pytest.mark.parametrize("name", PAGES)
def test_every_number_beside_the_flag_of_a_limit_is_its_default(name: str) -> None:
    for flag, value in DEFAULTS.items():
        assert value is None or set(told_of(flag, page(name))) <= written(value), flag


def test_limits_that_follow_from_the_context_are_told_as_they_are() -> None:
    fixed, more = (ByteLimits.resolve(Limits(), length) for length in (0, 1))
    body = f"{fixed.max_body >> 20} MiB + {more.max_body - fixed.max_body} bytes a token"
    assert f"{body} of context (`--max-body-bytes`" in page("api")
    assert f"({more.max_prompt} bytes a token, `--max-prompt-bytes`)" in page("api")
    assert (fixed.max_body % (1 << 20), fixed.max_prompt) == (0, 0)


def test_numbers_are_found_wherever_they_may_stand() -> None:
    text = "1 to 1,024 ids (`--a` ≤), `--b` (86,400) and 2 KiB as JSON (`--c`) | `--d` | 64 MiB |"
    assert [told_of(flag, text) for flag in "abcde"] == [["1,024"], ["86,400"], ["2 KiB"], ["64 MiB"], []]
    assert written(1024) == {"1,024", "1 KiB"}
    assert written(60.0) == {"60"}
    assert written(64 << 20) == {"67,108,864", "64 MiB"}
    assert written(300_000) == {"300,000"}
