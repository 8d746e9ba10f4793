"""Directories with `tekken.json` alone: special tokens first, words by the file's pattern."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelConfigError
from penstock.tokenizer.tokenizer import load_tokenizer

TOKENS = [bytes([byte]) for byte in range(256)] + [b"ab", b" ab", "日".encode(), b"not of the model"]
PATTERN = r" ?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"


def tekken(**changes: Any) -> dict[str, Any]:
    config = {
        "pattern": PATTERN,
        "default_vocab_size": 24 + 259,
        "default_num_special_tokens": 24,
        "version": "v3",
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]
    return {"config": config | changes.pop("config", {}), "vocab": vocab} | changes


def directory(path: Path, content: dict[str, Any], vocab_size: int = 283) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tekken.json").write_text(json.dumps(content))
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (path / "tokenizer.model").write_bytes(b"an older one")
    return path


def test_special_tokens_have_the_first_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path / "m", tekken()))
    ids = tokenizer.encode("日1ab ab")
    assert ids == [1, 24 + 258, 24 + ord("1"), 24 + 256, 24 + 257]
    assert tokenizer.decode(ids) == "日1ab ab"
    assert tokenizer.encode_trusted("[INST]ab</s>", add_special_tokens=False) == [3, 280, 2]
    assert not {2, 3} & set(tokenizer.encode("[INST]</s>"))
    assert tokenizer.added_token_ids["<SPECIAL_23>"] == 23


def test_named_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    named = [
        {"rank": 0, "token_str": "<s>", "is_control": True},
        {"rank": 5, "token_str": "[THINK]", "is_control": True},
    ]
    tokenizer = load_tokenizer(directory(tmp_path / "m", tekken(special_tokens=named)))
    assert tokenizer.encode_trusted("[THINK]") == [0, 5]
    assert "[INST]" not in tokenizer.added_token_ids


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"config": {}}, "cannot be read"),
    "pattern": (tekken(config={"pattern": "("}), "cannot be read"),
    "fewer": (tekken(config={"default_vocab_size": 300}), "276 tokens are not from 256 to the 260"),
    "many": (tekken(config={"default_num_special_tokens": 2**40}), "special tokens are not from 0 to"),
    "rank": (tekken(special_tokens=[{"rank": 99, "token_str": "x"}]), "'x' has rank 99 of 24"),
    "name": (
        tekken(special_tokens=[{"rank": 1, "token_str": "<SPECIAL_2>"}]),
        "two special tokens have the same name",
    ),
    "order": (tekken(vocab=tekken()["vocab"][::-1]), "token 0 has a wrong rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_sound_is_named(tmp_path: Path, case: str) -> None:
    content, said = REFUSED[case]
    with pytest.raises(ModelConfigError, match=rf"tekken\.json.* {said}"):
        load_tokenizer(directory(tmp_path / "m", content))


def test_a_vocabulary_larger_than_the_models_says_both(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"has 283 tokens, but config\.json has vocab_size 200"):
        load_tokenizer(directory(tmp_path / "m", tekken(), vocab_size=200))
