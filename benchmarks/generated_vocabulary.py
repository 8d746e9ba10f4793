"""A byte-level tokenizer of any size, made from a seed: what a large vocabulary costs, without a model's.

Ids grow as merges do: each new token is one that is there with one more piece behind it, so that all prefixes
of a token are tokens, as in the vocabularies of real models. Most are words, with or without a space before;
some are digits, punctuation as code has it, and letters of several bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from penstock.tokenizer.detokenizer import byte_level_alphabet

END = "<|end|>"
_LETTERS = "etaoinshrdlucmfwygpbvkASTCERI0123.,:;-_(){}[]=/éж中"  # the most frequent ones first
_PIECES = list(_LETTERS)
_WEIGHTS = [len(_PIECES) - index for index in range(len(_PIECES))]
_SPECIAL_FIRST = ['"', '":', '",', '{"', '":"', '","', '"}', "\\", "\n"]


def write_tokenizer(directory: Path, vocab_size: int, seed: int = 1) -> int:
    """Write `tokenizer.json` with so many ids; returns the one that ends a text."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    chance = random.Random(seed)

    def spelt(text: str) -> str:
        return "".join(letters[byte] for byte in text.encode())

    vocab = {letter: index for index, letter in enumerate(sorted(letters.values()))}
    merges: list[list[str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocab and len(vocab) < vocab_size - 1:
            merges.append([left, right])
            vocab[left + right] = len(vocab)

    for text in (*_SPECIAL_FIRST, *(piece for piece in _PIECES if len(spelt(piece)) > 1)):
        for end in range(1, len(spelt(text))):
            merge(spelt(text)[:end], spelt(text)[end])
    pieces = [spelt(piece) for piece in _PIECES]
    grown = [spelt(" "), *pieces[:40]]
    while len(vocab) < vocab_size - 1:
        left, right = chance.choice(grown), chance.choices(pieces, _WEIGHTS)[0]
        if len(left) < 14 and left + right not in vocab:
            merge(left, right)
            grown.append(left + right)
    vocab[END] = vocab_size - 1
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocab_size - 1,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    del tokenizer["model"]["vocab"][END]  # type: ignore[index]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return vocab_size - 1
