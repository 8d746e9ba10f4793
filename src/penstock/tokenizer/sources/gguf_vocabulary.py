"""The vocabulary of a GGUF file, and what the file says of its special tokens and chat templates.

`gguf_tokenizer` writes a `tokenizer.json`, `gguf_tokenizer_config` a `tokenizer_config.json`. A vocabulary is
one of SentencePiece's (`llama` with scores, `t5` with probabilities) or a byte-level one (`gpt2`, with merges
and the name of a split rule); any other kind is refused by name. Called by `sources.model_files`. No tensor
is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import numpy as np

from penstock.errors import CheckpointError, UnsupportedModelError
from penstock.gguf.file import GgufFile
from penstock.gguf.metadata import GgufMetadata
from penstock.tokenizer.detokenizer import byte_level_alphabet
from penstock.tokenizer.sources.charsmap import require_sound_charsmap
from penstock.tokenizer.sources.document import (
    Added,
    ByteLevel,
    Pieces,
    Spaces,
    Tokens,
    byte_level_document,
    pieces_document,
)
from penstock.tokenizer.sources.merges import ranked_merges
from penstock.tokenizer.sources.split_patterns import SPLIT_RULES, SplitRule
from penstock.told_text import printable

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TOKENS, _SCORES, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_NO_VOCABULARY = "none"
_TEMPLATE, _TEMPLATE_NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
_EMBEDDING = "token_embd.weight"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NAMED_ONLY = ("padding",)  # templates may name it, but no text has it
# Names of tokens that end an answer. Files name one or two, but models have more, and files mark some of them
# as common text.
_ENDS = frozenset(
    [
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ]
)


def has_vocabulary(file: GgufFile) -> bool:
    """Return whether the file has a vocabulary at all; models that take ids alone have none."""
    return file.metadata.text(_MODEL, _NO_VOCABULARY) not in (_NO_VOCABULARY, "no_vocab")


def gguf_tokenizer(file: GgufFile) -> bytes:
    """Return the content of a `tokenizer.json` that encodes as the file's vocabulary does.

    Raises:
        CheckpointError: a key of the vocabulary is missing or not sound, or its size is not the model's.
        UnsupportedModelError: the vocabulary is of a kind that is not read.
    """
    metadata = file.metadata
    kind = metadata.text(_MODEL)
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{metadata.file}: the vocabulary is of the kind {printable(kind)!r}; supported: "
            f"{_known(_KINDS)}.",
            remedy="Use another conversion or another model.",
            param="model",
        )
    vocabulary = _Vocabulary.of(file)
    return _KINDS[kind](metadata, vocabulary)


def gguf_tokenizer_config(metadata: GgufMetadata) -> bytes:
    """Return the content of a `tokenizer_config.json`: chat templates, and special tokens that they name."""
    names = metadata.texts(_TOKENS)
    config: dict[str, object] = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = _token_id(metadata, key, len(names))
        if token_id is not None:
            config[name] = names[token_id]
    templates = _templates(metadata)
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return msgspec.json.encode(config)


def gguf_end_ids(metadata: GgufMetadata) -> list[int]:
    """Return the ids that end an answer: those that the file names, and those with a name of `_ENDS`."""
    names = metadata.texts(_TOKENS)
    ends = {_token_id(metadata, key, len(names)) for key in ("eos", "eot", "eom")}
    known = {token_id for token_id, name in enumerate(names) if name in _ENDS}
    if {"<|return|>", "<|call|>"} <= set(names):
        # In such vocabularies `<|end|>` ends a message, and not the answer.
        known -= {names.index("<|end|>")} if "<|end|>" in names else set()
    return sorted({token_id for token_id in ends if token_id is not None} | known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The tokens of a file, checked.

    Attributes:
        names: name of each token, by id.
        kinds: kind of each token, by id, as GGUF files number kinds; all normal if the file gives none.
    """

    names: list[str]
    kinds: np.ndarray

    @classmethod
    def of(cls, file: GgufFile) -> _Vocabulary:
        metadata = file.metadata
        names = [
            name or f"[EMPTY_{token_id}]" for token_id, name in enumerate(metadata.texts(_TOKENS))
        ]  # an id without text must be told apart from others
        if len(set(names)) != len(names):
            _refuse_twice(metadata, names)
        if _EMBEDDING in file.tensors and file.tensors[_EMBEDDING].shape[:1] != (len(names),):
            rows = file.tensors[_EMBEDDING].shape[:1]
            _refuse(
                metadata,
                _TOKENS,
                f"{rows[0] if rows else 1} tokens, as {_EMBEDDING} has rows",
                str(len(names)),
            )
        kinds = _numbers(metadata, _TYPES, len(names)) if _TYPES in metadata else np.full(len(names), _NORMAL)
        return cls(names=names, kinds=kinds)

    @property
    def ids(self) -> dict[str, int]:
        """Return the id of each name."""
        return {name: token_id for token_id, name in enumerate(self.names)}

    def of_kind(self, *kinds: int) -> list[int]:
        """Return the ids of all tokens of these kinds."""
        ids: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return ids

    def added(self) -> list[Added]:
        """Return the tokens that are found in a text first, before the rest of it is cut into tokens."""
        special = set(self.of_kind(_CONTROL, _UNKNOWN))
        special |= {token_id for token_id, name in enumerate(self.names) if name in _ENDS}
        ids = sorted(special.union(self.of_kind(_USER_DEFINED)))
        return [Added(id=each, content=self.names[each], special=each in special) for each in ids]


