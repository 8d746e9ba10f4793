"""Masks of grammars over the tokenizer of the embedded model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from masks import DEMO, EOS, TOKENIZER, allowed, text_of, walk
from penstock.errors import InvalidRequestError
from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.request import StructuredOutputs
from schemas import schemas

VOCAB_SIZE = 1024


@pytest.mark.parametrize(
    "pattern", [r"[a-c]{2,5}", r"(yes|no|may be)!?", r"[0-9]{1,3}(,[0-9]{3}){0,2}", "é{1,3}|ab*"]
)
def test_whatever_is_drawn_from_the_masks_fits_the_pattern(vocabulary: Vocabulary, pattern: str) -> None:
    for seed in range(20):
        tokens, is_whole = walk(Matcher(vocabulary, StructuredOutputs(regex=pattern)), random.Random(seed))
        if is_whole:
            assert re.fullmatch(pattern, text_of(tokens))
    assert is_whole or "*" in pattern


def test_every_choice_can_come_and_nothing_else(vocabulary: Vocabulary) -> None:
    choice = ["yes", "yes, please", 'a "quoted" \\ one\n', "é"]
    found = set()
    for seed in range(60):
        tokens, is_whole = walk(Matcher(vocabulary, StructuredOutputs(choice=choice)), random.Random(seed))
        assert is_whole
        found.add(text_of(tokens))
    assert found == set(choice)


def test_json_is_compact_unless_white_space_is_asked_for(vocabulary: Vocabulary) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3})
    spaced = 0
    for seed in range(20):
        for whitespace in (False, True):
            asked = StructuredOutputs(json=schema, whitespace=whitespace)
            text = text_of(walk(Matcher(vocabulary, asked), random.Random(seed))[0])
            assert len(json.loads(text)) in (2, 3)
            assert not re.search(r"\s{33}", text)
            if whitespace:
                spaced += bool(re.search(r"\s", text))
            else:
                assert not re.search(r"\s", text)
    assert spaced > 10


def test_any_object_is_one(vocabulary: Vocabulary) -> None:
    assert [
        TOKENIZER.token_bytes(i)[:1]
        for i in allowed(Matcher(vocabulary, StructuredOutputs(json_object=True)))
    ] == [b"{"] * len(allowed(Matcher(vocabulary, StructuredOutputs(json_object=True))))


def test_special_and_missing_ids_are_never_allowed_as_text(vocabulary: Vocabulary) -> None:
    found = allowed(Matcher(vocabulary, StructuredOutputs(regex="(?s:.*)")))
    special = {
        i
        for i in range(VOCAB_SIZE)
        if TOKENIZER.token_bytes(i).decode(errors="replace") in TOKENIZER.special_tokens
    }
    assert special & set(found) == {EOS}
    assert max(found) < VOCAB_SIZE


def test_only_the_end_is_allowed_behind_a_whole_text(vocabulary: Vocabulary) -> None:
    matcher = Matcher(vocabulary, StructuredOutputs(choice=["ab"]))
    matcher.accept(TOKENIZER.encode("ab", add_special_tokens=False))
    assert allowed(matcher) == [EOS]


def test_all_of_a_models_ends_that_its_tokenizer_has_are_allowed() -> None:
    vocabulary = load_vocabulary(DEMO, [EOS, 4, 1040])
    matcher = Matcher(vocabulary, StructuredOutputs(choice=["ab"]))
    assert not {EOS, 4, 1040} & set(allowed(matcher))
    matcher.accept(TOKENIZER.encode("ab", add_special_tokens=False))
    assert allowed(matcher) == [EOS, 4]


def test_d12_a_matcher_that_is_built_anew_or_copied_goes_on_as_the_first(vocabulary: Vocabulary) -> None:
    """What a lost stage, a preempted row and another rank of the stage depend on."""
    for number, schema in enumerate(schemas(30)):
        asked = StructuredOutputs(json=json.dumps(schema))
        matcher = Matcher(vocabulary, asked)
        unused, chance, tokens = matcher.copy(), random.Random(number), []
        while len(tokens) < 40 and (token_id := chance.choice(expected := allowed(matcher))) != EOS:
            if len(tokens) % 7 == 3:
                for other in (Matcher(vocabulary, asked), unused.copy()):
                    other.accept(tokens)
                    assert allowed(other) == expected
            tokens.append(token_id)
            matcher.accept([token_id])


def test_a_limit_of_work_is_an_error_and_no_end(vocabulary: Vocabulary) -> None:
    matcher = Matcher(vocabulary, StructuredOutputs(regex=".*" + ".{0,50}" * 30 + "x"))
    for _ in range(40):
        if matcher.error:
            break
        matcher.accept([TOKENIZER.encode("the", add_special_tokens=False)[0]])
        matcher.mask()
    assert matcher.error
    assert "\n" not in matcher.error


@pytest.mark.parametrize(("tokenizer", "eos"), [("{", [1]), ("{}", [1]), (None, [])])
def test_a_model_whose_tokens_say_nothing_is_refused(tokenizer: str | None, eos: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        Vocabulary(tokenizer or (DEMO / "tokenizer.json").read_text(), eos)
    assert raised.value.code == "unsupported_by_model"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        load_vocabulary(tmp_path, [1])
