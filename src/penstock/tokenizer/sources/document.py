"""Writes a `tokenizer.json` for a vocabulary that came in another form.

All that reads vocabularies reads that one form: the tokenizer, grammars, comparisons of two models. Another
module of `sources` reads the tokens of a vocabulary and calls a function here. The function adds the rest:
how text becomes pieces, which pieces are joined, and how ids become text again. No file is opened here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.tokenizer.detokenizer import byte_level_alphabet

SPACE = "\u2581"  # what stands for a space in SentencePiece's pieces

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A token that is found in a text before the rest of the text is cut into tokens.

    Attributes:
        special: the token does not stand for text: text that users write never becomes it, and answers do not
            show it.
    """

    id: int
    content: str
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A vocabulary.

    Attributes:
        ids: the id of each token, by name.
        added: tokens that are found in a text first; `ids` may have them or not.
        before: ids that are put before a text.
        after: ids that are put behind a text.
    """

    ids: Mapping[str, int]
    added: Sequence[Added] = ()
    before: Sequence[int] = ()
    after: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevel:
    """The making of tokens that spell bytes (`detokenizer.byte_level_alphabet`).

    Attributes:
        merges: pairs that are joined, the first one first.
        patterns: each cuts the pieces that the ones before it left; the last pieces are words.
        whole_words: a word that is a token is that token, whatever merges would make of it.
        composed: text is brought into Unicode's form NFC first.
    """

    merges: Sequence[tuple[str, str]]
    patterns: Sequence[str]
    whole_words: bool = False
    composed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """The treatment of spaces in a text before SentencePiece looks for pieces.

    Attributes:
        prefix: "" for no space before a text, "each" for one before each stretch between special tokens,
            "first" for one before the first stretch alone.
        collapse: spaces at both ends go away, and of several in a row all but one.
        charsmap: a table of characters to replace, as SentencePiece compiles it.
        escaped: a space is written as `SPACE`.
    """

    prefix: str = "each"
    collapse: bool = False
    charsmap: bytes = b""
    escaped: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The making of tokens that spell text.

    Attributes:
        merges: pairs that are joined, the first one first; empty for a unigram model.
        scores: the scores of all tokens by id, for a unigram model; else empty.
        unknown: id of the token for text that has no piece; None: there is no such token.
        byte_fallback: text that has no piece becomes a token for each byte, called `<0x00>` to `<0xFF>`.
        isolated: tokens that are never cut or joined where they stand in a text.
    """

    unknown: int | None
    byte_fallback: bool
    spaces: Spaces
    merges: Sequence[tuple[str, str]] = ()
    scores: Sequence[float] = ()
    isolated: Sequence[str] = ()


def byte_level_names(ranks: Mapping[bytes, int]) -> dict[str, int]:
    """Return the ranks of tokens by name: the bytes of a token as byte-level vocabularies spell them."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    return {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}


def byte_level_document(tokens: Tokens, how: ByteLevel) -> bytes:
    """Return the `tokenizer.json` of a byte-level vocabulary."""
    splits = [_split(pattern) for pattern in how.patterns]
    return _document(
        tokens,
        normalizer={"type": "NFC"} if how.composed else None,
        pre_tokenizer=_sequence("pretokenizers", [*splits, _byte_level()]),
        decoder=_byte_level(),
        model=_bpe(tokens.ids, how.merges) | {"ignore_merges": how.whole_words},
    )


def pieces_document(tokens: Tokens, how: Pieces) -> bytes:
    """Return the `tokenizer.json` of a SentencePiece vocabulary."""
    steps = [_metaspace()] if how.spaces.prefix == "first" else []
    if how.scores or how.isolated:  # such models find a piece by its name, also a special one
        steps += _cuts(tokens, how)
    return _document(
        tokens,
        normalizer=_normalizer(how.spaces),
        pre_tokenizer=_sequence("pretokenizers", steps) if steps else None,
        decoder=_sequence("decoders", _piece_decoders(how.spaces)),
        model=_unigram(tokens, how) if how.scores else _bpe_of_pieces(tokens, how),
    )


def _unigram(tokens: Tokens, how: Pieces) -> Document:
    names = sorted(tokens.ids, key=tokens.ids.__getitem__)
    return {
        "type": "Unigram",
        "unk_id": how.unknown,
        "vocab": list(zip(names, how.scores, strict=True)),
        "byte_fallback": how.byte_fallback,
    }


def _bpe_of_pieces(tokens: Tokens, how: Pieces) -> Document:
    unknown = next((name for name, token_id in tokens.ids.items() if token_id == how.unknown), None)
    return _bpe(tokens.ids, how.merges) | {
        "unk_token": unknown,
        "byte_fallback": how.byte_fallback,
        "fuse_unk": True,
        "ignore_merges": bool(how.isolated),
    }


def _cuts(tokens: Tokens, how: Pieces) -> list[Document]:
    """Return cuts around isolated tokens, and through the names of tokens that no text may become."""
    longest_first = sorted(how.isolated, key=len, reverse=True)
    names = sorted(token.content for token in tokens.added if token.special and len(token.content) > 1)
    through = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names]
    if how.byte_fallback:
        through.append("<(?=0x[0-9A-F]{2}>)")
    return [
        _split("|".join(patterns)) for patterns in (list(map(re.escape, longest_first)), through) if patterns
    ]


def _document(tokens: Tokens, *, normalizer: Any, pre_tokenizer: Any, decoder: Any, model: Document) -> bytes:
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(token) for token in sorted(tokens.added, key=lambda token: token.id)],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": _template(tokens),
            "decoder": decoder,
            "model": model,
        }
    )


def _added(token: Added) -> Document:
    return {
        "id": token.id,
        "content": token.content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token.special,
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> Document:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def _template(tokens: Tokens) -> Document | None:
    """Return the part of the document that puts ids around a text; None if there are no such ids."""
    if not (tokens.before or tokens.after):
        return None
    names = {token_id: name for name, token_id in tokens.ids.items()}
    names |= {token.id: token.content for token in tokens.added}
    around = {token_id: names[token_id] for token_id in (*tokens.before, *tokens.after)}

    def special(token_id: int) -> Document:
        return {"SpecialToken": {"id": names[token_id], "type_id": 0}}

    single = [
        *map(special, tokens.before),
        {"Sequence": {"id": "A", "type_id": 0}},
        *map(special, tokens.after),
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [token_id], "tokens": [name]} for token_id, name in around.items()
        },
    }


def _split(pattern: str) -> Document:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level() -> Document:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _metaspace() -> Document:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


def _normalizer(spaces: Spaces) -> Document | None:
    steps: list[Document] = []
    if spaces.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": spaces.charsmap})
    if spaces.collapse:
        steps.append({"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE}]+\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spaces.prefix == "each":
        steps.append({"type": "Prepend", "prepend": SPACE if spaces.escaped else " "})
    if spaces.escaped:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return _sequence("normalizers", steps) if steps else None


def _piece_decoders(spaces: Spaces) -> list[Document]:
    steps: list[Document] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaces.prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _sequence(kind: str, steps: Sequence[Document]) -> Document:
    return {"type": "Sequence", kind: steps}
