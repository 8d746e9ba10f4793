"""Text that reads like a special token is text, and a grammar that names the token means it."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from masks import DEMO, EOS, TOKENIZER, allowed, text_of, walk
from penstock.errors import InvalidRequestError
from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.grammar.special_tokens import name_by_id, set_apart
from penstock.request import StructuredOutputs
from penstock.tokenizer.detokenizer import byte_level_alphabet

TEXT = '<|end|> and "<|begin|>"'


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (StructuredOutputs(choice=[TEXT]), TEXT),
        (StructuredOutputs(json=json.dumps({"const": TEXT})), json.dumps(TEXT)),
        (StructuredOutputs(json=json.dumps({"enum": [TEXT]})), json.dumps(TEXT)),
        (StructuredOutputs(regex=r"<\|end\|> ok<\|user\|>"), "<|end|> ok<|user|>"),
        (StructuredOutputs(grammar='start: "<|end|>" /x<\\|end\\|>/ // <|end|>'), "<|end|>x<|end|>"),
    ],
)
def test_text_that_reads_like_a_special_token_is_text(asked: StructuredOutputs, expected: str) -> None:
    tokens, is_whole = walk(Matcher(load_vocabulary(DEMO, [EOS]), asked), random.Random(0))
    assert is_whole
    assert text_of(tokens) == expected


def test_a_special_token_that_a_grammar_names_is_the_token() -> None:
    matcher = Matcher(
        load_vocabulary(DEMO, [EOS]), StructuredOutputs(grammar='start: "a" <|user|> "<|user|>" <[2]>')
    )
    tokens, is_whole = walk(matcher, random.Random(0))
    assert is_whole
    assert [token_id for token_id in tokens if token_id < 5] == [3, 2]
    assert text_of(tokens).count("<|user|>") == 2


NAMES = ["<unk>", "</s>", *map(chr, range(33, 127))]


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        (models.BPE({n: i for i, n in enumerate(NAMES)}, [], ignore_merges=True), decoders.ByteLevel()),
        (models.BPE({n: i for i, n in enumerate(NAMES)}, [], unk_token="<unk>"), decoders.ByteLevel()),
        (
            models.Unigram([(name, -1.0) for name in NAMES], unk_id=0),
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        ),
    ],
)
def test_it_is_so_where_the_model_of_the_tokenizer_knows_the_name(
    model: models.Model, decoder: decoders.Decoder
) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMES[:2]])
    assert tokenizer.encode("</s>").ids == [1]
    matcher = Matcher(Vocabulary(tokenizer.to_str(), [1]), StructuredOutputs(choice=["</s>a<unk>"]))
    text, letters = "", 0
    while (token_id := allowed(matcher)[0]) != 1:
        text += NAMES[token_id]
        matcher.accept([token_id])
        letters += 1
    assert (text, letters) == ("</s>a<unk>", 10)


def test_only_names_of_tokens_are_said_by_id() -> None:
    ids = {"<s>": 1, "[INST]": 7}
    assert (
        name_by_id('start: "<s>" <s> "\\"" <s>|</s> /<s>\\/<s>/i # <s>\nA: "[INST]" %json {"a": "<s>"}', ids)
        == 'start: "<s>" <[1]> "\\"" <[1]>|</s> /<s>\\/<s>/i # <s>\nA: "[INST]" %json {"a": "<s>"}'
    )


def test_ids_and_other_tokens_stay_as_they_are() -> None:
    content = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    apart, ids = set_apart(content)
    before, after = Tokenizer.from_str(content), Tokenizer.from_str(apart)
    assert ids == {name: before.token_to_id(name) for name in TOKENIZER.special_tokens}
    changed = {i for i in range(before.get_vocab_size()) if before.id_to_token(i) != after.id_to_token(i)}
    assert changed == set(ids.values())
    assert after.decode(after.encode("<|end|> é", add_special_tokens=False).ids) == "<|end|> é"


def test_a_vocabulary_of_added_tokens_alone_is_refused_before_it_takes_a_minute() -> None:
    tokens = [{"id": index, "content": f"<t{index}>", "special": False} for index in range(30_001)]
    vocab = {token["content"]: token["id"] for token in tokens}
    content = json.dumps({"added_tokens": tokens, "model": {"type": "BPE", "vocab": vocab, "merges": []}})
    with pytest.raises(InvalidRequestError, match=r"30,001 added tokens, more than 30,000\."):
        Vocabulary(content, [0])


def test_added_text_that_looks_like_spelt_bytes_is_itself() -> None:
    alphabet = {letter: index for index, letter in enumerate(byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["üü", "日本"])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    matcher = Matcher(Vocabulary(tokenizer.to_str(), [258]), StructuredOutputs(choice=["日本üü"]))
    assert matcher.num_allowed([257, 256, 258]) == 3
