"""Chooses where a model's vocabulary comes from, and gives it in the one form that everything else reads.

A model is a directory or a GGUF file. `tokenizer_content` returns a `tokenizer.json`, as it is or written
from another source; `tokenizer_config_content` does the same for `tokenizer_config.json`. Called by
`tokenizer.tokenizer`, `tokenizer.vocabularies`, `grammar.matcher` and the code that sends these files to
other hosts. The readers of GGUF and SentencePiece are imported where they are used, because they need numpy,
which is slow to import.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ModelConfigError
from penstock.tokenizer.sources.tekken_vocabulary import tekken_tokenizer
from penstock.tokenizer.sources.tiktoken_vocabulary import is_tiktoken, tiktoken_tokenizer
from penstock.tokenizer.sources.tokenizer_settings import read_settings

MAX_TOKENIZER_BYTES = 256 * 2**20
_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_TEKKEN = "tekken.json"
_OTHERS = (_TEKKEN, "tokenizer.model", "tiktoken.model", "*.tiktoken")  # in the order of preference


def vocabulary_file(model: Path) -> Path | None:
    """Return the file that a model's vocabulary is in; None if there is none.

    Args:
        model: its directory, or a GGUF file.
    """
    if model.is_file():
        return model
    if (model / _JSON).is_file():
        return model / _JSON
    found = (path for pattern in _OTHERS for path in sorted(model.glob(pattern)) if path.is_file())
    return next(found, None)


def tokenizer_content(model: Path) -> bytes | None:
    """Return the model's vocabulary as the content of a `tokenizer.json`; None if the model has none.

    Args:
        model: its directory, or a GGUF file.

    Raises:
        ModelError: the vocabulary is not sound, of a kind that is not read, or too large for the model.
    """
    file = vocabulary_file(model)
    if file is None:
        return None
    if file == model:
        from penstock.gguf.file import GgufFile
        from penstock.tokenizer.sources.gguf_vocabulary import gguf_tokenizer, has_vocabulary

        opened = GgufFile.open(file)
        return gguf_tokenizer(opened) if has_vocabulary(opened) else None
    content = _bounded(file)
    if file.name == _JSON:
        return content
    settings = read_settings(model)
    if file.name == _TEKKEN:
        return tekken_tokenizer(content, str(file), settings)
    if is_tiktoken(content):
        return tiktoken_tokenizer(content, str(file), settings)
    from penstock.tokenizer.sources.sentencepiece_vocabulary import sentencepiece_tokenizer

    return sentencepiece_tokenizer(content, str(file), settings)


def tokenizer_config_content(model: Path) -> bytes:
    """Return the content of the model's `tokenizer_config.json`, with chat templates; empty if it has none.

    Args:
        model: its directory, or a GGUF file.
    """
    if model.is_file():
        from penstock.gguf.file import GgufFile
        from penstock.tokenizer.sources.gguf_vocabulary import gguf_tokenizer_config, has_vocabulary

        opened = GgufFile.open(model)
        return gguf_tokenizer_config(opened.metadata) if has_vocabulary(opened) else b""
    path = model / _CONFIG
    return _bounded(path) if path.is_file() else b""


def _bounded(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ModelConfigError(f"{path} has {size} bytes, more than {MAX_TOKENIZER_BYTES}.")
    return path.read_bytes()
