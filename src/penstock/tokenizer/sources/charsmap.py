"""Checks whether SentencePiece's table of characters to replace is sound.

The tokenizers library follows the table without checks of bounds, so that a text of a request could make it
fail. The table is a length in four bytes, a trie of that many bytes, and the texts that replace what the trie
finds, each with a zero behind it. The trie is a double array of units of 32 bits. Called by the readers of
files that have such a table.
"""

from __future__ import annotations

import numpy as np

_LABEL, _VALUE = np.uint32(0x800000FF), np.uint32(0x7FFFFFFF)
_BYTES = np.arange(1, 256, dtype=np.uint32)


def require_sound_charsmap(charsmap: bytes) -> None:
    """Raise `ValueError` if the table leads out of its bounds for some text. An empty table is sound."""
    if not charsmap:
        return
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size % 4 or not 0 < size <= len(charsmap) - 4:
        raise ValueError(f"a table of {len(charsmap)} bytes has a trie of {size}")
    units = np.frombuffer(charsmap, "<u4", size // 4, 4)
    texts = charsmap[4 + size :]
    texts.decode()
    starts = np.frombuffer(texts, np.uint8)
    bases = _next(np.zeros(1, np.uint32), units[:1])
    seen = np.zeros(len(units), np.bool_)
    while len(bases):
        if (bases | 255).max() >= len(units):
            raise ValueError("its trie leads outside its bounds")
        seen[bases] = True
        children = bases[:, None] ^ _BYTES
        found = units[children]
        matches = (found & _LABEL) == _BYTES
        children, found = children[matches], found[matches]
        following = _next(children, found)
        leaves = following[(found >> 8) & 1 == 1]
        _require_texts(units, leaves, starts)
        bases = np.unique(following)
        bases = bases[(bases >= len(units)) | ~seen[np.minimum(bases, len(units) - 1)]]


def _next(positions: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return the bases of nodes: a child stands at the base XOR the byte that leads to it."""
    following: np.ndarray = positions ^ ((units >> 10) << ((units & 512) >> 6))
    return following


def _require_texts(units: np.ndarray, leaves: np.ndarray, texts: np.ndarray) -> None:
    if len(leaves) and leaves.max() >= len(units):
        raise ValueError("its trie leads outside its bounds")
    values = units[leaves] & _VALUE
    if len(values) and (values.max() >= len(texts) or ((texts[values] & 0xC0) == 0x80).any() or texts[-1]):
        raise ValueError("its trie names a text that it does not have")
