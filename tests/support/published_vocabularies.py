"""The published vocabularies in GGUF, with texts and the ids that llama.cpp gives them."""

from __future__ import annotations

from pathlib import Path

from paths import shared_data

NAMES = ("llama-spm", "deepseek-llm", "falcon", "starcoder")
_BETWEEN = "\n__ggml_vocab_test__\n"


def published(name: str) -> Path:
    """Return the file of a vocabulary; skips the test where it is absent."""
    return shared_data("tokenizers", "ggml", f"ggml-vocab-{name}.gguf")


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Return texts and their ids, without what is put around them."""
    path = published(name)
    texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split(_BETWEEN)
    lines = path.with_name(f"{path.name}.out").read_text(encoding="utf-8").split("\n")
    return [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=True)]
