"""Which row of the table a model gets, and what its tokenizer must show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.config.server import ReasoningParser, ToolParser
from penstock.errors import UsageError
from penstock.tokenizer import form_detection
from penstock.tokenizer.detokenizer import byte_level_alphabet
from penstock.tokenizer.form_detection import shown_reasoning_format, shown_tool_format
from penstock.tokenizer.form_table import REASONING_FORMATS, TOOL_FORMATS
from penstock.tokenizer.model_syntax import ModelSyntax, model_syntax, tool_form_caution
from penstock.tokenizer.tokenizer import JsonTokenizer
from penstock.tokenizer.tokenizer import Tokenizer as OurTokenizer


@dataclass(frozen=True)
class Template:
    source: str
    reads: frozenset[str] = field(default_factory=lambda: frozenset({"messages", "tools"}))
    tool_format: str = ""
    reasoning_format: str = ""


def syntax(source: str, **settings: object) -> ModelSyntax:
    return model_syntax(Template(source), {"[TOOL_CALLS]": 5, "</think>": 6}, **settings)  # type: ignore[arg-type]


def test_settings_name_the_rows_of_the_table() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none"} | {form.name for form in TOOL_FORMATS}
    assert set(get_args(ReasoningParser)) == {"auto", "none"} | {form.name for form in REASONING_FORMATS}


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("{{ 'within <tool_call></tool_call> tags' }}", "hermes", None),
        ("{{ '<tool_call>' }}{{ '</tool_call>' }}{{ '</think>' }}", "hermes", "qwen3"),
        ("{{ '<tool_call>\\n<function=' + name + '<parameter=' }}</tool_call>", "qwen3_coder", None),
        ("{{ '<tool_call>' + name + '<arg_key>' }}</tool_call>", "glm45", None),
        ("{{ 'List of tools: [' }}", "lfm2", None),
        ("{{ 'a|tool_call|b<calls>' }}", None, None),
        ("{{ '[TOOL_CALLS][' }}", "mistral", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}{{ '[THINK]' }}", "mistral_args", "mistral"),
        ("""{{ '<|start_header_id|>' }}{{ '{"name": f, "parameters": p}' }}""", "llama3_json", None),
        ("{{ '<|start_header_id|>' }}", None, None),
        ("{{ messages }}", None, None),
        ("", None, None),
    ],
)
def test_the_template_shows_how_the_model_writes(
    source: str, tools: str | None, reasoning: str | None
) -> None:
    found = syntax(source)
    assert (found.tools.name if found.tools else None) == tools
    assert (found.reasoning.name if found.reasoning else None) == reasoning


def test_what_a_template_shows_overrules_its_signs() -> None:
    source = "{{ '<tool_call></tool_call></think>' }}"
    shown = Template(source, tool_format="glm45", reasoning_format="granite")
    for settings, tools, reasoning in (
        ({}, "glm45", "granite"),
        ({"tool_parser": "hermes", "reasoning_parser": "qwen3"}, "hermes", "qwen3"),
        ({"tool_parser": "none", "reasoning_parser": "none"}, None, None),
    ):
        found = model_syntax(shown, {}, **settings)  # type: ignore[arg-type]
        assert (found.tools and found.tools.name, found.reasoning and found.reasoning.name) == (
            tools,
            reasoning,
        )


@pytest.mark.parametrize(
    ("calls", "form"),
    [
        ("<tool_calls>[{call}]</tool_calls>", "tool_calls"),
        ("<tool_calls>\n{call}\n</tool_calls>", "minimax_m1"),
        ("<tool_call>\n{call}\n</tool_call>", "hermes"),
        ("[go(where='there', times=3)]", "pythonic"),
        ("<calls>{call}</calls>", ""),
    ],
)
def test_a_list_of_calls_is_told_from_calls_on_lines(calls: str, form: str) -> None:
    call = '{"name": "go", "arguments": {"where": "there", "times": 3}}'

    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool, **_: Any) -> str:
        question = f"{messages[0]['content']}\n"
        return question if add_generation_prompt else question + calls.replace("{call}", call)

    assert shown_tool_format(render) == form


def test_a_call_that_is_shown_as_a_message_is_read_by_what_its_row_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = (
        "Whither, then?<|end|><|start|>assistant to=functions.go<|channel|>commentary json<|message|>"
        '{"where": "there", "times": 3}<|call|>'
    )
    row = next(form for form in TOOL_FORMATS if form.messages)
    assert shown_tool_format(lambda *_, **__: shown) == row.name
    renamed = msgspec.structs.replace(row, name="as harmony")
    monkeypatch.setattr(form_detection, "TOOL_FORMATS", (renamed,))
    assert shown_tool_format(lambda *_, **__: shown) == "as harmony"


def test_a_mark_stands_around_answers_only_where_it_follows_the_reasoning() -> None:
    def shown(behind: str) -> str:
        return shown_reasoning_format(lambda *_, **__: f"<think>Let me think.</think> {behind}")

    assert shown("<response>Done.") == "granite"
    assert shown("Done. <response>y</response>") == "qwen3"


def test_settings_overrule_the_template() -> None:
    source = "{{ '<tool_call></tool_call></think>' }}"
    found = syntax(source, tool_parser="json", reasoning_parser="deepseek_r1")
    assert found.tools is not None
    assert found.reasoning is not None
    assert (found.tools.name, found.reasoning.name) == ("json", "deepseek_r1")
    off = syntax(source, tool_parser="none", reasoning_parser="none")
    assert (off.tools, off.reasoning, off.is_tool_parser_off) == (None, None, True)
    with pytest.raises(UsageError, match="must be auto, none or one of"):
        syntax(source, tool_parser="cobol")


def test_a_template_that_takes_tools_in_a_form_that_is_not_known_is_warned_of() -> None:
    """Issue 25, point 13."""
    xml = "{{ '<calls><call name=' + name }}</calls>"
    caution = tool_form_caution(syntax(xml))
    assert "get 400" in caution
    for form in TOOL_FORMATS:
        assert form.name in caution
    assert tool_form_caution(syntax(xml, tool_parser="none")) == ""
    assert tool_form_caution(syntax(xml, tool_parser="json")) == ""
    assert tool_form_caution(syntax("{{ '<tool_call></tool_call>' }}")) == ""
    without_tools = model_syntax(Template("{{ messages }}", reads=frozenset({"messages"})), {})
    assert tool_form_caution(without_tools) == ""


def test_only_markers_of_the_model_are_told_and_those_that_are_tokens() -> None:
    assert syntax("[TOOL_CALLS]</think>").marker_ids == {"[TOOL_CALLS]": 5, "</think>": 6}
    assert syntax("<tool_call></tool_call>").marker_ids == {}
    assert syntax("x").template_knows_calls is False
    assert syntax("{{ m.tool_calls }}").template_knows_calls


def _tokenizer(*, is_byte_level: bool) -> OurTokenizer:
    made = Tokenizer(models.BPE(vocab=dict(byte_level_alphabet()), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel() if is_byte_level else decoders.Sequence([decoders.ByteLevel()])
    if not is_byte_level:
        made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("~", "~")])
    made.add_special_tokens(["<|end|>", "[TOOL_CALLS]"])
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return JsonTokenizer(made.to_str().encode())


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_special_tokens_that_are_shown_are_text_and_others_are_not(is_byte_level: bool) -> None:
    tokenizer = _tokenizer(is_byte_level=is_byte_level)
    assert tokenizer.added_token_ids == {"<|end|>": 256, "[TOOL_CALLS]": 257, "<tool_call>": 258}
    ids = [ord("a"), 257, ord("b"), 258, 256]
    for shown, text in (((), "ab<tool_call>"), (("[TOOL_CALLS]", "[ARGS]"), "a[TOOL_CALLS]b<tool_call>")):
        detokenizer = tokenizer.detokenizer([], shown=shown)
        assert detokenizer.feed(ids) + detokenizer.finish() == text
    everything = tokenizer.detokenizer([], skip_special_tokens=False, shown=())
    assert everything.feed(ids) + everything.finish() == "a[TOOL_CALLS]b<tool_call><|end|>"
