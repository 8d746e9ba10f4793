"""Models whose ids mean the same, and models whose ids do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_files import write_gguf
from penstock.tokenizer.vocabularies import vocabulary_difference

PIECES = {"a": 0, "b": 1, "ab": 2}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(
        name: str, vocabulary: object, added: list[dict[str, Any]] | None = None, **more: Any
    ) -> Path:
        (tmp_path / name).mkdir()
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": added or [], **more}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        return tmp_path / name

    return written


def test_the_order_and_all_but_the_pieces_may_differ(write: Any) -> None:
    one = write("one", PIECES, [{"id": 3, "content": "<s>"}])
    other = write(
        "other", dict(reversed(PIECES.items())), [{"id": 3, "content": "<s>", "special": True}], x=1
    )
    assert vocabulary_difference(one, other) == ""


def test_the_first_id_that_differs_is_named(write: Any) -> None:
    one, other = write("one", PIECES), write("other", {"a": 0, "b": 2, "ab": 1})
    assert vocabulary_difference(one, other) == "token 1 is 'b' in one and 'ab' in the other"


def test_a_piece_that_only_one_has_is_a_difference(write: Any) -> None:
    one, other = write("one", PIECES), write("other", PIECES, [{"id": 3, "content": "<s>"}])
    assert vocabulary_difference(one, other) == "token 3 is none in one and '<s>' in the other"


def test_a_list_of_scored_pieces_is_a_vocabulary_too(write: Any) -> None:
    one, other = write("one", PIECES), write("other", [["a", -1.0], ["b", -2.0], ["ab", -3.0]])
    assert vocabulary_difference(one, other) == ""


def test_without_both_files_nothing_is_said(write: Any, tmp_path: Path) -> None:
    assert vocabulary_difference(write("one", PIECES), tmp_path) == ""


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": {"vocab": 3}}', b'{"added_tokens": [{}]}'])
def test_what_cannot_be_read_is_another_vocabulary(write: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert vocabulary_difference(write("one", PIECES), tmp_path).startswith("token 0 is 'a' in one")


def test_another_form_of_the_file_is_no_difference(write: Any, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.merges": ["a b"],
    }
    file = write_gguf(tmp_path / "m.gguf", metadata, {})
    assert vocabulary_difference(write("one", PIECES), file) == ""
    assert "token 1 is 'b' in one" in vocabulary_difference(file, write("two", {"a": 0, "ab": 2}))
    write_gguf(file, metadata | {"tokenizer.ggml.tokens": ["a", "a"]}, {})
    assert "token 0 is none in one" in vocabulary_difference(file, tmp_path / "one"), "as of another bad file"


def test_names_that_a_gguf_file_has_for_rows_without_a_token_are_not_compared(
    write: Any, tmp_path: Path
) -> None:
    """Models of one family have tables of different lengths; converters name what is behind the tokens."""
    files = []
    for index, count in enumerate((5, 8)):
        padding = [f"[PAD{token_id}]" for token_id in range(len(PIECES), count)]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*PIECES, *padding],
            "tokenizer.ggml.merges": ["a b"],
        }
        files.append(write_gguf(tmp_path / f"{index}.gguf", metadata, {}))
    assert vocabulary_difference(*files) == vocabulary_difference(files[0], write("one", PIECES)) == ""
    other = write("other", PIECES | {"[PAD9]": 3})
    assert vocabulary_difference(files[0], other) == "token 3 is none in one and '[PAD9]' in the other"
