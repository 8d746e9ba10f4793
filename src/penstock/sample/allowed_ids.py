"""The ids that a row may sample by its request's `allowed_token_ids`, as bit masks.

In a mask, bit i of word w stands for id 32 w + i (`kernels.candidates.HeadRequest`). Grammars forbid further
ids (`sample.grammar_rows`). Used by `sample.sampling_rows`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.batch import RowSampling
from penstock.kernels.candidates import WORD_BITS


class AllowedIds:
    """The lists of allowed ids of all rows, as masks that stay the same as long as a request has its row.

    Args:
        vocab_size: size of the vocabulary; all ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        self._masks: dict[int, NDArray[np.int32]] = {}

    def add(self, row: int, sampling: RowSampling) -> None:
        """Take the list of a request that enters `row`."""
        self._masks.pop(row, None)
        ids = None if sampling.changes is None else sampling.changes.allowed_ids
        if ids is not None:
            words = np.zeros(self._num_words, dtype=np.uint32)
            given = np.array(ids, dtype=np.int64)
            np.bitwise_or.at(words, given // WORD_BITS, np.uint32(1) << (given % WORD_BITS).astype(np.uint32))
            self._masks[row] = words.view(np.int32)

    def masks(self, rows: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return the allowed ids of each of `rows`, [num_rows, num_words]; None if no row has a mask."""
        row_masks = [self._masks.get(row) for row in rows.tolist()] if self._masks else []
        if all(mask is None for mask in row_masks):
            return None
        every = np.full(self._num_words, -1, dtype=np.int32)
        return np.stack([every if mask is None else mask for mask in row_masks])
