"""Streaming text: no byte lost or doubled, whatever the ids and however they are cut into deltas."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paths import shared_data
from penstock.tokenizer.detokenizer import (
    EACH_BYTE,
    ByteDetokenizer,
    Detokenizer,
    NoText,
    PieceTable,
    WindowDetokenizer,
    byte_fallback_piece,
    byte_level_alphabet,
    byte_level_piece,
)
from penstock.tokenizer.tokenizer import JsonTokenizer, load_tokenizer

BYTE_TABLE = PieceTable(lambda token_id: bytes([token_id]))


def stream(detokenizer: Detokenizer, token_ids: Iterable[int]) -> list[str]:
    """Deltas of feeding one id at a time, and what `finish` adds."""
    return [*[detokenizer.feed([token_id]) for token_id in token_ids], detokenizer.finish()]


def stories() -> JsonTokenizer:
    tokenizer = load_tokenizer(shared_data("models", "stories260K"))
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer


def byte_level() -> JsonTokenizer:
    return JsonTokenizer(shared_data("tokenizers", "torchtitan_test_tokenizer.json").read_bytes())


@pytest.mark.parametrize("text", ["plain", "é", "日本語", "a😀b", "", "\x00\x7f", "👩‍👩‍👧"])
def test_characters_come_whole_and_only_once(text: str) -> None:
    deltas = stream(ByteDetokenizer(BYTE_TABLE), text.encode())
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)
    assert deltas[-1] == ""


@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=4))
def test_any_bytes_in_any_cut_give_the_text_of_the_whole(data: bytes, cuts: list[int]) -> None:
    detokenizer = ByteDetokenizer(BYTE_TABLE)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[begin:end] for begin, end in pairwise(edges)]
    text = "".join([detokenizer.feed(part) for part in parts]) + detokenizer.finish()
    assert text == data.decode(errors="replace")


def test_an_unfinished_character_is_held_back_and_shown_at_the_end() -> None:
    smile = "😀".encode()
    assert stream(ByteDetokenizer(BYTE_TABLE), smile[:3]) == ["", "", "", "\ufffd"]
    assert stream(ByteDetokenizer(BYTE_TABLE, EACH_BYTE), smile[:3]) == ["", "", "", "\ufffd" * 3]


def test_a_character_cut_off_by_other_text_is_replaced_and_the_text_goes_on() -> None:
    assert stream(ByteDetokenizer(BYTE_TABLE), b"\xf0\x9fA") == ["", "", "\ufffdA", ""]
    assert stream(ByteDetokenizer(BYTE_TABLE, EACH_BYTE), b"\xf0\x9fA") == ["", "", "\ufffd\ufffdA", ""]


def test_leading_spaces_are_dropped_once_even_when_they_come_late() -> None:
    detokenizer = ByteDetokenizer(BYTE_TABLE, strip_spaces=1)
    assert [detokenizer.feed(part) for part in (b"", b" ", b" a", b" ")] == ["", "", " a", " "]
    assert ByteDetokenizer(BYTE_TABLE, strip_spaces=1).feed(b"a b") == "a b"
    assert ByteDetokenizer(BYTE_TABLE, strip_spaces=2).feed(b"   a") == " a"


def test_hidden_ids_have_no_text() -> None:
    table = PieceTable(lambda token_id: bytes([token_id]), frozenset({66}))
    assert ByteDetokenizer(table).feed(b"ABC") == "AC"


def test_no_text_is_silent() -> None:
    assert stream(NoText(), [1, 2]) == ["", "", ""]


def test_the_byte_level_alphabet_is_gpt2s() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["A"] == 65
    assert alphabet["\u0120"] == 32  # the published stand-in for a space
    assert alphabet["\u010a"] == 10
    vocabulary = json.loads(shared_data("tokenizers", "gpt2_vocab.json").read_text())
    assert all(character in alphabet for token in list(vocabulary)[:-1] for character in token)


@pytest.mark.parametrize(
    ("token", "piece"),
    [
        ("<0xE2>", b"\xe2"),
        ("<0xZZ>", b"<0xZZ>"),
        ("\u2581a", b" a"),
        ("<0xE2", b"<0xE2"),
        ("é", "é".encode()),
    ],
)
def test_byte_fallback_pieces(token: str, piece: bytes) -> None:
    assert byte_fallback_piece(token) == piece


def test_an_added_token_with_foreign_characters_is_its_own_text() -> None:
    alphabet = byte_level_alphabet()
    assert byte_level_piece("\u0120hi", alphabet) == b" hi"
    assert byte_level_piece("<a b>", alphabet) == b"<a b>"


STORIES = ("models", "stories260K", "tokenizer.json")
BYTE_LEVEL = ("tokenizers", "torchtitan_test_tokenizer.json")


@pytest.mark.parametrize("parts", [STORIES, BYTE_LEVEL], ids=["byte fallback", "byte level"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_streamed_text_equals_the_librarys_decode(parts: tuple[str, ...], text: str) -> None:
    data = shared_data(*parts).read_bytes()
    tokenizer, library = JsonTokenizer(data), tokenizers.Tokenizer.from_buffer(data)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = "".join(stream(tokenizer.detokenizer([]), token_ids))
    assert streamed == library.decode(token_ids)
    assert tokenizer.decode(token_ids) == streamed
    if parts == STORIES:
        assert streamed == text


def test_naughty_strings_survive_the_round_trip() -> None:
    tokenizer = stories()
    for text in json.loads(shared_data("conformance", "blns.json").read_text()):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(stream(tokenizer.detokenizer([]), token_ids)) == text


@settings(max_examples=80, deadline=None)
@given(token_ids=st.lists(st.integers(3, 511), max_size=12))
def test_every_id_sequence_streams_to_its_decode(token_ids: list[int]) -> None:
    for tokenizer in (stories(), byte_level()):
        deltas = stream(tokenizer.detokenizer([]), token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)


def test_golden_text_of_stories260k() -> None:
    golden = json.loads((shared_data("models", "stories260K") / "golden.json").read_text())
    tokenizer = stories()
    assert "".join(stream(tokenizer.detokenizer([1]), golden["greedy_ids"])) == golden["greedy_text"]


def test_a_continuation_keeps_the_space_that_a_beginning_drops() -> None:
    tokenizer = stories()
    (once,) = [i for i in range(512) if tokenizer.token_bytes(i) == b" Once"]
    assert tokenizer.detokenizer([1]).feed([once]) == "Once"
    assert tokenizer.detokenizer([1, once]).feed([once]) == " Once"


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer = stories()
    ids = [1, *tokenizer.encode("a", add_special_tokens=False), 2]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> a</s>"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert stories().decode([100_000]) == ""


def wordpiece(tmp_path: Path) -> JsonTokenizer:
    vocabulary = {"[UNK]": 0, "he": 1, "##llo": 2, "wor": 3, "##ld": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, JsonTokenizer)
    return loaded


def test_a_decoder_that_looks_at_neighbours_is_streamed_by_window(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path)
    detokenizer = tokenizer.detokenizer([])
    assert isinstance(detokenizer, WindowDetokenizer)
    assert stream(detokenizer, [1, 2, 3, 4, 1]) == ["he", "llo", " wor", "ld", " he", ""]
    assert stream(tokenizer.detokenizer([1]), [2, 3]) == ["llo", " wor", ""]


def test_a_window_holds_back_an_unfinished_character_but_not_for_ever() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    smile = list("😀".encode())
    assert stream(WindowDetokenizer(decode, []), [65, *smile, 66]) == ["A", "", "", "", "😀", "B", ""]
    assert stream(WindowDetokenizer(decode, []), smile[:2]) == ["", "", "\ufffd"]
    endless = stream(WindowDetokenizer(decode, []), [0xFF] * 12)
    assert "".join(endless) == "\ufffd" * 12
    assert endless.index("\ufffd" * 5) == 4, "five bad bytes are no character"
