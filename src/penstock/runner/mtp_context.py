"""Tracks which entries of the KV cache of the MTP layer (a layer that guesses tokens) are valid.

The MTP layer (a layer that guesses further tokens) does not read every token. It is not run while guesses
would not pay, and blocks that are loaded from a store have no keys and values for it. Its entries for such
tokens are left over from another request, or from an earlier time. So this module counts, for each block, how
many of its first entries are valid. A row is attended to from the first block from which on all are valid:

    row       [ whole ][ not read ][ whole ][ whole ][ 5 of 16 ]
                                   ^ first block of its context

So the layer may see a shorter context than the text, which makes guesses worse and harms nothing else. It
never sees entries of another text, with one exception: the last entry of a prefix that requests share was
made with the token that followed in the first of these requests. Positions stay those of the text, although
the context begins later: rotary embedding depends on differences of positions alone. Used by
`runner.mtp_guesser`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.runner.block_tables import BlockTables


class Begin(NamedTuple):
    """The place at which the MTP layer begins to attend to a row.

    Attributes:
        first_block: the first block of the row's context, by its index in the row's block table.
        cleared: id of a block to be filled with zeros, because the reading begins within it and its earlier
            entries are not valid; -1: none.
    """

    first_block: int
    cleared: int = -1


class MTPContext:
    """Records which positions of the MTP layer's KV cache are valid, and how far it has read each row.

    An entry is valid if the layer wrote it for the text that the block belongs to. A row is the index of a
    running request in the rank's tables.

    Args:
        num_blocks: blocks of the layer's KV cache.
        tables: the block tables of the rows.
    """

    def __init__(self, num_blocks: int, tables: BlockTables) -> None:
        self._tables = tables
        self._num_good = array("q", [0]) * num_blocks
        # Row -> the position behind the last one read, and the first block of the row's context.
        self._read: dict[int, tuple[int, int]] = {}

    def reset(self) -> None:
        """Mark all entries as invalid, and forget how far rows were read."""
        self._num_good = array("q", [0]) * len(self._num_good)
        self._read.clear()

    def enter(self, row: int) -> None:
        """Forget how far the MTP layer has read a row, because another request gets the row."""
        self._read.pop(row, None)

    def overwrite(self, block: int) -> None:
        """Mark a block as invalid for the MTP layer, since it is being loaded, for the other layers alone."""
        self._num_good[block] = 0

    def leave_out(self, row: int, start: int, end: int) -> None:
        """Mark a row's positions from `start` to before `end` as invalid, since the MTP layer skips them."""
        for block, first, _ in self._pieces(row, start, end):
            self._num_good[block] = min(self._num_good[block], first)

    def read(self, row: int, start: int, end: int) -> Begin:
        """Mark a row's positions from `start` to before `end` as read by the MTP layer.

        Returns:
            The place at which the row's context begins for this reading.
        """
        begin = self._begin(row, start)
        for block, first, last in self._pieces(row, start, end):
            assert first == 0 or block == begin.cleared or self._num_good[block] >= first
            self._num_good[block] = last
        self._read[row] = end, begin.first_block
        return begin

    def _begin(self, row: int, start: int) -> Begin:
        known = self._read.get(row)
        if known is not None and known[0] == start:
            return Begin(known[1])
        place, offset = divmod(start, self._tables.block_size)
        ids: Sequence[int] = self._tables.first(row, place + (offset > 0))
        if offset and self._num_good[ids[place]] < offset:
            return Begin(place, ids[place])
        while place and self._num_good[ids[place - 1]] == self._tables.block_size:
            place -= 1
        return Begin(place)

    def _pieces(self, row: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks of these positions: id, first entry in the block, and the one behind the last."""
        size = self._tables.block_size
        ids = self._tables.first(row, -(-end // size))
        while start < end:
            place, first = divmod(start, size)
            last = min(size, first + end - start)
            yield ids[place], first, last
            start += last - first
