"""The block tables of all rows, which say where in the cache each row's positions are.

A part of `runner.request_rows`. Tables are never moved, so that views of them stay good.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.kernels.views import words_of


class BlockTables:
    """The tables of all rows.

    Args:
        num_rows: number of tables.
        width: blocks that a row may have.
        block_size: tokens per block.

    Attributes:
        by_row: [num_rows, width] block ids; behind a row's own ones they mean nothing.
        num_blocks: [num_rows] that each row has.
    """

    def __init__(self, num_rows: int, width: int, block_size: int) -> None:
        self.block_size, self.width = block_size, width
        self.by_row = np.zeros((num_rows, width), dtype=np.int64)  # not empty: untouched pages cost no memory
        self.num_blocks = array("q", [0]) * num_rows
        self._words = words_of(self.by_row)

    def set(self, row: int, blocks: Sequence[int]) -> None:
        """Begin a row's table with these blocks."""
        self.num_blocks[row] = 0
        self.append(row, blocks)

    def append(self, row: int, blocks: Sequence[int]) -> None:
        """Add blocks to the end of a row's table."""
        held = self.num_blocks[row]
        self.by_row[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)

    def room(self, row: int) -> int:
        """Return the tokens that the blocks of a row can hold."""
        return self.num_blocks[row] * self.block_size

    def first(self, row: int, num_blocks: int) -> Sequence[int]:
        """Return the first entries of a row's table, [num_blocks], as a view."""
        start = row * self.width
        return self._words[start : start + num_blocks]

    def slots(self, row: int, start: int, end: int) -> Iterator[range]:
        """Yield the slots of a row's positions from `start` to before `end`, block by block."""
        first = row * self.width
        while start < end:
            block, offset = divmod(start, self.block_size)
            slot = self._words[first + block] * self.block_size + offset
            num = min(self.block_size - offset, end - start)
            yield range(slot, slot + num)
            start += num
