"""Directories with a tiktoken file alone: words, ranks and special tokens of the known families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.grammar.matcher import Matcher, load_vocabulary
from penstock.request import StructuredOutputs
from penstock.tokenizer.sources import tiktoken_vocabulary
from penstock.tokenizer.sources.model_files import tokenizer_content
from penstock.tokenizer.tokenizer import load_tokenizer
from vocabulary_files import tiktoken_bytes

TOKENS = [bytes([byte]) for byte in range(256)]
TOKENS += [
    b"ab",
    b" a",
    b"abc",
    "日".encode()[:2],
    "日".encode(),
    b"12",
    b"123",
    b"34",
    b"ba",
    b"aba",
    b"\n\n",
    b" ab",
]


def directory(path: Path, content: bytes, file: str = "tiktoken.model", **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / file).write_bytes(content)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_tokens_are_joined_by_rank_and_words_cut_by_the_family(tmp_path: Path) -> None:
    content = tiktoken_bytes(TOKENS)
    for name, numbers in (("QWenTokenizer", [*b"1234"]), ("ChatGLM4Tokenizer", [262, *b"4"])):
        path = directory(tmp_path / name, content, tokenizer_config={"tokenizer_class": name})
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode("aba 日1234", add_special_tokens=False)
        assert ids == [265, *b" ", 260, *numbers]
        assert tokenizer.decode(ids) == "aba 日1234"


def test_a_family_without_files_beside_has_its_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen = load_tokenizer(directory(tmp_path / "q", tiktoken_bytes(TOKENS), "qwen.tiktoken"))
    assert qwen.encode_trusted("<|im_start|>ab") == [len(TOKENS) + 1, 256]
    assert qwen.added_token_ids["<|extra_204|>"] == len(TOKENS) + 207
    assert len(TOKENS) + 1 not in qwen.encode("<|im_start|>ab")
    monkeypatch.setattr(tiktoken_vocabulary, "_LLAMA3_RANKS", len(TOKENS))
    llama = load_tokenizer(directory(tmp_path / "l", tiktoken_bytes(TOKENS), "tokenizer.model"))
    assert llama.encode("ab") == [len(TOKENS), 256], "the file of Meta's own form says no more"
    assert llama.added_token_ids["<|eot_id|>"] == len(TOKENS) + 9
    assert llama.added_token_ids["<|reserved_special_token_250|>"] == len(TOKENS) + 255


def test_special_tokens_are_those_that_the_files_name(tmp_path: Path) -> None:
    first = len(TOKENS)
    names = {first: "<|endoftext|>", first + 1: "[gMASK]", first + 3: "<sop>"}
    config = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "added_tokens_decoder": {str(key): {"content": name, "special": True} for key, name in names.items()},
    }
    path = directory(tmp_path / "m", tiktoken_bytes(TOKENS), "tokenizer.model", tokenizer_config=config)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("ab") == [first + 1, first + 3, 256]
    assert tokenizer.encode_trusted("<sop><|endoftext|>", add_special_tokens=False) == [first + 3, first]
    ids = tokenizer.encode("ab 日", add_special_tokens=False)
    matcher = Matcher(load_vocabulary(path, [first]), StructuredOutputs(choice=["ab 日"]))
    assert matcher.num_allowed([*ids, first]) == len(ids) + 1


GOOD = tiktoken_bytes(TOKENS)
REFUSED: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "family": (
        GOOD,
        {"config": {"model_type": "xverse"}},
        "for xverse, but texts can be split only for Qwen, Llama 3, GLM-4, Kimi",
    ),
    "line": (GOOD + b"!!! 7\n", {}, "line 269 is not a token in base64, a space and a rank"),
    "half": (GOOD + b"YWJj\n", {}, "line 269 is not a token in base64"),
    "rank": (GOOD + b"eHh4 3\n", {}, "line 269 is not a token and a rank that no other line has"),
    "far": (GOOD + b"eHh4 99999999999\n", {}, "line 269 is not a token and a rank"),
    "bytes": (tiktoken_bytes(TOKENS[:254]), {}, "has no token for the byte 0xfe, one of 2 missing bytes"),
    "size": (GOOD, {"config": {"vocab_size": 200}}, "tokens, but config.json has vocab_size 200"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_sound_or_not_known_is_named(tmp_path: Path, case: str) -> None:
    content, files, said = REFUSED[case]
    if case != "family":
        files = {**files, "tokenizer_config": {"tokenizer_class": "QWenTokenizer"}}
    with pytest.raises((ModelConfigError, UnsupportedModelError), match=said):
        load_tokenizer(directory(tmp_path / "m", content, **files))


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", b"not a vocabulary", "tokenizer.model")
    with pytest.raises(ModelConfigError, match=r"tokenizer\.model"):
        load_tokenizer(path)
    other = directory(tmp_path / "o", GOOD, "qwen.tiktoken")
    (path / "tokenizer.json").write_bytes(tokenizer_content(other) or b"")
    assert load_tokenizer(path).encode("ab") == [256]
