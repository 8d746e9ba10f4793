"""Patterns of schemas mean what ECMA-262 has them mean, by the library that obeys them
(issue 25, point 16)."""

from __future__ import annotations

import json

import pytest

from masks import EOS, TOKENIZER, allowed
from penstock.grammar.matcher import Matcher, Vocabulary
from penstock.grammar.patterns import from_ecma
from penstock.request import StructuredOutputs

SPACES = "\t\n\v\f\r \u00a0\ufeff\u1680\u2000\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
OTHERS = "\x01\x85\u180e\u200bas-"
# A pattern of one character, and those that it matches and does not.
SINGLE = {
    r"^\s$": (SPACES, OTHERS),
    r"^[\s]$": (SPACES, OTHERS),
    r"^\S$": (OTHERS, SPACES),
    r"^[^\s]$": (OTHERS, SPACES),
    r"^[^\S]$": (SPACES, OTHERS),
    r"^[\sa-]$": (SPACES + "a-", "s\x85"),
    r"^\\s?$": ("\\", "s" + SPACES),
    r"^[a[b]$": ("a[b", "]"),
    r"^[&&a]$": ("&a", "b"),
    r"^[a~~b]$": ("a~b", "c"),
    r"^[\[\]]$": ("[]", "\\"),
    r"^[^]$": ("a]^\n", ""),
    r"^\cC$": ("\x03", "cC"),
    r"^[\cj]$": ("\n", "cj"),
}


def matches(vocabulary: Vocabulary, pattern: str, text: str) -> bool:
    structured = StructuredOutputs(json=json.dumps({"type": "string", "pattern": pattern}))
    matcher = Matcher(vocabulary, structured)
    assert not matcher.error
    written = json.dumps(text, ensure_ascii=False)
    matcher.accept(TOKENIZER.encode(written, add_special_tokens=False))
    return not matcher.error and EOS in allowed(matcher)


@pytest.mark.parametrize("pattern", SINGLE)
def test_d12_a_class_of_characters_is_that_of_ecma(vocabulary: Vocabulary, pattern: str) -> None:
    right, wrong = SINGLE[pattern]
    for is_right, characters in ((True, right), (False, wrong)):
        for character in characters:
            assert matches(vocabulary, pattern, character) == is_right, repr(character)


def test_d12_a_bracket_behind_a_class_is_a_character(vocabulary: Vocabulary) -> None:
    assert [matches(vocabulary, "^[[a]]$", text) for text in ("a]", "[]", "a")] == [True, True, False]


def test_names_of_fields_are_patterns_too(vocabulary: Vocabulary) -> None:
    schema = {"patternProperties": {r"^\s$": {"type": "null"}}, "additionalProperties": False}
    structured = StructuredOutputs(json=json.dumps({"type": "object"} | schema))
    for name, is_right in (("\ufeff", True), ("\x85", False)):
        matcher = Matcher(vocabulary, structured)
        text = json.dumps({name: None}, ensure_ascii=False, separators=(",", ":"))
        matcher.accept(TOKENIZER.encode(text, add_special_tokens=False))
        assert (not matcher.error) == is_right


@pytest.mark.parametrize(
    "pattern", ["", "^[a-z]+$", r"\d\w\D", "(a|b){2,3}", r"[^\]a]", r"a\[\]", r"[\w.-]+@x\.y"]
)
def test_what_both_read_alike_stays_as_it_is(pattern: str) -> None:
    assert from_ecma(pattern) == pattern
