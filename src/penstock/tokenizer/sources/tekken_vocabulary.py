"""The vocabulary of a directory that has Mistral's `tekken.json` and no `tokenizer.json`.

The file has the bytes of each token in the order of ranks, the pattern that cuts a text into words, and the
special tokens. Special tokens have the first ids; the id of any other token is its rank plus their number.
Called by `sources.model_files`.
"""

from __future__ import annotations

import binascii

import msgspec

from penstock.errors import ModelConfigError
from penstock.tokenizer.sources.document import (
    Added,
    ByteLevel,
    Tokens,
    byte_level_document,
    byte_level_names,
)
from penstock.tokenizer.sources.merges import ranked_merges
from penstock.tokenizer.sources.tokenizer_settings import TokenizerSettings

_MAX_SPECIAL = 1 << 16
_BEGIN = "<s>"
# The special tokens of files that name none, by id from 0 on.
_FIRST_SPECIAL = (
    *(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
    ),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
    ),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class _Config(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct, frozen=True):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class _File(msgspec.Struct, frozen=True):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def tekken_tokenizer(content: bytes, name: str, settings: TokenizerSettings) -> bytes:
    """Return the content of a `tokenizer.json` that encodes as the file says.

    Args:
        content: the bytes of the file.
        name: what errors call the file.
        settings: the settings of the tokenizer in the model's directory.

    Raises:
        ModelConfigError: the file is not sound, or has more tokens than the model has rows for.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
        special = _special(file)
        ranks = _ranks(file)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ModelConfigError(
            f"{name} cannot be read: {error}.", remedy="Download the model's tokenizer again."
        ) from error
    first = len(special)
    ids = {token: rank + first for token, rank in byte_level_names(ranks).items()}
    settings.require_room(name, first + len(ids))
    added = [Added(id=token_id, content=text, special=True) for token_id, text in enumerate(special)]
    begin = [special.index(_BEGIN)] if _BEGIN in special and settings.add_bos is not False else []
    return byte_level_document(
        Tokens(ids=ids | {token.content: token.id for token in added}, added=added, before=begin),
        ByteLevel(merges=ranked_merges(ids, ids), patterns=[file.config.pattern], whole_words=True),
    )


def _special(file: _File) -> list[str]:
    """Return the names of the special tokens by id; an id that the file does not name gets a name here."""
    count = file.config.default_num_special_tokens
    if not 0 <= count <= _MAX_SPECIAL:
        raise ValueError(f"{count} special tokens are not from 0 to {_MAX_SPECIAL}")
    names = [f"<SPECIAL_{token_id}>" for token_id in range(count)]
    listed = file.special_tokens
    if listed is None:
        listed = [_Special(rank, text) for rank, text in enumerate(_FIRST_SPECIAL)]
    for token in listed:
        if not 0 <= token.rank < count:
            raise ValueError(f"the special token {token.token_str!r} has rank {token.rank} of {count}")
        names[token.rank] = token.token_str
    if len(set(names)) != count:
        raise ValueError("two special tokens have the same name")
    return names


def _ranks(file: _File) -> dict[bytes, int]:
    """Return the ranks of the tokens that the model has, by bytes; the file may have more tokens."""
    count = file.config.default_vocab_size - file.config.default_num_special_tokens
    if not 256 <= count <= len(file.vocab):
        raise ValueError(f"{count} tokens are not from 256 to the {len(file.vocab)} that it has")
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(file.vocab[:count]):
        content = binascii.a2b_base64(token.token_bytes, strict_mode=True)
        if token.rank != rank or not content or content in ranks:
            raise ValueError(f"token {rank} has a wrong rank, no bytes or the bytes of another token")
        ranks[content] = rank
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ValueError(f"no token is the byte 0x{missing:02x}")
    return ranks
