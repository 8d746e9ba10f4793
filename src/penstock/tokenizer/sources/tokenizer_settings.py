"""The settings of a tokenizer in a model directory, beside the vocabulary.

They are read from `tokenizer_config.json`, `added_tokens.json` and `config.json`, as far as there are such
files. `model_files` reads them for vocabularies in files that do not have such settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ModelConfigError
from penstock.tokenizer.sources.document import Added

_MAX_BYTES = 64 << 20


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    special: bool = False


class _TokenizerConfig(msgspec.Struct, frozen=True):
    tokenizer_class: str | None = None
    added_tokens_decoder: dict[str, _AddedToken] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None


class _ModelConfig(msgspec.Struct, frozen=True):
    model_type: str | None = None
    vocab_size: int | None = None
    text_config: _ModelConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """The settings of one model. A value is None or "" if the files do not give it.

    Attributes:
        tokenizer_class: name of the class that the model's makers used.
        added: tokens beyond the vocabulary, and other names for tokens in it.
        add_bos: the beginning-of-sequence id is put before a text.
        add_eos: the end-of-sequence id is put behind a text.
        add_prefix_space: a space is put before a text.
        legacy: that space is put before each stretch of text between special tokens, and not only before the
            first one.
        model_type: the architecture of the model, as `config.json` names it.
        vocab_size: number of rows of the model's table of embeddings.
    """

    tokenizer_class: str
    added: tuple[Added, ...]
    add_bos: bool | None
    add_eos: bool | None
    add_prefix_space: bool | None
    legacy: bool
    model_type: str
    vocab_size: int | None

    def require_room(self, name: str, num_tokens: int) -> None:
        """Raise `ModelConfigError` if the vocabulary has more tokens than the model has rows for."""
        if self.vocab_size is not None and num_tokens > self.vocab_size:
            raise ModelConfigError(
                f"{name} has {num_tokens} tokens, but config.json has vocab_size {self.vocab_size}.",
                remedy="Put the tokenizer of this model into its directory.",
                param="vocab_size",
            )


def read_settings(directory: Path) -> TokenizerSettings:
    """Return the settings of a model directory. Raises `ModelConfigError` for a file that is not sound."""
    config: _TokenizerConfig = (
        _read(directory / "tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    )
    model: _ModelConfig = _read(directory / "config.json", _ModelConfig) or _ModelConfig()
    text = model.text_config or _ModelConfig()
    return TokenizerSettings(
        tokenizer_class=config.tokenizer_class or "",
        added=_added(directory, config),
        add_bos=config.add_bos_token,
        add_eos=config.add_eos_token,
        add_prefix_space=config.add_prefix_space,
        legacy=config.legacy is not False,
        model_type=model.model_type or text.model_type or "",
        vocab_size=model.vocab_size or text.vocab_size,
    )


def _added(directory: Path, config: _TokenizerConfig) -> tuple[Added, ...]:
    listed = _read(directory / "added_tokens.json", dict[str, int]) or {}
    tokens = {token_id: Added(id=token_id, content=name, special=True) for name, token_id in listed.items()}
    for text, named in (config.added_tokens_decoder or {}).items():
        if not text.isascii() or not text.isdecimal():
            raise ModelConfigError(f"tokenizer_config.json: added_tokens_decoder has {text!r} for an id.")
        tokens[int(text)] = Added(id=int(text), content=named.content, special=named.special)
    names: dict[str, int] = {}
    for token in tokens.values():
        if not token.content or token.id < 0 or names.setdefault(token.content, token.id) != token.id:
            raise ModelConfigError(
                f"tokenizer_config.json: the added token {token.content!r} of id {token.id} is empty, or "
                "another one has its name."
            )
    return tuple(tokens[token_id] for token_id in sorted(tokens))


def _read(path: Path, kind: Any) -> Any:
    """Return the content of a file, or None where there is none."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ModelConfigError(f"{path.name} has {size} bytes, more than {_MAX_BYTES}.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelConfigError(f"{path.name} cannot be read: {error}.") from error
