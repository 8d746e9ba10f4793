"""Requests to a vocabulary head, in the words of a test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.candidates import HeadRequest, SparseBias


def request(
    counts: list[int],
    *,
    wants: list[int] | None = None,
    bias: dict[int, dict[int, float]] | None = None,
    scales: dict[int, dict[int, float]] | None = None,
    allowed: list[set[int]] | None = None,
    vocab: int = 0,
) -> HeadRequest:
    """One row per count.

    Args:
        wants: rows whose logits are wanted.
        bias: row -> id -> value.
        scales: row -> id -> scale, of ids that have a bias; the others' is 1.
        allowed: ids per row.
    """
    entries = [sorted((bias or {}).get(row, {}).items()) for row in range(len(counts))]
    return HeadRequest(
        num_candidates=np.array(counts, dtype=np.int64),
        wants_logits=np.isin(np.arange(len(counts)), wants or []),
        bias=SparseBias(
            starts=np.cumsum([0, *map(len, entries)]),
            ids=np.array([i for row in entries for i, _ in row], dtype=np.int64),
            values=np.array([v for row in entries for _, v in row], dtype=np.float32),
            scales=None if scales is None else _scales(entries, scales),
        ),
        allowed=None if allowed is None else mask_of(allowed, vocab),
    )


def _scales(
    entries: list[list[tuple[int, float]]], scales: dict[int, dict[int, float]]
) -> NDArray[np.float32]:
    found = [scales.get(row, {}).get(i, 1.0) for row, pairs in enumerate(entries) for i, _ in pairs]
    return np.array(found, dtype=np.float32)


def mask_of(allowed: list[set[int]], vocab: int) -> NDArray[np.int32]:
    """[len(allowed), ceil(vocab / 32)]: a bit for each id."""
    words = np.zeros((len(allowed), -(-vocab // 32)), dtype=np.uint32)
    for row, ids in enumerate(allowed):
        for i in ids:
            words[row, i // 32] |= np.uint32(1 << i % 32)
    return words.view(np.int32)
