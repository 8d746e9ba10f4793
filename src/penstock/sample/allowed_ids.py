"""Which ids a row may sample at all, as bit masks: those of `allowed_token_ids`, and where masks meet.

A mask has bit i of word w for id 32 w + i, as `kernels.candidates.HeadRequest` has it. Whoever forbids ids of
some rows at some steps is a `MaskSource`; an id may be sampled that all sources allow. Used by
`sample.sampling_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.batch import RowSampling

_WORD = 32


class MaskSource(Protocol):
    """Something that forbids ids."""

    def masks(self, rows: NDArray[np.int64]) -> dict[int, NDArray[np.int32]]:
        """Place among `rows` -> [num_words] its mask now; rows that it does not bind are left out."""
        ...


class AllowedIds:
    """The fixed lists of ids that requests have given.

    Args:
        vocab_size: ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // _WORD)
        self._masks: dict[int, NDArray[np.int32]] = {}

    def add(self, row: int, sampling: RowSampling) -> None:
        """A request enters `row`."""
        self._masks.pop(row, None)
        ids = None if sampling.changes is None else sampling.changes.allowed_ids
        if ids is not None:
            words = np.zeros(self._num_words, dtype=np.uint32)
            given = np.array(ids, dtype=np.int64)
            np.bitwise_or.at(words, given // _WORD, np.uint32(1) << (given % _WORD).astype(np.uint32))
            self._masks[row] = words.view(np.int32)

    def masks(self, rows: NDArray[np.int64]) -> dict[int, NDArray[np.int32]]:
        """See `MaskSource`."""
        if not self._masks:
            return {}
        found = {place: self._masks.get(row) for place, row in enumerate(rows.tolist())}
        return {place: mask for place, mask in found.items() if mask is not None}


def combined(sources: Sequence[MaskSource], rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """What all sources allow, [num_rows, num_words]; None: everything."""
    together: NDArray[np.int32] | None = None
    for source in sources:
        for place, mask in source.masks(rows).items():
            if together is None:
                together = np.full((len(rows), len(mask)), -1, dtype=np.int32)
            together[place] &= mask
    return together
