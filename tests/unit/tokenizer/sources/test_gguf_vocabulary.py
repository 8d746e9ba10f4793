"""Vocabularies from GGUF: the published vectors, special tokens, templates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from gguf_files import Stored, write_gguf
from penstock.errors import CheckpointError, UnsupportedModelError
from penstock.gguf.file import GgufFile
from penstock.grammar.matcher import Matcher, load_vocabulary
from penstock.request import StructuredOutputs
from penstock.tokenizer.sources.gguf_vocabulary import gguf_end_ids
from penstock.tokenizer.sources.model_files import tokenizer_config_content
from penstock.tokenizer.sources.split_patterns import SPLIT_RULES
from penstock.tokenizer.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from published_vocabularies import NAMES, published, vectors

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_PIECES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
PIECES = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *BYTE_PIECES,
    ("[tool]", 0.0, USER_DEFINED),
    *((name, -float(rank), NORMAL) for rank, name in enumerate(["ab", "\u2581ab", "c", "a", "b", "\u2581"])),
]


def spm_metadata(**more: Any) -> dict[str, Any]:
    names, scores, kinds = zip(*PIECES, strict=True)
    return {
        f"{KEY}model": "llama",
        f"{KEY}tokens": list(names),
        f"{KEY}scores": np.array(scores, "<f4"),
        f"{KEY}token_type": np.array(kinds, "<i4"),
        f"{KEY}bos_token_id": 1,
        f"{KEY}eos_token_id": 2,
        **{f"{KEY}{name}": value for name, value in more.items()},
    }


def bpe_metadata(**more: Any) -> dict[str, Any]:
    letters = [chr(code) for code in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]]
    letters += [chr(256 + index) for index in range(256 - len(letters))]
    names = [*letters, "ab", "\u0120ab", "<|im_end|>", "<|im_start|>", "\u00fc!", "<|end|>"]
    kinds = [*[NORMAL] * 258, CONTROL, CONTROL, USER_DEFINED, NORMAL]
    return {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": "qwen2",
        f"{KEY}tokens": names,
        f"{KEY}token_type": np.array(kinds, "<i4"),
        f"{KEY}merges": ["a b", "\u0120 ab", "x y"],
        f"{KEY}eos_token_id": 258,
        **{f"{KEY}{name}": value for name, value in more.items()},
    }


def tokenizer_of(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(write_gguf(path / "m.gguf", metadata, {}))


@pytest.mark.parametrize("name", NAMES)
def test_published_vocabularies_give_the_published_ids(name: str) -> None:
    tokenizer = load_tokenizer(published(name))
    assert isinstance(tokenizer, JsonTokenizer)
    for text, expected in vectors(name):
        assert tokenizer.encode(text, add_special_tokens=False) == expected, repr(text)
        assert tokenizer.decode(expected) == text
    first = tokenizer.encode("a")[0]
    assert (first == {"llama-spm": 1, "deepseek-llm": 100_000}.get(name)) is (
        name in ("llama-spm", "deepseek-llm")
    )


def test_pieces_are_joined_by_score_and_the_rest_is_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, spm_metadata())
    ids = {name: index for index, (name, _, _) in enumerate(PIECES)}
    assert tokenizer.encode("ab cé") == [1, ids["\u2581ab"], ids["\u2581"], ids["c"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("ab cé")) == "ab cé"


def test_what_is_put_around_a_text_is_what_the_file_says(tmp_path: Path) -> None:
    around = tokenizer_of(
        tmp_path, spm_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    )
    ids = {name: index for index, (name, _, _) in enumerate(PIECES)}
    assert around.encode("ab") == [ids["ab"], 2]
    assert tokenizer_of(tmp_path, bpe_metadata()).encode("ab") == [256]
    assert tokenizer_of(tmp_path, bpe_metadata(pre="llama-bpe", bos_token_id=259)).encode("ab") == [259, 256]


def test_special_tokens_mean_themselves_in_trusted_text_alone(tmp_path: Path) -> None:
    for metadata, special, defined in (
        (spm_metadata(), ("</s>", 2), ("[tool]", 259)),
        (bpe_metadata(), ("<|im_end|>", 258), ("ü!", 260)),
    ):
        tokenizer = tokenizer_of(tmp_path, metadata)
        assert special[1] in tokenizer.encode_trusted(f"ab{special[0]}")
        assert special[1] not in tokenizer.encode(f"ab{special[0]}")
        assert defined[1] in tokenizer.encode(f"ab{defined[0]}")
        assert tokenizer.decode([defined[1], special[1]]) == defined[0]
        assert special[0] in tokenizer.special_tokens


def test_grammars_know_the_bytes_of_every_kind_of_token(tmp_path: Path) -> None:
    for metadata, text in (
        (spm_metadata(add_space_prefix=False), "ab cé[tool]"),
        (bpe_metadata(), "ab cé ü!"),
    ):
        path = write_gguf(tmp_path / "m.gguf", metadata, {})
        ids = load_tokenizer(path).encode(text, add_special_tokens=False)
        matcher = Matcher(load_vocabulary(path, [2]), StructuredOutputs(choice=[text]))
        assert matcher.num_allowed(ids) == len(ids)


def test_templates_and_ends_are_read(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "A", "tokenizer.chat_templates": ["tool_use"]}
    metadata = (
        bpe_metadata(bos_token_id=259, eot_token_id=259)
        | templates
        | {"tokenizer.chat_template.tool_use": "B"}
    )
    path = write_gguf(tmp_path / "m.gguf", metadata, {})
    config = msgspec.json.decode(tokenizer_config_content(path))
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert {entry["name"]: entry["template"] for entry in config["chat_template"]} == {
        "default": "A",
        "tool_use": "B",
    }
    assert gguf_end_ids(GgufFile.open(path).metadata) == [258, 259, 261], "named, and known by name"
    single = write_gguf(tmp_path / "s.gguf", spm_metadata() | {"tokenizer.chat_template": "A"}, {})
    assert json.loads(tokenizer_config_content(single))["chat_template"] == "A"


@pytest.mark.parametrize("token_id", [-1, 2**32 - 1, 262])
def test_a_padding_token_that_the_vocabulary_does_not_have_is_none(tmp_path: Path, token_id: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", bpe_metadata(padding_token_id=token_id), {})
    assert "pad_token" not in msgspec.json.decode(tokenizer_config_content(path))
    sound = write_gguf(tmp_path / "s.gguf", bpe_metadata(padding_token_id=259), {})
    assert msgspec.json.decode(tokenizer_config_content(sound))["pad_token"] == "<|im_start|>"


def test_harmonys_end_of_a_message_does_not_end_the_answer(tmp_path: Path) -> None:
    metadata = bpe_metadata()
    names = metadata[f"{KEY}tokens"]
    names[256:258] = ["<|return|>", "<|call|>"]
    path = write_gguf(tmp_path / "m.gguf", metadata, {})
    assert gguf_end_ids(GgufFile.open(path).metadata) == [256, 257, 258]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": (spm_metadata(model="bert"), "of the kind 'bert'; supported: gpt2, llama and t5"),
    "rule": (
        bpe_metadata(pre="unheard-of"),
        "rule 'unheard-of', which is not supported; supported: .*qwen2",
    ),
    "tokens": ({f"{KEY}model": "llama"}, r"key tokenizer\.ggml\.tokens: expected an array of strings"),
    "twice": (spm_metadata(tokens=["a", "b", "a"]), "expected each token once, found 'a' as 0 and 2"),
    "scores": (
        spm_metadata(scores=np.zeros(3, "<f4")),
        "scores: expected 266 values, one for each token, found 3",
    ),
    "kinds": (bpe_metadata(token_type=np.zeros(3, "<i4")), "token_type: expected 262 values.*, found 3"),
    "merge": (bpe_metadata(merges=["a b", "ab"]), "merges: expected two tokens .*'ab' as merge 1"),
    "bos": (
        bpe_metadata(add_bos_token=True),
        "bos_token_id: expected an id, since add_bos_token is true, found none",
    ),
    "id": (
        bpe_metadata(eos_token_id=262, add_eos_token=True),
        "eos_token_id: expected an id from 0 to 261, found 262",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_sound_or_not_known_is_named(tmp_path: Path, case: str) -> None:
    metadata, said = REFUSED[case]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=f"m\\.gguf: .*{said}"):
        tokenizer_of(tmp_path, metadata)


def test_a_vocabulary_of_another_size_than_the_models_says_both(tmp_path: Path) -> None:
    rows = Stored.of(np.zeros((300, 2), "<f4"))
    path = write_gguf(tmp_path / "m.gguf", spm_metadata(), {"token_embd.weight": rows})
    with pytest.raises(
        CheckpointError, match=r"expected 300 tokens, as token_embd\.weight has rows, found 266"
    ):
        load_tokenizer(path)


@pytest.mark.parametrize("rule", SPLIT_RULES)
def test_every_split_rule_can_be_used_and_loses_nothing(tmp_path: Path, rule: str) -> None:
    tokenizer = tokenizer_of(tmp_path, bpe_metadata(pre=rule, bos_token_id=259))
    text = "Hello, it's 12345 ab\n\n 日本語 ½ x_y  z\t\r\n'LL été"
    assert tokenizer.decode(tokenizer.encode(text)) == text


WORDS = "HelloWorld's I'LL 12345 x=1 \u65e5\u672c\u3042!\n\n  e\u0301"
_TAIL = ["!\n\n", " "]
SPLIT: dict[str, list[str]] = {
    "chatglm-bpe": [
        *["HelloWorld", "'s", " I", "'LL", " ", "123", "45", " x", "=", "1", " \u65e5\u672c\u3042"],
        *[*_TAIL, " e", "\u0301"],
    ],
    "hunyuan": [
        *["HelloWorld", "'s", " I", "'LL", " ", *"12345", " x", "=", "1", " \u65e5\u672c\u3042"],
        *[*_TAIL, " e", "\u0301"],
    ],
    "gpt-4o": [
        *["Hello", "World's", " I'LL", " ", "123", "45", " x", "=", "1", " \u65e5\u672c\u3042"],
        *[*_TAIL, " e\u0301"],
    ],
    "tekken": [
        *["Hello", "World", "'s", " I", "'LL", " ", *"12345", " x", "=", "1", " \u65e5\u672c\u3042"],
        *[*_TAIL, " e\u0301"],
    ],
    "hunyuan-dense": [
        *["HelloWorld", "'s", " I", "'LL", " ", "123", "45", " x", "=", "1", " ", "\u65e5\u672c\u3042"],
        *[*_TAIL, " e\u0301"],
    ],
    "kimi-k2": [
        *["Hello", "World's", " I'LL", " ", "123", "45", " x", "=", "1", " ", "\u65e5\u672c", "\u3042"],
        *[*_TAIL, " e\u0301"],
    ],
    "exaone4": [
        *["HelloWorld", "'s", " I", "'", "LL", " 12345", " x", "=", "1", " \u65e5\u672c\u3042", "!"],
        *["\n\n ", " e", "\u0301"],
    ],
    "smollm": [
        *["HelloWorld", "'s", " I", "'", "LL", " ", *"12345", " x", "=", "1", " \u65e5\u672c\u3042", "!"],
        *["\n\n ", " e", "\u0301"],
    ],
}
GLM_RULES, GPT_4O_RULES = ("chatglm-bpe", "glm4", "dbrx", "smaug-bpe"), ("gpt-4o", "llama4", "minimax-m2")


@pytest.mark.parametrize("rule", SPLIT)
def test_rules_cut_words_where_the_models_do(rule: str) -> None:
    words = [WORDS]
    for pattern in SPLIT_RULES[rule].patterns:
        cut = Split(Regex(pattern), "isolated")
        words = [piece for word in words for piece, _ in cut.pre_tokenize_str(word)]
    assert words == SPLIT[rule]


@pytest.mark.parametrize("rules", [GLM_RULES, GPT_4O_RULES])
def test_rules_of_one_kind_have_one_description(rules: tuple[str, ...]) -> None:
    assert len({SPLIT_RULES[rule] for rule in rules}) == 1


def test_kimis_vocabulary_needs_no_merges(tmp_path: Path) -> None:
    metadata = bpe_metadata(pre="kimi-k2")
    del metadata[f"{KEY}merges"]
    assert tokenizer_of(tmp_path, metadata).encode("ab ab") == [256, 257]
    del metadata[f"{KEY}pre"]
    with pytest.raises(CheckpointError, match="merges"):
        tokenizer_of(tmp_path, metadata)


def test_a_unigram_vocabulary_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    pieces = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    pieces += [
        (name, score, NORMAL)
        for name, score in (("\u2581ab", -1.0), ("\u2581", -3.0), ("abc", -1.5), ("c", -2.0))
    ]
    names, scores, kinds = zip(*pieces, strict=True)
    metadata = spm_metadata(
        model="t5",
        tokens=list(names),
        scores=np.array(scores, "<f4"),
        token_type=np.array(kinds, "<i4"),
        eos_token_id=1,
        remove_extra_whitespaces=True,
    )
    tokenizer = tokenizer_of(tmp_path, metadata)
    assert tokenizer.encode("  abc   c ") == [3, 6, 4, 6, 1]
    assert 1 not in tokenizer.encode("c</s>c")[:-1], "no text of a user becomes a special token"
