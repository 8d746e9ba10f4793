"""Computes the merges of a vocabulary that gives the order of its tokens, and not what they were made of.

Both SentencePiece's BPE and tiktoken join, again and again, the two neighbours whose union ranks best among
the tokens; the leftmost of equals. A list of merges in the order of what they make says the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterable


def ranked_merges(ranked: Iterable[str], parts: Container[str]) -> list[tuple[str, str]]:
    """Return every pair of `parts` that makes a token, in the order of the tokens.

    Several pairs can make one token. Their order says nothing: the text of a token is joined in one way.

    Args:
        ranked: tokens that merges make, the first to be made first.
        parts: tokens that merges join.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
