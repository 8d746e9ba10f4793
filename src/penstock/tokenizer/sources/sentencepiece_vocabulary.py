"""The vocabulary of a directory that has a SentencePiece model and no `tokenizer.json`.

`sentencepiece_tokenizer` writes a `tokenizer.json`. Special tokens are those of the model itself, and those
that `tokenizer_config.json` and `added_tokens.json` name. `tokenizer_config.json` may also say whether ids
are put around a text. Called by `sources.model_files`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.tokenizer.sources.document import Added, Pieces, Spaces, Tokens, pieces_document
from penstock.tokenizer.sources.merges import ranked_merges
from penstock.tokenizer.sources.sentencepiece_file import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    SentencePieceFile,
    read_sentencepiece,
)
from penstock.tokenizer.sources.tokenizer_settings import TokenizerSettings

_ALGORITHMS = {3: "words", 4: "characters"}
_ENDS_TEXTS = ("T5Tokenizer", "MT5Tokenizer")  # classes that put an id behind a text, and none before it
_MAX_UNUSED = 1 << 20  # ids between the vocabulary and its added tokens


def sentencepiece_tokenizer(content: bytes, name: str, settings: TokenizerSettings) -> bytes:
    """Return the content of a `tokenizer.json` that encodes as the model does.

    Args:
        content: the bytes of the model's file.
        name: what errors call the file.
        settings: the settings of the tokenizer in the model's directory.

    Raises:
        ModelConfigError: the file is not sound, or has more tokens than the model has rows for.
        UnsupportedModelError: the file is a SentencePiece model of another kind than unigram or BPE.
    """
    file = read_sentencepiece(content, name)
    if file.algorithm not in (UNIGRAM, BPE) or file.space_behind:
        kind = _ALGORITHMS.get(file.algorithm, "words with a space after them")
        raise UnsupportedModelError(
            f"{name} is a SentencePiece model of {kind}, but only unigram and BPE models are supported.",
            remedy="Convert it into a tokenizer.json.",
            param="model",
        )
    if file.algorithm == UNIGRAM and not 0 <= file.unknown < len(file.pieces):
        raise ModelConfigError(
            f"{name} has {len(file.pieces)} pieces, but its unknown piece has the id {file.unknown}."
        )
    vocabulary = _Vocabulary.of(file, name, settings)
    settings.require_room(name, len(vocabulary.pieces))
    tokens = Tokens(
        ids=vocabulary.ids,
        added=vocabulary.added(),
        before=vocabulary.around(file.bos, settings.add_bos, not _ends_texts(settings)),
        after=vocabulary.around(file.eos, settings.add_eos, _ends_texts(settings)),
    )
    return pieces_document(tokens, _way(file, vocabulary, _spaces(file, settings)))


def _ends_texts(settings: TokenizerSettings) -> bool:
    return settings.tokenizer_class.removesuffix("Fast") in _ENDS_TEXTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The tokens of a model and of the files beside it.

    Attributes:
        pieces: the tokens by id.
        ids: id of each token, by name.
        isolated: names of user-defined pieces, which are found in a text after its characters and spaces were
            replaced.
    """

    pieces: list[Piece]
    ids: dict[str, int]
    isolated: list[str]

    @classmethod
    def of(cls, file: SentencePieceFile, name: str, settings: TokenizerSettings) -> _Vocabulary:
        pieces = list(file.pieces)
        last = max((token.id for token in settings.added), default=-1)
        if last - len(pieces) > _MAX_UNUSED:
            raise ModelConfigError(f"{name} has {len(pieces)} pieces, but an added token has the id {last}.")
        lowest = min(piece.score for piece in pieces)
        pieces += [Piece(f"[UNUSED_{token_id}]", lowest, UNUSED) for token_id in range(len(pieces), last + 1)]
        defined = {token_id for token_id, piece in enumerate(pieces) if piece.kind == USER_DEFINED}
        for token in settings.added:
            kind = CONTROL if token.special else USER_DEFINED
            pieces[token.id] = Piece(token.content, pieces[token.id].score, kind)
            defined.discard(token.id)
        ids = {piece.name: token_id for token_id, piece in enumerate(pieces)}
        if len(ids) != len(pieces):
            twice = next(piece.name for token_id, piece in enumerate(pieces) if ids[piece.name] != token_id)
            raise ModelConfigError(f"{name} has the token {twice!r} twice.")
        return cls(pieces=pieces, ids=ids, isolated=[pieces[each].name for each in sorted(defined)])

    def added(self) -> list[Added]:
        """Return the tokens that are found in a text first, before its characters and spaces are replaced."""
        isolated = set(self.isolated)
        return [
            Added(id=token_id, content=piece.name, special=piece.kind != USER_DEFINED)
            for token_id, piece in enumerate(self.pieces)
            if piece.kind in (CONTROL, UNKNOWN, USER_DEFINED) and piece.name not in isolated
        ]

    def around(self, token_id: int, asked: bool | None, default: bool) -> list[int]:
        """Return the id in a list if the model has it and it is put at an end of a text; else an empty list.

        Args:
            asked: whether the settings want it there; None: they do not say, and `default` holds.
        """
        wanted = default if asked is None else asked
        return [token_id] if wanted and 0 <= token_id < len(self.pieces) else []


def _spaces(file: SentencePieceFile, settings: TokenizerSettings) -> Spaces:
    prefix = file.dummy_prefix if settings.add_prefix_space is None else settings.add_prefix_space
    return Spaces(
        prefix=("each" if settings.legacy else "first") if prefix else "",
        collapse=file.collapse_spaces,
        charsmap=file.charsmap,
        escaped=file.escape_spaces,
    )


def _way(file: SentencePieceFile, vocabulary: _Vocabulary, spaces: Spaces) -> Pieces:
    pieces = vocabulary.pieces
    normal = [(-piece.score, token_id) for token_id, piece in enumerate(pieces) if piece.kind == NORMAL]
    parts = {pieces[token_id].name for _, token_id in normal}
    is_unigram = file.algorithm == UNIGRAM
    ranked = (pieces[token_id].name for _, token_id in sorted(normal))
    return Pieces(
        unknown=file.unknown if 0 <= file.unknown < len(pieces) else None,
        byte_fallback=file.byte_fallback,
        spaces=spaces,
        isolated=vocabulary.isolated,
        scores=[0.0 if piece.kind == USER_DEFINED else piece.score for piece in pieces] if is_unigram else (),
        merges=() if is_unigram else ranked_merges(ranked, parts),
    )
