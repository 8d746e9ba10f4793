"""The residency table on its own: what it says of a log, and what it refuses (rows H12, H15)."""

from __future__ import annotations

import random

import msgspec
import pytest

from hand_core import new_row
from penstock.batch import GUESSED, RewoundRow, ScheduledBatch, TierOrder
from penstock.errors import ProtocolError
from penstock.residency import MISMATCH, Residency
from table_digests import recomputed

BLOCK = 4


def begun() -> Residency:
    """Request a holds row 0 with 6 tokens in blocks 3 and 5, b row 1 with 4 in block 2; 9 was loaded."""
    table = Residency(BLOCK)
    table.replay(
        ScheduledBatch(
            step_id=0,
            rows=[0, 1],
            num_tokens=[6, 4],
            start_positions=[0, 0],
            new_blocks=[[3, 5], [2]],
            new_rows=[new_row(0, [1] * 6, name="a"), new_row(1, [2] * 4, name="b")],
            orders=[TierOrder(7, True, 9, b"\1" * 32)],
        )
    )
    table.replay(ScheduledBatch(step_id=1, orders=[TierOrder(8, False, 3, b"\2" * 32)]))
    return table


def told(table: Residency, plan: ScheduledBatch) -> ScheduledBatch:
    """The plan as a core would issue it whose ranks are like this one."""
    table.replay(plan)
    return msgspec.structs.replace(plan, residency=table.digest)


NEXT = ScheduledBatch(step_id=2, rows=[0], num_tokens=[1], start_positions=[6], new_blocks=[[]])
ENTERS = ScheduledBatch(
    step_id=2,
    rows=[2],
    num_tokens=[2],
    start_positions=[BLOCK],
    new_blocks=[[3, 6]],
    new_rows=[new_row(2, [1] * 6, name="c")],
)


ALONE = ScheduledBatch(
    step_id=2,
    new_rows=[msgspec.structs.replace(ENTERS.new_rows[0], blocks=[3, 6], start=BLOCK)],
)


def test_it_says_what_every_block_holds() -> None:
    table = begun()
    held = {block: (content.writer, content.place) for block, content in table.contents.items()}
    a, b = table.rows[0], table.rows[1]
    assert (a.request_id, b.request_id) == ("a", "b")
    assert held == {3: (a, 0), 5: (a, 1), 2: (b, 0), 9: (None, 0)}
    assert table.names == {3: b"\2" * 32, 9: b"\1" * 32}
    assert [resident.length for resident in table.rows.values()] == [6, 4]


@pytest.mark.parametrize("plan", [NEXT, ENTERS, ALONE, ScheduledBatch(step_id=2, freed_rows=[0])])
def test_a_plan_that_fits_is_taken(plan: ScheduledBatch) -> None:
    begun().replay(told(begun(), plan))


def test_a_row_that_enters_alone_is_then_as_if_it_had_entered_with_its_tokens() -> None:
    table, other = begun(), begun()
    table.replay(ALONE)
    assert (table.rows[2].length, table.rows[2].blocks) == (BLOCK, [3, 6])
    assert table.digest == recomputed(table) != other.digest
    table.replay(
        ScheduledBatch(step_id=3, rows=[2], num_tokens=[2], start_positions=[BLOCK], new_blocks=[[]])
    )
    other.replay(ENTERS)
    assert table.digest == other.digest


@pytest.mark.parametrize(
    "plan",
    [
        msgspec.structs.replace(ENTERS, new_blocks=[[2, 6]]),  # whole, and block 0 of b
        msgspec.structs.replace(ENTERS, new_blocks=[[9, 6]]),  # loaded
        msgspec.structs.replace(ENTERS, new_blocks=[[3, 7]]),
        msgspec.structs.replace(ENTERS, new_rows=[new_row(2, [1] * 6, generation=1, name="c")]),
        msgspec.structs.replace(ENTERS, new_rows=[new_row(2, [1] * 6, name="d")]),
        msgspec.structs.replace(ENTERS, freed_rows=[1]),
        msgspec.structs.replace(ENTERS, num_tokens=[1]),
        msgspec.structs.replace(ENTERS, orders=[TierOrder(9, False, 2, b"\3" * 32)]),
    ],
)
def test_h12_another_plan_has_another_digest(plan: ScheduledBatch) -> None:
    issued = told(begun(), ENTERS)
    with pytest.raises(
        ProtocolError, match=r"step 2: .*core 0x[0-9a-f]{16}, of this stage 0x[0-9a-f]{16}"
    ) as e:
        begun().replay(msgspec.structs.replace(plan, residency=issued.residency))
    assert e.value.code == MISMATCH