def _byte_level(metadata: GgufMetadata, vocabulary: _Vocabulary) -> bytes:
    name = metadata.text(_PRE, "default")
    rule = SPLIT_RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{metadata.file}: the vocabulary splits texts by the rule {printable(name)!r}, which is not "
            f"supported; supported: {_known(SPLIT_RULES)}.",
            remedy="Use another conversion or another model.",
            param="model",
        )
    ids = vocabulary.ids
    merges = [pair for pair in _merges(metadata, vocabulary) if _makes_token(pair, ids)]
    tokens = _tokens(metadata, vocabulary, add_bos=rule.add_bos)
    return byte_level_document(tokens, _byte_level_way(rule, merges))


def _byte_level_way(rule: SplitRule, merges: list[tuple[str, str]]) -> ByteLevel:
    return ByteLevel(
        merges=merges, patterns=rule.patterns, whole_words=rule.whole_words, composed=rule.composed
    )


def _merges(metadata: GgufMetadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    if _MERGES not in metadata and metadata.get(_PRE) == "kimi-k2":  # the ids give the order of merges
        alphabet = byte_level_alphabet().keys()
        normal = [
            name for each in vocabulary.of_kind(_NORMAL) if alphabet >= set(name := vocabulary.names[each])
        ]
        return ranked_merges(normal, vocabulary.ids)
    merges = []
    for index, text in enumerate(metadata.texts(_MERGES)):
        left, _, right = text.partition(" ")
        if not (left and right):
            _refuse(
                metadata, _MERGES, "two tokens with a space between", f"{printable(text)!r} as merge {index}"
            )
        merges.append((left, right))
    return merges


def _makes_token(pair: tuple[str, str], ids: Mapping[str, int]) -> bool:
    """Return whether a merge is of this vocabulary; a file may have merges of tokens that were taken out."""
    left, right = pair
    return left in ids and right in ids and left + right in ids


def _sentencepiece(metadata: GgufMetadata, vocabulary: _Vocabulary) -> bytes:
    names, ids = vocabulary.names, vocabulary.ids
    scores = _numbers(metadata, _SCORES, len(names))
    normal = vocabulary.of_kind(_NORMAL)
    # Some converters wrote one score for all: then the order of the ids is that of the merges.
    ranked = sorted(normal, key=lambda token_id: (-float(scores[token_id]), token_id))
    parts = {names[token_id] for token_id in normal}
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    return pieces_document(
        _tokens(metadata, vocabulary, add_bos=True),
        Pieces(
            unknown=_token_id(metadata, "unknown", len(names), 0),
            byte_fallback="<0x00>" in ids,
            spaces=Spaces(prefix="each" if prefix else ""),
            merges=ranked_merges((names[token_id] for token_id in ranked), parts),
        ),
    )


def _unigram(metadata: GgufMetadata, vocabulary: _Vocabulary) -> bytes:
    scores = _numbers(metadata, _SCORES, len(vocabulary.names))
    charsmap = metadata.numbers(_CHARSMAP).tobytes() if _CHARSMAP in metadata else b""
    try:
        require_sound_charsmap(charsmap)
    except ValueError as error:
        _refuse(metadata, _CHARSMAP, "a valid table of characters", f"{error}")
    return pieces_document(
        _tokens(metadata, vocabulary, add_eos=True),
        Pieces(
            unknown=_token_id(metadata, "unknown", len(vocabulary.names), 2),
            byte_fallback="<0x00>" in vocabulary.ids,
            spaces=Spaces(
                prefix="each" if metadata.flag("tokenizer.ggml.add_space_prefix", True) else "",
                collapse=metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False),
                charsmap=charsmap,
            ),
            scores=scores.astype(float).tolist(),
        ),
    )


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}


