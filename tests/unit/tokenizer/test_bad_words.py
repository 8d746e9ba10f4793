"""From bad words to ids (row G8)."""

from __future__ import annotations

import pytest

from penstock.engine.client.siblings import with_siblings
from penstock.errors import InvalidRequestError
from penstock.families.registry import resolve_model_directory
from penstock.request import SamplingParams
from penstock.tokenizer.bad_words import with_bad_words
from penstock.tokenizer.tokenizer import AbsentTokenizer, load_tokenizer

DEMO = load_tokenizer(resolve_model_directory("demo"))


def ids(text: str) -> list[int]:
    return DEMO.encode_trusted(text, add_special_tokens=False)


def resolved(*words: str, vocab_size: int = 1 << 20, **others: object) -> list[list[int]]:
    sampling = SamplingParams(bad_words=list(words), **others)
    return with_bad_words(sampling, DEMO.encode_trusted, vocab_size).bad_word_ids


def test_g8_a_word_counts_at_the_beginning_and_behind_others() -> None:
    assert ids("the") != ids(" the")
    assert resolved("the") == resolved(" the") == [ids("the"), ids(" the")]
    assert resolved("the", "and") == [ids("the"), ids(" the"), ids("and"), ids(" and")]


def test_g8_a_space_that_is_a_token_of_its_own_makes_no_other_form() -> None:
    """As of vocabularies that put a space before every text by themselves."""

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in f" {text.strip()}"]

    found = with_bad_words(SamplingParams(bad_words=["ab"]), encode, 1000)
    assert found.bad_word_ids == [[*b" ab"]]


def test_a_word_that_is_said_twice_counts_once_and_ids_of_the_caller_stay() -> None:
    assert resolved("the", "the", bad_word_ids=[[3], ids("the")]) == [[3], ids("the"), ids(" the")]


def test_ids_that_the_model_does_not_have_are_not_forbidden() -> None:
    most = max(ids("the"))
    assert ids("the") not in resolved("the", vocab_size=most)
    assert ids("the") in resolved("the", vocab_size=most + 1)


@pytest.mark.parametrize("word", [" ", "\t\n", "\ud800"])
def test_what_is_no_word_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        resolved("a", word)
    assert (raised.value.param, raised.value.code) == ("bad_words", "out_of_range")


def test_a_word_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the bad word 'a' has 257 tokens, more than 256"):
        with_bad_words(SamplingParams(bad_words=["a"]), lambda text, **_: [1] * (255 + len(text)), 9)
    with pytest.raises(InvalidRequestError, match=f"the bad word '{'b' * 40}…' has 301 tokens"):
        with_bad_words(SamplingParams(bad_words=["a", "b" * 300]), lambda text, **_: [1] * len(text), 9)


def test_a_model_without_a_tokenizer_takes_ids_alone() -> None:
    sampling = SamplingParams(bad_words=["a"])
    with pytest.raises(InvalidRequestError, match="no tokenizer") as raised:
        with_bad_words(sampling, AbsentTokenizer().encode_trusted, 100)
    assert raised.value.param == "bad_words"
    same = SamplingParams(bad_word_ids=[[1, 2]])
    assert with_bad_words(same, AbsentTokenizer().encode_trusted, 100) is same


def test_words_never_reach_the_core() -> None:
    with pytest.raises(AssertionError, match="bad words must be ids here"):
        with_siblings("r", [1], SamplingParams(bad_words=["a"]))