REFUSALS = {
    "a gap": (msgspec.structs.replace(NEXT, start_positions=[7]), "'a' starts at a wrong .* 7 .* has 6"),
    "a row again": (
        msgspec.structs.replace(NEXT, start_positions=[5]),
        "'a' starts at a wrong .* 5 .* has 6",
    ),
    "nobody": (msgspec.structs.replace(NEXT, rows=[3]), "row 3 holds no request here"),
    "no block": (msgspec.structs.replace(NEXT, num_tokens=[3]), "'a' has no KV block .* 9 tokens .* has 8"),
    "not complete": (
        msgspec.structs.replace(ENTERS, new_blocks=[[8, 6]]),
        "'c' begins with block 8: .* 4 .* 0",
    ),
    "elsewhere": (msgspec.structs.replace(ENTERS, new_blocks=[[5, 6]]), "'c' begins with block 5: .* 4 .* 0"),
    "half a block": (
        ScheduledBatch(step_id=2, orders=[TierOrder(9, False, 5, b"\3" * 32)]),
        "order 9 stores block 5, which is not complete",
    ),
    "alone, and not complete": (
        msgspec.structs.replace(ALONE, new_rows=[msgspec.structs.replace(ALONE.new_rows[0], blocks=[8, 6])]),
        "'c' begins with block 8: .* 4 .* 0",
    ),
    "rewound without drafts": (
        ScheduledBatch(step_id=2, rewound=[RewoundRow(0, 1, 6, [1])]),
        "'a' is rewound to an impossible position: .* 5 .* has 6",
    ),
    "nobody is rewound": (
        ScheduledBatch(step_id=2, rewound=[RewoundRow(3, 1, 6, [1])]),
        "row 3 is rewound but holds no request here",
    ),
    "no blocks": (
        msgspec.structs.replace(ENTERS, start_positions=[8], new_blocks=[[3]]),
        "'c' begins after .* 8 .* has 4",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_h15_what_does_not_follow_is_refused_with_request_and_lengths(case: str) -> None:
    plan, message = REFUSALS[case]
    with pytest.raises(ProtocolError, match=message) as e:
        begun().replay(told(begun(), plan))
    assert e.value.code == MISMATCH
    begun().replay(plan)  # not from the core's tables: only applied


def test_a_rewound_row_goes_back_by_no_more_than_its_drafts() -> None:
    ahead = ScheduledBatch(
        step_id=2,
        rows=[0],
        num_tokens=[2],
        start_positions=[6],
        new_blocks=[[]],
        token_from=[GUESSED],
        drafts={0: [5, 6]},
    )
    for num_tokens, is_refused in ((9, True), (8, False), (7, False), (6, True)):
        table = begun()
        table.replay(ahead)
        plan = ScheduledBatch(step_id=3, rewound=[RewoundRow(0, 1, num_tokens, [1])])
        if is_refused:
            with pytest.raises(ProtocolError, match="'a' is rewound to an impossible position"):
                table.replay(told(table, plan))
            continue
        table.replay(plan)
        assert table.rows[0].length == num_tokens - 1
        assert table.digest == recomputed(table)


def test_the_digest_does_not_depend_on_the_order_of_facts() -> None:
    chance, digests = random.Random(5), set()
    for _ in range(20):
        table, rows = Residency(BLOCK), [0, 1, 2, 3]
        chance.shuffle(rows)
        residents = {row: table.enter(row, 0, f"r{row}") for row in rows}
        chance.shuffle(rows)
        for row in rows:
            table.extend(residents[row], [row])
        chance.shuffle(rows)
        for row in rows:
            table.reach(residents[row], row + 1)
        digests.add(table.digest)
        assert recomputed(table) == table.digest
        for row in rows:
            table.leave(row)
        assert table.digest == Residency(BLOCK).digest
    assert len(digests) == 1
