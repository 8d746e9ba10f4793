"""The block tables of all rows, which say where in the KV cache each row's positions are.

A row is the index of a running request in the rank's tables. `runner.request_rows` has the block tables. They
stay in the same memory, so that views of them stay valid.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.kernels.views import words_of


class BlockTables:
    """The block tables of all rows: for each row, the ids of its KV blocks in order.

    Args:
        num_rows: number of rows.
        width: most blocks that a row may have.
        block_size: tokens per block.

    Attributes:
        by_row: [num_rows, width] int64 block ids; entries behind a row's `num_blocks` mean nothing.
        num_blocks: [num_rows] blocks that each row has.
    """

    def __init__(self, num_rows: int, width: int, block_size: int) -> None:
        self.block_size, self.width = block_size, width
        self.by_row = np.zeros((num_rows, width), dtype=np.int64)  # untouched pages of zeros take no memory
        self.num_blocks = array("q", [0]) * num_rows
        self._words = words_of(self.by_row)

    def set(self, row: int, blocks: Sequence[int]) -> None:
        """Replace a row's table by these blocks, because another request gets the row."""
        self.num_blocks[row] = 0
        self.append(row, blocks)

    def append(self, row: int, blocks: Sequence[int]) -> None:
        """Add blocks, by their ids, to the end of a row's table."""
        held = self.num_blocks[row]
        self.by_row[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)

    def room(self, row: int) -> int:
        """Return how many tokens the blocks of a row can hold."""
        return self.num_blocks[row] * self.block_size

    def first(self, row: int, num_blocks: int) -> Sequence[int]:
        """Return the ids of a row's first `num_blocks` blocks, as a view, not a copy."""
        start = row * self.width
        return self._words[start : start + num_blocks]

    def slots(self, row: int, start: int, end: int) -> Iterator[range]:
        """Yield where in the KV cache a row's positions from `start` to before `end` are, block by block.

        Each range has the slots of one block. The number of a slot is the block's id times the block size,
        plus the token's index in the block.
        """
        first = row * self.width
        while start < end:
            block, offset = divmod(start, self.block_size)
            slot = self._words[first + block] * self.block_size + offset
            num = min(self.block_size - offset, end - start)
            yield range(slot, slot + num)
            start += num
