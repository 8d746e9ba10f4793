"""The vocabulary of a tiktoken file: tokens in base64, each with a number, which is merge rank and id.

Such a file says neither how a text is cut into words nor which special tokens there are. Both are known for
the families below. A family is known by the class that `tokenizer_config.json` names, by the file's name, or,
for Llama 3, by the number of tokens. Files of other families are refused. Called by `sources.model_files`.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.tokenizer.sources.document import (
    Added,
    ByteLevel,
    Tokens,
    byte_level_document,
    byte_level_names,
)
from penstock.tokenizer.sources.merges import ranked_merges
from penstock.tokenizer.sources.split_patterns import KIMI, LLAMA3, QWEN2
from penstock.tokenizer.sources.tokenizer_settings import TokenizerSettings

_LLAMA3_RANKS = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What is known of the tokenizers of one family of models.

    Attributes:
        name: what errors call the family.
        pattern: cuts a text into words.
        special: returns the names of the special tokens, in the order of their ids, which begin behind the
            ranks. They are used if the files beside the vocabulary name no tokens.
        before: names of tokens that are put before a text; names that the vocabulary does not have are left
            out.
        composed: text is brought into Unicode's form NFC first.
    """

    name: str
    pattern: str
    special: Callable[[], list[str]]
    before: tuple[str, ...] = ()
    composed: bool = False


def _qwen_special() -> list[str]:
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]


def _llama3_special() -> list[str]:
    return [
        *("<|begin_of_text|>", "<|end_of_text|>", *_reserved(0, 4)),
        *("<|start_header_id|>", "<|end_header_id|>", *_reserved(4, 5), "<|eot_id|>", *_reserved(5, 251)),
    ]


def _reserved(first: int, end: int) -> list[str]:
    return [f"<|reserved_special_token_{number}|>" for number in range(first, end)]


_QWEN = _Family(name="Qwen", pattern=QWEN2, special=_qwen_special, composed=True)
_LLAMA3 = _Family(name="Llama 3", pattern=LLAMA3, special=_llama3_special, before=("<|begin_of_text|>",))
_GLM4 = _Family(name="GLM-4", pattern=LLAMA3, special=list, before=("[gMASK]", "<sop>"))
_KIMI = _Family(name="Kimi", pattern=KIMI, special=list)
_BY_CLASS = {"QWenTokenizer": _QWEN, "ChatGLM4Tokenizer": _GLM4, "TikTokenTokenizer": _KIMI}
_BY_FILE = {"qwen.tiktoken": _QWEN}


def is_tiktoken(content: bytes) -> bool:
    """Return whether the first line of a file is a token in base64 and a rank."""
    token, _, rank = content[:4096].partition(b"\n")[0].strip().partition(b" ")
    try:
        return rank.isdigit() and bool(binascii.a2b_base64(token, strict_mode=True))
    except binascii.Error:
        return False


def tiktoken_tokenizer(content: bytes, name: str, settings: TokenizerSettings) -> bytes:
    """Return the content of a `tokenizer.json` that encodes as the file and its family say.

    Args:
        content: the bytes of the file.
        name: the path of the file, also for errors.
        settings: the settings of the tokenizer in the model's directory.

    Raises:
        ModelConfigError: the file is not sound, or has more tokens than the model has rows for.
        UnsupportedModelError: the file is not of a known family.
    """
    ranks = _ranks(content, name)
    family = _family(name, len(ranks), settings)
    ids = byte_level_names(ranks)
    merges = ranked_merges(sorted(ids, key=ids.__getitem__), ids)
    added = _added(ids, family, settings)
    named = {token.content: token.id for token in added}
    before = [] if settings.add_bos is False else [named[each] for each in family.before if each in named]
    all_ids = ids | named
    settings.require_room(name, max(all_ids.values()) + 1)
    return byte_level_document(
        Tokens(ids=all_ids, added=added, before=before),
        ByteLevel(merges=merges, patterns=[family.pattern], whole_words=True, composed=family.composed),
    )


def _ranks(content: bytes, name: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = binascii.a2b_base64(encoded, strict_mode=True), int(rank_text)
        except ValueError:  # binascii.Error is one
            raise _bad_line(name, number, "a token in base64, a space and a rank") from None
        if not token or token in ranks or rank in seen or not 0 <= rank < len(content):
            raise _bad_line(name, number, "a token and a rank that no other line has")
        ranks[token] = rank
        seen.add(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelConfigError(
            f"{name} has no token for the byte 0x{missing[0]:02x}, one of {len(missing)} missing bytes.",
            remedy="Download the model's tokenizer again.",
        )
    return ranks


def _bad_line(name: str, number: int, expected: str) -> ModelConfigError:
    return ModelConfigError(
        f"{name} is not a readable tiktoken file: line {number} is not {expected}.",
        remedy="Download the model's tokenizer again.",
    )


def _family(name: str, num_ranks: int, settings: TokenizerSettings) -> _Family:
    family = _BY_CLASS.get(settings.tokenizer_class) or _BY_FILE.get(name.rpartition("/")[2])
    if family is None and num_ranks == _LLAMA3_RANKS and settings.model_type in ("", "llama"):
        return _LLAMA3
    if family is None:
        known = ", ".join(each.name for each in (_QWEN, _LLAMA3, _GLM4, _KIMI))
        asked = settings.tokenizer_class or settings.model_type or "a class that is not named"
        raise UnsupportedModelError(
            f"{name} is a tiktoken file for {asked}, but texts can be split only for {known}.",
            remedy="Convert it into a tokenizer.json.",
            param="model",
        )
    return family


def _added(ids: Mapping[str, int], family: _Family, settings: TokenizerSettings) -> list[Added]:
    """Return the special tokens: those that the files beside the vocabulary name, else the family's."""
    if settings.added:
        return list(settings.added)
    first = max(ids.values()) + 1
    return [
        Added(id=first + index, content=each, special=True) for index, each in enumerate(family.special())
    ]
