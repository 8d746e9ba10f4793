"""The core's own residency table (`penstock.residency`), for the digest that each plan carries.

The table says which KV blocks each row (a request's index on the ranks) has, and what they hold. When a plan
is issued the table is updated from the row pool, the block tables and the requests, and never from the plan.
Ranks replay plans into tables of their own, and compare. So a rank notices if a plan leaves out a block or
names another row, or if a block table changes without a plan that says so. Called by
`scheduler.prefix_reuse`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batch import TierOrder
from penstock.kvcache.allocator import BlockAllocator
from penstock.residency import Residency
from penstock.scheduler.queues import RequestState
from penstock.scheduler.rows import RowPool


class NoLedger:
    """A ledger that records nothing, for callers that look up prefixes and issue no plan."""

    def digest_after(self, requests: Sequence[RequestState], orders: Sequence[TierOrder]) -> int:
        return 0

    def forget_all(self) -> None:
        """Do nothing, since nothing was recorded."""


class ResidencyLedger:
    """The core's record of the KV blocks that each row (a request's index on the ranks) holds.

    Args:
        allocator: its block tables are read.
        rows: says which request holds which row.
    """

    def __init__(self, allocator: BlockAllocator, rows: RowPool) -> None:
        self._allocator, self._rows = allocator, rows
        self.table = Residency(allocator.block_size)

    def digest_after(self, requests: Sequence[RequestState], orders: Sequence[TierOrder]) -> int:
        """Record what a plan that is being issued changes, and return the digest of the whole record.

        Call it before any block that the plan fills is made findable: until then `num_named` counts the
        blocks that a starting request has found. Ranks compare the digest with their own.

        Args:
            requests: those whose tokens the plan runs, that enter without any, or whose rows it rewinds. The
                block tables of others have not grown since the plan before.
            orders: the orders to copy blocks that the plan carries.
        """
        table, residents, generations = self.table, self.table.rows, self._rows.generations
        tail, gained = self._allocator.tail, 0
        for order in orders:
            table.order(order)
        for request in requests:
            row = request.row
            resident, num_found = residents.get(row), 0
            if resident is None or resident.generation != generations[row]:
                resident = table.enter(row, generations[row], request.request_id)
                num_found = request.num_named + request.num_unproven
                table.reach(resident, 0)
            added = tail(request.arrival, len(resident.blocks))
            if added:
                table.extend(resident, added, num_found)
            gained += resident.key * (request.num_planned - resident.length)
            resident.length = request.num_planned
        table.gain(gained)
        if len(residents) != self._rows.num_used:
            for row in self._rows.free_rows():
                table.leave(row)
        return table.digest

    def forget_all(self) -> None:
        """Forget what each row holds, since the ranks have forgotten it."""
        self.table = Residency(self._allocator.block_size)
