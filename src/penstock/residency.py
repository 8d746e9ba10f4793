"""The residency table: what each KV block holds; core and ranks each keep one, and compare digests of it.

    rows       3 ──▶ request "a", written up to position 70, blocks 4 1 6
    contents   4 ──▶ block 0 of the table of "a", which "a" writes      1 ──▶ what order 17 has loaded
    names      4 ──▶ 9f3c…, the hash by which an order has named the content of block 4

Every rank keeps a table by replaying plans, and from nothing else (`replay`). The core keeps one from its own
rows, block tables and orders (`scheduler.residency_ledger`), and never from the plans. It puts the digest of
its table into each plan. So a rank notices in the same step, before it computes, that a plan differs from the
core's table, or that its own table does. The error names the request [H12] [H15].

The digest is a sum modulo 2^64 with one term for the length of each request that holds a row, one for each of
its blocks, and one for each name. So it does not depend on the order in which facts are added, and a step
costs one multiplication for each row:

    key(request) * length        mix(key, index, block, what the block holds)        mix(name, block)

Called by ranks, which replay plans, and by the ledger. Knows no tokens, holds no bytes and decides nothing.
No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.batch import NewRow, RewoundRow, ScheduledBatch, TierOrder
from penstock.errors import ProtocolError, concerned

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: products of near numbers lie far apart
_NOT_TOLD = 0  # `ScheduledBatch.residency` of a plan without a digest: it was not made from the core's tables
_NOT_STARTED = -1
MISMATCH = "residency_mismatch"


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """A request that holds a row, or has held one; once it has left the row, it does not change any more.

    Attributes:
        key: 64 bits that stand for row, generation and request.
        length: number of positions that the plans so far write, if all their drafts are right; negative until
            a plan says at which position the request starts.
        num_drafts: number of drafts in the plans since the row was entered or rewound. The true length is
            less than `length` by at most so many.
        blocks: the block table.
        blocks_part: the sum of the digest's terms for the blocks.
    """

    request_id: str
    generation: int
    key: int
    length: int = _NOT_STARTED
    num_drafts: int = 0
    blocks: list[int] = field(default_factory=list)
    blocks_part: int = 0


class Content(NamedTuple):
    """The content of a block.

    Attributes:
        key: the key of the request that writes the block; of a loaded block, a number made of its name and
            its order.
        writer: the request that writes the block; None if the block was loaded.
        place: index of the block in the writer's block table.
    """

    key: int
    writer: Resident | None = None
    place: int = 0


class Residency:
    """The table of what rows and KV blocks hold.

    Args:
        block_size: tokens per block.

    Attributes:
        rows: row -> the request that holds it.
        contents: block -> its content, for each block into which anything was written or loaded.
        names: block -> the hash by which an order has named its content, until the block is given to another
            request.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.rows: dict[int, Resident] = {}
        self.contents: dict[int, Content] = {}
        self.names: dict[int, bytes] = {}
        self._sum = 0

    @property
    def digest(self) -> int:
        """The digest of the table: 64 bits, never 0."""
        return self._sum & _MASK or 1

    # --- facts ----------------------------------------------------------------------------------

    def enter(self, row: int, generation: int, request_id: str) -> Resident:
        """Give a row to a request; the request that held it has gone."""
        self.leave(row)
        text = f"{row} {generation} {request_id}".encode("utf-8", "surrogatepass")
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) | 1
        self.rows[row] = resident = Resident(request_id=request_id, generation=generation, key=key)
        return resident

    def leave(self, row: int) -> None:
        """Take a row from the request that holds it, if any.

        The contents of the request's blocks stay until the blocks are given to other requests.
        """
        resident = self.rows.pop(row, None)
        if resident is not None:
            self._sum -= resident.key * max(resident.length, 0) + resident.blocks_part

    def extend(self, resident: Resident, blocks: Sequence[int], num_found: int = 0) -> None:
        """Append blocks to a request's table.

        The first `num_found` blocks of the table have their content already, since they were found in the
        cache or loaded. The request writes the others.
        """
        part = 0
        for index, block in enumerate(blocks, len(resident.blocks)):
            if index >= num_found:
                self.contents[block] = Content(resident.key, resident, index)
                self._unname(block)
            held = self.contents.get(block)
            part += _mix(resident.key + index, block + 1) * _mix(held.key if held else 0, index + 1)
        resident.blocks += blocks
        resident.blocks_part += part
        self._sum += part

    def reach(self, resident: Resident, length: int) -> None:
        """Set the length of a request: the plans so far write its positions below `length`."""
        self._sum += resident.key * (length - max(resident.length, 0))
        resident.length = length

    def gain(self, terms: int) -> None:
        """Add to the digest for many requests at once, whose `length` the caller has changed.

        Args:
            terms: the sum of key * gained length over these requests.
        """
        self._sum += terms

    def order(self, order: TierOrder) -> None:
        """Note the name that an order gives to a block, and the new content if the order loads the block.

        A load counts as done at once, although ranks carry it out later.
        """
        if order.is_load:
            self.contents[order.block] = Content(_short(order.name) + order.order * _SPREAD)
        self._unname(order.block)
        self.names[order.block] = order.name
        self._sum += _mix(_short(order.name), order.block)

    def _unname(self, block: int) -> None:
        name = self.names.pop(block, None)
        if name is not None:
            self._sum -= _mix(_short(name), block)

    # --- what a rank does with a plan -----------------------------------------------------------

    def replay(self, plan: ScheduledBatch) -> None:
        """Apply a plan, in the order that `ScheduledBatch` states.

        A plan that the core has not made from its own tables (a measurement, a test's) is applied unchecked.

        Raises:
            ProtocolError: this plan does not fit the rank's table, or the digests differ. The plan starts a
                row at another position than the rank has for it, behind blocks that do not hold the tokens
                before that position, or with too few blocks. The error names step, request, both lengths and
                both digests.
        """
        for row in plan.freed_rows:
            self.leave(row)
        for new in plan.new_rows:
            self.enter(new.row, new.generation, new.request_id)
        complaint = self._replay_orders(plan.orders) if plan.orders else ""
        for new in plan.new_rows:
            if new.blocks:
                complaint = complaint or self._begin(new)
        for rewound in plan.rewound:
            complaint = complaint or self._rewind(rewound)
        complaint = self._replay_rows(plan, complaint)
        if plan.residency not in (_NOT_TOLD, self.digest) or (complaint and plan.residency != _NOT_TOLD):
            raise ProtocolError(
                f"step {plan.step_id}: {complaint or self._lengths(plan)} "
                f"Residency of the core {plan.residency:#018x}, of this stage {self.digest:#018x}.",
                code=MISMATCH,
            )

    def _replay_orders(self, orders: Sequence[TierOrder]) -> str:
        """Apply orders; return what is wrong with the first order that stores an incomplete block, or ""."""
        complaint = ""
        for order in orders:
            held = self.contents.get(order.block)
            if not order.is_load and not (held and self._is_whole(order.block, held.place)):
                text = f"order {order.order} stores block {order.block}, which is not complete."
                complaint = complaint or text
            self.order(order)
        return complaint

    def _begin(self, new: NewRow) -> str:
        """Apply the blocks and the start that an entering row has; return what is wrong with them, or ""."""
        resident = self.rows[new.row]
        complaint = self._refusal_of_start(new.row, resident, new.start, new.blocks)
        self.extend(resident, new.blocks, new.start // self._block_size)
        self.reach(resident, new.start)
        return complaint

    def _rewind(self, rewound: RewoundRow) -> str:
        """Set a row back to its newest known token; return what is wrong with that position, or "".

        The position must lie before the row's planned length, by at most the number of the row's drafts.
        """
        resident, length = self.rows.get(rewound.row), rewound.num_tokens - 1
        if resident is None:
            return f"row {rewound.row} is rewound but holds no request here."
        before = resident.length
        least = before - resident.num_drafts
        self.reach(resident, length)
        resident.num_drafts = 0
        if least <= length < before:
            return ""
        return _differ(rewound.row, resident, "is rewound to an impossible position", length, before)

    def _replay_rows(self, plan: ScheduledBatch, complaint: str) -> str:
        """Apply the rows of a plan; return what is wrong with the first row that does not fit, or "".

        Args:
            complaint: what is wrong with the plan so far; if it is not empty, it is returned.
        """
        rows, size, gained = self.rows, self._block_size, 0
        for index, draft_ids in plan.drafts.items():
            if plan.rows[index] in rows:
                rows[plan.rows[index]].num_drafts += len(draft_ids)
        columns = zip(plan.rows, plan.start_positions, plan.num_tokens, plan.new_blocks, strict=True)
        for row, start, count, blocks in columns:
            resident = rows.get(row)
            if resident is None:
                complaint = complaint or f"row {row} holds no request here."
                continue
            if start != resident.length:
                complaint = complaint or self._refusal_of_start(row, resident, start, blocks)
                self.reach(resident, start)
            if blocks:
                self.extend(resident, blocks, start // size if not resident.blocks else 0)
            resident.length = end = start + count
            gained += resident.key * count
            if end - resident.num_drafts > (room := len(resident.blocks) * size):
                complaint = complaint or _differ(
                    row, resident, "has no KV block for its last token", end, room
                )
        self.gain(gained)
        return complaint

    def _refusal_of_start(self, row: int, resident: Resident, start: int, blocks: Sequence[int]) -> str:
        """Return why a row cannot start at a position that is not its length so far; empty if it can.

        Only a row that has not started can. It starts behind whole blocks, which hold the keys and values
        that the row would have written there.
        """
        if resident.length != _NOT_STARTED:
            return _differ(row, resident, "starts at a wrong position", start, resident.length)
        num_found = start // self._block_size
        for index, block in enumerate(blocks[:num_found]):
            if not self._is_whole(block, index):
                return _differ(row, resident, f"begins with block {block}", start, index * self._block_size)
        if len(blocks) < num_found or start % self._block_size:
            whole = min(len(blocks), num_found) * self._block_size
            return _differ(row, resident, "begins after blocks that it does not hold", start, whole)
        return ""

    def _is_whole(self, block: int, index: int) -> bool:
        """Return whether a block is complete, and can be block `index` of a request's block table.

        A loaded block always can. A block that a request writes can if it has the same index in the table of
        that request, and the request's plans fill it.
        """
        content = self.contents.get(block)
        if content is None:
            return False
        is_written = content.writer is None or content.writer.length >= (index + 1) * self._block_size
        return is_written and (content.writer is None or content.place == index)

    def _lengths(self, plan: ScheduledBatch) -> str:
        held = [
            f"{self.rows[row].request_id} {self.rows[row].length}" for row in plan.rows if row in self.rows
        ]
        text = "this stage's view of the plans differs from the core's."
        return f"{text} Tokens in this stage's view, after this step:{concerned(held)}"


def _differ(row: int, resident: Resident, complaint: str, planned: int, actual: int) -> str:
    return (
        f"row {row} of request {resident.request_id!r} {complaint}: the core has planned {planned} tokens of "
        f"it, this stage has {actual}."
    )


def _mix(key: int, value: int) -> int:
    return ((key * _SPREAD & _MASK) ^ value) * (2 * value + 1) & _MASK


def _short(name: bytes) -> int:
    """Return the first eight bytes of a name as a number; as names are hashes, these tell names apart."""
    return int.from_bytes(name[:8])
