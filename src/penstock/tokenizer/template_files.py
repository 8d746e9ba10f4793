"""Finds the chat template of a model: beside its weights, in its GGUF file, or in a file that the user names.

Called once by each process that renders messages; `chat_template` compiles and renders what is found here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.errors import ModelConfigError
from penstock.tokenizer.chat_template import AbsentChatTemplate, ChatTemplate, JinjaChatTemplate
from penstock.tokenizer.sources.model_files import tokenizer_config_content
from penstock.tokenizer.tokenizer import Tokenizer

MAX_FILE_BYTES = 4 * 2**20
_CONFIG_FILE = "tokenizer_config.json"


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _SpecialToken(msgspec.Struct, frozen=True):
    content: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _SpecialToken | None = None
    eos_token: str | _SpecialToken | None = None
    unk_token: str | _SpecialToken | None = None
    pad_token: str | _SpecialToken | None = None


def load_chat_template(model: Path, tokenizer: Tokenizer, file: str | None = None) -> ChatTemplate:
    """Return the chat template of a model, or of `file` if that is given.

    Args:
        model: its directory, or a GGUF file.
        tokenizer: encodes what the template renders.
        file: a file that the user names: Jinja, or JSON with a `chat_template`.

    Raises:
        ModelConfigError: a file is bad, or `file` is missing or has no template.
    """
    config = _parse_config(tokenizer_config_content(model), model / _CONFIG_FILE if model.is_dir() else model)
    if file is None:
        path, source, tool_source = _own_template(model, config)
    else:
        path = Path(file)
        source, tool_source = _given_sources(path)
    if not source:
        return AbsentChatTemplate()
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: _content(getattr(config, name)) for name in names}
    return JinjaChatTemplate(source, special, tokenizer, tool_source, name=f"the chat template of {path}")


def _own_template(model: Path, config: _TokenizerConfig) -> tuple[Path, str, str]:
    """Return where the model has its template, the template, and the one for requests with tools."""
    path = model / "chat_template.jinja"
    if source := _read_bounded(path).decode(errors="replace"):
        return path, source, ""
    path = model / "chat_template.json"  # of models that read more than text
    if config.chat_template is None and path.is_file():
        return path, *_given_sources(path)
    return (model / _CONFIG_FILE if model.is_dir() else model), *_sources(config)


def _content(token: str | _SpecialToken | None) -> str:
    return token.content if isinstance(token, _SpecialToken) else token or ""


def _sources(config: _TokenizerConfig) -> tuple[str, str]:
    """Return the template, and the one for requests with tools; "" for one that is missing."""
    template = config.chat_template
    if isinstance(template, list):
        named = {entry.name: entry.template for entry in template}
        return named.get("default", ""), named.get("tool_use", "")
    return template or "", ""


def _given_sources(path: Path) -> tuple[str, str]:
    """Return the templates of a Jinja file, or of a JSON file with a `chat_template`, as `_sources` does."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else _read_bounded(path)
    except OSError as error:
        raise ModelConfigError(
            f"{path} cannot be read: {error.strerror}.", param="--chat-template"
        ) from error
    if path.suffix == ".json" and data:
        sources = _sources(_parse_config(_read_bounded(path), path))
        expected = "a chat_template"
    else:
        sources, expected = (data.decode("utf-8-sig", errors="replace"), ""), "a template"
    if not sources[0].strip():
        raise ModelConfigError(
            f"{path} does not have {expected}.",
            remedy="Name a .jinja file, or a JSON file with chat_template.",
            param="--chat-template",
        )
    return sources


def _parse_config(data: bytes, path: Path) -> _TokenizerConfig:
    try:
        return msgspec.json.decode(data, type=_TokenizerConfig) if data else _TokenizerConfig()
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelConfigError(f"{path.name} cannot be read: {error}.") from error


def _read_bounded(path: Path) -> bytes:
    """Return the content of a file of at most `MAX_FILE_BYTES`; it is empty if there is no file."""
    if not path.is_file():
        return b""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelConfigError(f"{path.name} has {size} bytes, more than {MAX_FILE_BYTES}.")
    return path.read_bytes()
