"""Loading and encoding: what users write is text, and bad files are named."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from paths import shared_data
from penstock.errors import InvalidRequestError, ModelConfigError
from penstock.tokenizer.sources import model_files
from penstock.tokenizer.tokenizer import AbsentTokenizer, JsonTokenizer, load_tokenizer, special_pattern


def stories() -> JsonTokenizer:
    tokenizer = load_tokenizer(shared_data("models", "stories260K"))
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer


def test_special_tokens_in_user_text_are_text() -> None:
    tokenizer = stories()
    ids = tokenizer.encode("a</s>b<s>")
    assert ids[0] == 1
    assert 1 not in ids[1:]
    assert 2 not in ids
    assert tokenizer.decode(ids) == "a</s>b<s>"


def test_special_tokens_in_trusted_text_mean_themselves() -> None:
    tokenizer = stories()
    assert 2 in tokenizer.encode_trusted("a</s>b")
    assert tokenizer.encode("a</s>b") == tokenizer.encode("a</s>b"), "one does not switch the other over"


@pytest.mark.parametrize("text", ["Once upon a time", "é 日本 😀", "", "  two  spaces "])
def test_text_without_special_tokens_is_encoded_as_the_library_does(text: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(shared_data("models", "stories260K") / "tokenizer.json"))
    assert stories().encode(text) == library.encode(text).ids
    assert (
        stories().encode(text, add_special_tokens=False) == library.encode(text, add_special_tokens=False).ids
    )


def test_lengths_that_a_file_has_left_from_training_do_not_change_prompts() -> None:
    plain = stories()
    file = json.loads(shared_data("models", "stories260K").joinpath("tokenizer.json").read_bytes())
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    tokenizer, text = JsonTokenizer(json.dumps(file).encode()), "Once upon a time there was a mill."
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.encode_trusted(text) == plain.encode_trusted(text)


def test_threads_may_encode_both_ways_at_once() -> None:
    tokenizer = stories()
    expected = (tokenizer.encode("x</s>"), tokenizer.encode_trusted("x</s>"))
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: (tokenizer.encode("x</s>"), tokenizer.encode_trusted("x</s>")), range(200))
        )
    assert set(map(str, found)) == {str(expected)}


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        stories().encode("a\ud800")


def test_a_directory_without_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, AbsentTokenizer)
    with pytest.raises(InvalidRequestError, match="token ids"):
        tokenizer.encode("a")
    assert tokenizer.decode([1]) == ""
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.detokenizer([1]).feed([2]) == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe", b'{"decoder": 7}'])
def test_a_bad_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_TOKENIZER_BYTES", 10)
    (tmp_path / "tokenizer.json").write_bytes(b" " * 11)
    with pytest.raises(ModelConfigError, match="11 bytes"):
        load_tokenizer(tmp_path)


def test_token_bytes_show_special_tokens_and_single_bytes() -> None:
    tokenizer = stories()
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_bytes(403) == b" Once"


def test_the_special_pattern_prefers_the_longest_and_may_be_empty() -> None:
    class Fake(AbsentTokenizer):
        special_tokens = ["<|a|>", "<|a|>b", "x"]

    assert special_pattern(Fake()).findall("<|a|>b x <|a|>") == ["<|a|>b", "<|a|>"]
    assert special_pattern(AbsentTokenizer()).search("anything") is None
