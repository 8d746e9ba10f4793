"""The API page of the docs names every parameter, and each limit as it is."""

from __future__ import annotations

import re

import pytest

from paths import REPOSITORY
from penstock.config import Limits
from penstock.server.cli_limits import LimitSettings
from penstock.server.fields import NEUTRAL_VALUES
from penstock.server.openai_types import ChatMessage, ChatRequest, CompletionRequest, Function
from penstock.server.responses_types import FunctionTool, InputItem, ResponsesRequest, TextOptions
from penstock.tokenizer.tool_formats import REASONING_FORMATS, TOOL_FORMATS

PAGE = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
QUOTED = frozenset(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`[^`]*`", PAGE))))


@pytest.mark.parametrize(
    "of",
    [
        CompletionRequest,
        ChatRequest,
        ChatMessage,
        Function,
        ResponsesRequest,
        InputItem,
        FunctionTool,
        TextOptions,
    ],
)
def test_every_field_is_on_the_page(of: type) -> None:
    assert set(of.__struct_fields__) - QUOTED == set()  # type: ignore[attr-defined]


def test_everything_that_is_refused_is_on_the_page() -> None:
    assert set(NEUTRAL_VALUES) - QUOTED == set()


def test_every_form_of_calls_and_of_reasoning_is_on_the_page() -> None:
    assert {form.name for form in (*TOOL_FORMATS, *REASONING_FORMATS)} - QUOTED == set()


def test_every_limit_of_a_request_is_on_the_page_with_its_flag() -> None:
    numbers = set(re.findall(r"\d+", PAGE.replace(",", "")))
    for name in Limits.__struct_fields__:
        setting = re.sub("_s$", "_seconds", name)
        assert hasattr(LimitSettings(), setting)
        assert f"--{setting.replace('_', '-')}" in PAGE, name
        value = int(getattr(Limits(), name) or 0)
        assert not value or {str(value), str(value >> 10), str(value >> 20)} & numbers, name
