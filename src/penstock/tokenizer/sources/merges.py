"""The merges of a vocabulary that says the order of its tokens, and not what they were made of.

Both SentencePiece's BPE and tiktoken join, again and again, the two neighbours whose union ranks best among
the tokens; the leftmost of equals. A list of merges in the order of what they make says the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def ranked_merges(ranked: Iterable[str], parts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of `parts` that makes a token, in the order of the tokens.

    Args:
        ranked: tokens that merges make, the first to be made first.
        parts: tokens that merges join, by whatever number; of equal unions the lower numbers come first.
    """
    merges: list[tuple[str, str]] = []
    for token in ranked:
        pairs = [
            (parts[token[:cut]], parts[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in parts and token[cut:] in parts
        ]
        pairs.sort()
        merges.extend((token[:cut], token[cut:]) for _, _, cut in pairs)
    return merges