def _tokens(
    metadata: GgufMetadata, vocabulary: _Vocabulary, *, add_bos: bool = False, add_eos: bool = False
) -> Tokens:
    """Return the vocabulary, with the ids that are put around a text.

    Args:
        add_bos, add_eos: whether the id is put there if the file does not say.
    """
    return Tokens(
        ids=vocabulary.ids,
        added=vocabulary.added(),
        before=_around(metadata, vocabulary, "bos", add_bos),
        after=_around(metadata, vocabulary, "eos", add_eos),
    )


def _around(metadata: GgufMetadata, vocabulary: _Vocabulary, which: str, default: bool) -> list[int]:
    if not metadata.flag(f"tokenizer.ggml.add_{which}_token", default):
        return []
    token_id = _token_id(metadata, which, len(vocabulary.names))
    if token_id is None:
        _refuse(
            metadata, f"tokenizer.ggml.{which}_token_id", f"an id, since add_{which}_token is true", "none"
        )
    return [token_id]


def _token_id(metadata: GgufMetadata, which: str, size: int, default: int | None = None) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    if key not in metadata:
        return default
    token_id = metadata.integer(key)
    if not 0 <= token_id < size:
        if which in _NAMED_ONLY:  # converters have written -1, or a token that the vocabulary does not have
            return default
        _refuse(metadata, key, f"an id from 0 to {size - 1}", str(token_id))
    return token_id


def _templates(metadata: GgufMetadata) -> dict[str, str]:
    """Return the chat templates by name; the one without a name is "default"."""
    templates = {"default": metadata.text(_TEMPLATE)} if _TEMPLATE in metadata else {}
    if _TEMPLATE_NAMES in metadata:
        for name in metadata.texts(_TEMPLATE_NAMES):
            key = f"{_TEMPLATE}.{name}"
            if key in metadata:
                templates[name] = metadata.text(key)
    return templates


def _numbers(metadata: GgufMetadata, key: str, count: int) -> np.ndarray:
    values = metadata.numbers(key)
    if len(values) != count:
        _refuse(metadata, key, f"{count} values, one for each token", str(len(values)))
    return values


def _refuse_twice(metadata: GgufMetadata, names: list[str]) -> None:
    first: dict[str, int] = {}
    for token_id, name in enumerate(names):
        if name in first:
            found = f"{printable(name)!r} as {first[name]} and {token_id}"
            _refuse(metadata, _TOKENS, "each token once", found)
        first[name] = token_id


def _refuse(metadata: GgufMetadata, key: str, expected: str, found: str) -> NoReturn:
    raise CheckpointError(file=metadata.file, key=key, expected=expected, found=found)


def _known(names: Mapping[str, object]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"
