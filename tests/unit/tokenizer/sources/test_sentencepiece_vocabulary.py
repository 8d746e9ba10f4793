"""Directories with a SentencePiece model alone: ids as its own library gives them, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ModelConfigError, ModelError, UnsupportedModelError
from penstock.tokenizer.sources.sentencepiece_file import read_sentencepiece
from penstock.tokenizer.tokenizer import JsonTokenizer, load_tokenizer
from vocabulary_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    message,
    number,
    numbered,
    sentencepiece_bytes,
)

START = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
WORDS = ["\u2581", "a", "b", "aa", "ab", "\u2581a", "\u2581ab", "aab", "\u2581aa", "\u2581\u2581"]
PIECES = [
    *START,
    *BYTES,
    ("<sep>", 0.0, USER_DEFINED),
    ("x\u2581y", 0.0, USER_DEFINED),
    *((name, -float(rank), NORMAL) for rank, name in enumerate(WORDS)),
]
IDS = {name: index for index, (name, _, _) in enumerate(PIECES)}


def directory(path: Path, content: bytes, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(content)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


SHAPES: dict[str, Callable[[], bytes]] = {
    "bpe": lambda: sentencepiece_bytes(PIECES),
    "no prefix": lambda: sentencepiece_bytes(PIECES, dummy_prefix=False),
    "unigram": lambda: sentencepiece_bytes(unigram_pieces(), algorithm=UNIGRAM),
}


def unigram_pieces() -> list[tuple[str, float, int]]:
    chances = [-2.0, -3.25, -3.5, -4.0, -3.75, -2.75, -4.5, -5.125, -4.75, -6.0]
    normal = [(name, chance, NORMAL) for name, chance in zip(WORDS, chances, strict=True)]
    return [*START, *BYTES, *PIECES[259:261], *normal]


def test_pieces_are_joined_and_the_rest_is_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path / "m", sentencepiece_bytes(PIECES)))
    assert tokenizer.encode("aab é") == [
        1,
        *(IDS[name] for name in ("\u2581", "aab", "\u2581")),
        3 + 0xC3,
        3 + 0xA9,
    ]
    assert tokenizer.encode("a<sep>b") == [1, IDS["\u2581a"], IDS["<sep>"], IDS["b"]], "no space behind it"
    assert IDS["x\u2581y"] in tokenizer.encode("x y")
    assert tokenizer.decode(tokenizer.encode("  aab é<sep>x y")) == "  aab é<sep>x y"


def test_spaces_are_collapsed_where_the_model_says_so(tmp_path: Path) -> None:
    content = sentencepiece_bytes(unigram_pieces(), algorithm=UNIGRAM, collapse_spaces=True)
    tokenizer = load_tokenizer(directory(tmp_path / "m", content))
    assert tokenizer.encode("  ab   a ") == tokenizer.encode("ab a") == [1, IDS["\u2581ab"], IDS["\u2581a"]]
    assert tokenizer.encode("  ", add_special_tokens=False) == []


@pytest.mark.parametrize("shape", ["bpe", "no prefix", "unigram"])
def test_no_text_becomes_a_special_token_or_a_byte(tmp_path: Path, shape: str) -> None:
    tokenizer = load_tokenizer(directory(tmp_path / "m", SHAPES[shape]()))
    for text in ("</s>", "<s>", "a</s>a", "<0x41>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert not {1, 2, 3 + 0x41} & set(ids)
        assert tokenizer.decode(ids) == text
    assert 2 in tokenizer.encode_trusted("a</s>")


def test_what_is_put_around_a_text_is_what_the_files_say(tmp_path: Path) -> None:
    content = sentencepiece_bytes(PIECES)
    for config, first, last in (
        ({}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"tokenizer_class": "T5TokenizerFast"}, [], [2]),
    ):
        tokenizer = load_tokenizer(directory(tmp_path / "m", content, tokenizer_config=config))
        assert tokenizer.encode("ab") == [*first, IDS["\u2581ab"], *last]


def test_the_space_before_a_text_is_what_the_files_say(tmp_path: Path) -> None:
    content = sentencepiece_bytes(PIECES)
    for config, expected in (
        ({}, ["\u2581ab", "</s>", "\u2581ab"]),
        ({"legacy": False}, ["\u2581ab", "</s>", "ab"]),
        ({"add_prefix_space": False}, ["ab", "</s>", "ab"]),
    ):
        tokenizer = load_tokenizer(directory(tmp_path / "m", content, tokenizer_config=config))
        assert tokenizer.encode_trusted("ab</s>ab", add_special_tokens=False) == [
            IDS[name] for name in expected
        ]


def test_added_tokens_have_the_ids_and_names_that_the_files_say(tmp_path: Path) -> None:
    last = len(PIECES)
    added = {
        "259": {"content": "[TOOL]", "special": True},
        str(last + 3): {"content": "<think>", "special": False},
    }
    path = directory(
        tmp_path / "m",
        sentencepiece_bytes(PIECES),
        tokenizer_config={"added_tokens_decoder": added},
        added_tokens={"<|new|>": last},
        config={"vocab_size": last + 4},
    )
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, JsonTokenizer)
    ids = tokenizer.encode_trusted("[TOOL]<|new|><think>", add_special_tokens=False)
    assert ids == [259, last, last + 3]
    assert last + 3 in tokenizer.encode("<think>")
    assert 259 not in tokenizer.encode("[TOOL]")
    assert tokenizer.decode(ids) == "<think>"
    assert tokenizer.added_token_ids["<think>"] == last + 3


REFUSED: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "empty": (b"", {}, "it has no pieces"),
    "cut": (
        sentencepiece_bytes(PIECES)[:-3],
        {},
        "is not a readable SentencePiece model: a field of",
    ),
    "other": (b"\x89PNG\r\n\x1a\n" * 9, {}, "is not a readable SentencePiece model"),
    "endless": (b"\xff" * 30, {}, "the number at byte 0 is not terminated"),
    "long": (
        number(1 << 3 | 2) + number(2**62),
        {},
        "a field of 4611686018427387904 bytes is cut off after 0",
    ),
    "words": (
        sentencepiece_bytes(START, algorithm=3),
        {},
        "of words, but only unigram and BPE models are supported",
    ),
    "behind": (sentencepiece_bytes(START, trainer=numbered(24, 1)), {}, "a space after them"),
    "twice": (sentencepiece_bytes([*START, START[1]]), {}, "has the token '<s>' twice"),
    "text": (message(1, message(1, b"\xff")), {}, "utf-8"),
    "size": (
        sentencepiece_bytes(PIECES),
        {"config": {"vocab_size": 100}},
        "has 271 tokens, .*vocab_size 100",
    ),
    "far": (sentencepiece_bytes(START), {"added_tokens": {"x": 2**40}}, "has 3 pieces, but an added token"),
    "added": (
        sentencepiece_bytes(START),
        {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "y"}}}},
        "added_tokens_decoder has 'x' for an id",
    ),
    "same name": (
        sentencepiece_bytes(START),
        {"tokenizer_config": {"added_tokens_decoder": {"3": {"content": "y"}, "4": {"content": "y"}}}},
        "the added token 'y'",
    ),
    "config": (
        sentencepiece_bytes(START),
        {"tokenizer_config": []},
        r"tokenizer_config\.json cannot be read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_sound_or_not_known_is_named(tmp_path: Path, case: str) -> None:
    content, files, said = REFUSED[case]
    with pytest.raises((ModelConfigError, UnsupportedModelError), match=said):
        load_tokenizer(directory(tmp_path / "m", content, **files))


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
@given(place=st.integers(0, 10**6), change=st.binary(min_size=1, max_size=6))
def test_no_change_of_bytes_gives_another_error(place: int, change: bytes) -> None:
    content = bytearray(sentencepiece_bytes([*START, *PIECES[259:]]))
    place %= len(content)
    content[place : place + len(change)] = change
    with contextlib.suppress(ModelError):
        read_sentencepiece(bytes(content), "tokenizer.model")
