"""Reasoning and content, however the text comes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.tokenizer.form_table import REASONING_FORMATS
from penstock.tokenizer.pieces import Piece
from penstock.tokenizer.reasoning import ReasoningSplitter, reasoning_splitter

FORMS = {form.name: form for form in REASONING_FORMATS}


def split(form: str, chunks: Sequence[str], *, is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(FORMS[form], is_open=is_open)
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += splitter.feed(chunk)
    pieces += splitter.finish()
    kinds = [piece.kind for piece in pieces]
    assert kinds == sorted(kinds, reverse=True), "content before reasoning"
    assert all(piece.text for piece in pieces)
    return tuple("".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content"))  # type: ignore[return-value]


CASES = [
    ("qwen3", "<think>\nLet me see.\n</think>\n\nYes.", False, ("Let me see.", "Yes.")),
    ("qwen3", "Yes.", False, ("", "Yes.")),
    ("qwen3", "\n <think>a</think>b", False, ("a", "b")),
    ("qwen3", "<think>a\n\nb\n", False, ("a\n\nb\n", "")),  # not closed
    ("qwen3", "<thinking>a", False, ("", "<thinking>a")),
    ("qwen3", " <thin", False, ("", " <thin")),
    ("qwen3", "Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
    ("qwen3", "<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    ("qwen3", "a</th</think>b</think>", True, ("a</th", "b</think>")),
    ("deepseek_r1", "Hm.\n</think>\n\n1 < 2", True, ("Hm.", "1 < 2")),
    ("deepseek_r1", "Hm. </thin", True, ("Hm. </thin", "")),
    ("deepseek_r1", "", True, ("", "")),
    ("mistral", "[THINK]x[/THINK]y", False, ("x", "y")),
]


@pytest.mark.parametrize(("form", "text", "is_open", "expected"), CASES)
def test_reasoning_is_split_from_content_at_every_cut(
    form: str, text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    assert split(form, [text], is_open=is_open) == expected
    assert split(form, list(text), is_open=is_open) == expected
    for at in range(len(text)):
        assert split(form, [text[:at], text[at:]], is_open=is_open) == expected


def test_reasoning_is_given_as_it_comes() -> None:
    splitter = ReasoningSplitter(FORMS["qwen3"], is_open=False)
    assert splitter.feed("<think>\n") == []
    assert splitter.feed("one ") == [Piece("reasoning", "one ")]
    assert splitter.feed("two\n") == [Piece("reasoning", "two")]
    assert splitter.feed("three</") == [Piece("reasoning", "\nthree")]
    assert splitter.feed("think>\n") == []
    assert splitter.feed("Yes") == [Piece("content", "Yes")]


AROUND = [
    ("granite", "<think>a</think><response>b < c</response>", ("a", "b < c")),
    ("granite", "<think>a</think> \n<response>b</response>", ("a", "b")),
    ("granite", "<response>b</response> c", ("", "b c")),
    ("granite", "<response>b</resp", ("", "b</resp")),  # not closed
    ("granite", "b <response>c</response>", ("", "b <response>c</response>")),  # not at the start
    ("granite", " <resp", ("", " <resp")),
    ("granite", "<think>a</think>b</response>", ("a", "b</response>")),
    ("cohere", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", ("a", "b")),
    (
        "kimi_k3",
        "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
        "<|open|>tools<|sep|>c<|close|>tools<|sep|><|close|>message<|sep|>",
        ("a", "b<|open|>tools<|sep|>c<|close|>tools<|sep|>"),
    ),
    ("kimi_k3", "b<|close|>mess", ("", "b<|close|>mess")),
    (
        "kimi_k3",
        "b<|close|>message<|sep|>c<|close|>message<|sep|>d",  # only the first is the answer's end
        ("", "bc<|close|>message<|sep|>d"),
    ),
    (
        "kimi_k3",
        "<|open|>response<|sep|><|close|>mes<|close|>response<|sep|>sage<|sep|>",
        ("", "<|close|>message<|sep|>"),
    ),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "expected"), AROUND)
def test_marks_around_an_answer_are_left_out_however_it_comes(
    form: str, text: str, expected: tuple[str, str], size: int
) -> None:
    splitter = reasoning_splitter(FORMS[form], is_open=False)
    pieces = [piece for at in range(0, len(text), size) for piece in splitter.feed(text[at : at + size])]
    pieces += splitter.finish()
    assert all(piece.text for piece in pieces)
    found = ("".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content"))
    assert tuple(found) == expected


MESSAGES = [
    (
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        ("a", "b"),
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"s": 1}<|call|>',
        ("", '<|channel|>commentary to=functions.look<|message|>{"s": 1}<|call|>'),
    ),
    ("harmony", "no <header|>", ("", "no <header|>")),
    ("harmony", "<|start|>" + "x" * 600, ("", "<|start|>" + "x" * 600)),
    ("harmony", "<|start|>" + "x" * 600 + "<|message|>y", ("", "<|start|>" + "x" * 600 + "<|message|>y")),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assist", ("a", "")),
    (
        "muse",
        " to=self<|message|>a<|eom|><|start|>assistant to=look<|message|><atem:x/><|eom|><|start|>assistant"
        "<|message|>b<|eot|>",
        ("a", "<atem:x/>b"),
    ),
    ("muse", "to be <or not>", ("", "to be <or not>")),
    ("solar", "<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", ("a", "b")),
    (
        "solar",
        "<|think|>a<|end|><|begin|>assistant<|tool_calls|>b<|calls|>",
        ("a", "<|tool_calls|>b<|calls|>"),
    ),
    ("solar", "<|begin|>user says" + " so" * 200, ("", "<|begin|>user says" + " so" * 200)),
    ("functionary", "all\nb >> c >>> d", ("", "b >> c >>> d")),
    ("functionary", 'all\nb>>>look\n{"s": 1}>>>now\n{}', ("", 'b>>>look\n{"s": 1}>>>now\n{}')),
    ("functionary", 'look\n{"s": 1}', ("", '>>>look\n{"s": 1}')),
    ("functionary", "Well\nb", ("", "Well\nb")),
    ("functionary", "Well", ("", "Well")),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "expected"), MESSAGES)
def test_an_answer_of_several_messages_is_taken_apart_however_it_comes(
    form: str, text: str, expected: tuple[str, str], size: int
) -> None:
    splitter = reasoning_splitter(FORMS[form], is_open=False)
    pieces = [piece for at in range(0, len(text), size) for piece in splitter.feed(text[at : at + size])]
    pieces += splitter.finish()
    found = ("".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content"))
    assert tuple(found) == expected
    assert splitter.is_closed == bool(expected[0])


MARKS = {
    "harmony": (
        *("<|channel|>", "<|start|>", "to=", "analysis", "final", "<|message|>", "<|end|>", "<|return|>"),
        *("<|call|>", "assistant", "<", "<|"),
    ),
    "muse": ("<|start|>", "to=", "self", "look", "<|message|>", "<|eom|>", "<|eot|>", "assistant", "<|"),
    "solar": ("<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|end|>", "<|calls|>", "assistant"),
    "functionary": (">>>", ">", ">>", "all", "look", "{", "}"),
    "kimi_k3": (
        *("<|open|>", "think", "<|sep|>", "<|close|>", "response", "message", "tools"),
        *("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
}


@pytest.mark.parametrize("form", MARKS)
def test_no_cut_changes_what_an_answer_of_marks_is(form: str) -> None:
    source, words = random.Random(1), (*MARKS[form], " ", "\n", "x")

    def taken_apart(chunks: list[str], *, is_open: bool) -> tuple[str, str, bool]:
        splitter = reasoning_splitter(FORMS[form], is_open=is_open)
        pieces = [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.finish()
        thought, said = (
            "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")
        )
        return thought, said, splitter.is_closed

    for _ in range(300):
        text = "".join(source.choice(words) for _ in range(source.randrange(1, 14)))
        is_open, at = source.random() < 0.3, source.randrange(len(text))
        whole = taken_apart([text], is_open=is_open)
        assert taken_apart(list(text), is_open=is_open) == whole, text
        assert taken_apart([text[:at], text[at:]], is_open=is_open) == whole, (text, at)
