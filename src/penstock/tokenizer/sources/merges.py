"""Computes the merges of a vocabulary that has the order of its tokens, but not the pairs that were merged.

SentencePiece's BPE and tiktoken both join two neighbours again and again: those whose union ranks best among
the tokens, and of equals the leftmost. A list of merges in the order of the tokens that they make has the
same effect.
"""

from __future__ import annotations

from collections.abc import Container, Iterable


def ranked_merges(ranked: Iterable[str], parts: Container[str]) -> list[tuple[str, str]]:
    """Return every pair of `parts` that makes a token, in the order of the tokens.

    Several pairs can make one token. The order of these pairs does not matter, because the text of a token is
    always joined in the same way.

    Args:
        ranked: tokens that merges make, best first.
        parts: tokens that merges join.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
