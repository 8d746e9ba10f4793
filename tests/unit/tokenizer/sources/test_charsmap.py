"""Tables of characters that lead out of their bounds are refused before a text can do so."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from penstock.errors import ModelConfigError
from penstock.tokenizer.sources.charsmap import require_sound_charsmap
from penstock.tokenizer.tokenizer import load_tokenizer
from vocabulary_files import CONTROL, NORMAL, UNIGRAM, UNKNOWN, message, sentencepiece_bytes

PIECES = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
PIECES += [(name, -1.0, NORMAL) for name in ("\u2581", "y", "z")]
ROOT = 256
X = ROOT ^ ord("x")


def table(units: dict[int, int] | None = None, texts: bytes = b"yy\0", count: int = 512) -> bytes:
    """Return a table that makes `yy` of `x`, with these units changed."""
    held = {0: ROOT << 10, X: (X ^ ROOT) << 10 | 1 << 8 | ord("x"), ROOT: 1 << 31}
    held |= units or {}
    trie = b"".join(held.get(index, 0).to_bytes(4, "little") for index in range(count))
    return len(trie).to_bytes(4, "little") + trie + texts


def model(charsmap: bytes) -> bytes:
    content = sentencepiece_bytes(PIECES, algorithm=UNIGRAM, byte_fallback=False)
    return content + message(3, message(2, charsmap))


def test_what_a_sound_table_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model(table()))
    assert load_tokenizer(tmp_path).encode("zx", add_special_tokens=False) == [3, 5, 4, 4]


UNSOUND = {
    "length": (b"\x00\x02", "a table of 2 bytes has a trie of 512"),
    "trie": (b"\x00\x10\x00\x00" + bytes(8), "a table of 12 bytes has a trie of 4096"),
    "root": (table({0: 1024 << 10}), "leads outside its bounds"),
    "node": (table({X: (X ^ 4096) << 10 | ord("x")}), "leads outside its bounds"),
    "leaf": (table({X: (X ^ 4096) << 10 | 1 << 8 | ord("x")}), "leads outside its bounds"),
    "short": (table(count=300), "leads outside its bounds"),
    "text": (table({ROOT: 1 << 31 | 3}), "names a text that it does not have"),
    "inside": (table({ROOT: 1 << 31 | 1}, "é\0".encode()), "names a text that it does not have"),
    "end": (table(texts=b"yy"), "names a text that it does not have"),
    "utf-8": (table(texts=b"\xff\0"), "utf-8"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_table_is_named(tmp_path: Path, case: str) -> None:
    content, said = UNSOUND[case]
    (tmp_path / "tokenizer.model").write_bytes(model(content))
    with pytest.raises(ModelConfigError, match=rf"tokenizer\.model .*{re.escape(said)}"):
        load_tokenizer(tmp_path)


def test_no_change_of_a_table_lets_a_text_break_the_library(tmp_path: Path) -> None:
    choice = random.Random(6)
    for _ in range(60):
        content = bytearray(table())
        for _ in range(choice.choice((1, 4))):
            content[choice.choice((4, 5, 6, 4 + 4 * X, 5 + 4 * X, 4 + 4 * ROOT, -1, -2))] = choice.randrange(
                256
            )
        try:
            require_sound_charsmap(bytes(content))
        except ValueError:
            continue
        (tmp_path / "tokenizer.model").write_bytes(model(bytes(content)))
        load_tokenizer(tmp_path).encode("x xx zxé\x01 \u3042")
