"""Compares the vocabularies of two models: every id must mean the same piece of text to both.

That is required of a model that drafts for another one (`engine.supervisor.draft_placement`). The tables of a
model often have more rows than its vocabulary has tokens; such ids stand for nothing and are not compared.
GGUF files have names for them, such as `[PAD151936]` for the id 151936.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.tokenizer.sources.model_files import tokenizer_content


def vocabulary_difference(directory: Path, other: Path) -> str:
    """Return how the vocabularies of two models differ, as part of a sentence; "" if they do not.

    If one of them has no vocabulary, nothing can be compared, and "" is returned.
    """
    content, other_content = _content(directory), _content(other)
    if content is None or other_content is None or content == other_content:
        return ""
    pieces, other_pieces = _pieces(content), _pieces(other_content)
    for token_id in sorted(pieces.keys() | other_pieces.keys()):
        piece, other_piece = pieces.get(token_id), other_pieces.get(token_id)
        if piece != other_piece:
            return f"token {token_id} is {_quoted(piece)} in one and {_quoted(other_piece)} in the other"
    return ""


def _content(model: Path) -> bytes | None:
    try:
        return tokenizer_content(model)
    except ModelError:
        return b""


def _pieces(content: bytes) -> dict[int, str]:
    """Return the piece of text of each id that has one; empty for a vocabulary that cannot be read."""
    try:
        tokenizer: dict[str, Any] = json.loads(content)
        vocabulary = tokenizer["model"]["vocab"]
        by_piece = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((entry[0], token_id) for token_id, entry in enumerate(vocabulary))
        )
        pieces = {token_id: piece for piece, token_id in by_piece}
        pieces |= {added["id"]: added["content"] for added in tokenizer.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, IndexError):
        return {}
    return {token_id: piece for token_id, piece in pieces.items() if piece != f"[PAD{token_id}]"}


def _quoted(piece: str | None) -> str:
    return "none" if piece is None else repr(piece)
