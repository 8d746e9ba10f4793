"""Which entries of the MTP layer's cache are good, against an oracle that keeps the owner of every entry."""

from __future__ import annotations

from random import Random

import pytest

from penstock.runner.block_tables import BlockTables
from penstock.runner.mtp_context import Begin, MTPContext

SIZE = 4


@pytest.fixture
def tables() -> BlockTables:
    tables = BlockTables(3, 8, SIZE)
    for row in range(3):
        tables.set(row, range(8 * row, 8 * row + 8))
    return tables


@pytest.fixture
def context(tables: BlockTables) -> MTPContext:
    return MTPContext(24, tables)


def test_a_row_that_is_read_from_its_beginning_is_seen_whole(context: MTPContext) -> None:
    assert context.read(1, 0, 6) == Begin(0)
    assert context.read(1, 6, 7) == Begin(0)
    assert context.read(1, 7, 20) == Begin(0)


def test_behind_a_gap_the_context_begins_with_the_block_of_the_first_token(context: MTPContext) -> None:
    context.read(0, 0, 6)
    context.leave_out(0, 6, 10)
    assert context.read(0, 10, 11) == Begin(2, cleared=2)
    assert context.read(0, 11, 13) == Begin(2)
    context.leave_out(0, 13, 16)
    assert context.read(0, 16, 17) == Begin(4), "at the beginning of a block nothing is to be cleared"


def test_a_wrong_guess_is_no_gap(context: MTPContext) -> None:
    """Of a window the layer reads what was right, and goes on from there."""
    context.read(0, 0, 5)
    context.read(0, 5, 6)
    assert context.read(0, 6, 9) == Begin(0)


def test_another_requests_entries_are_not_seen(context: MTPContext, tables: BlockTables) -> None:
    context.read(0, 0, 16)
    tables.set(1, [0, 1, 9, 10])  # blocks of a prefix, and two of its own
    context.enter(1)
    assert context.read(1, 8, 12) == Begin(0), "the prefix was read, by whomever"
    tables.set(2, [2, 11])
    context.enter(2)
    context.leave_out(2, 0, 3)  # block 2 is written anew, without the layer
    assert context.read(2, 3, 5) == Begin(0, cleared=2)
    tables.set(2, [0, 1, 12])
    context.enter(2)
    context.overwrite(1)  # comes from a store
    assert context.read(2, 8, 9) == Begin(2)


def test_a_new_request_in_the_row_begins_anew(context: MTPContext, tables: BlockTables) -> None:
    context.read(0, 0, 6)
    tables.set(0, [20, 21])
    context.enter(0)
    assert context.read(0, 6, 7) == Begin(1, cleared=21)


def test_nothing_is_good_once_all_is_forgotten(context: MTPContext) -> None:
    context.read(0, 0, 8)
    context.reset()
    assert context.read(0, 8, 9) == Begin(2)


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_seen_was_read_for_this_text(seed: int, tables: BlockTables) -> None:
    random = Random(seed)
    context = MTPContext(24, tables)
    owner: dict[int, tuple[int, int] | None] = {}  # slot -> text and position that the layer has read there
    text, length = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
    for step in range(200):
        row = random.randrange(3)
        if length[row] > 26 or random.random() < 0.05:
            others = {block for other in range(3) if other != row for block in tables.first(other, 8)}
            tables.set(row, random.sample([block for block in range(24) if block not in others], 8))
            context.enter(row)
            text[row], length[row] = step, 0
        start, count = length[row], random.choice((1, 1, 1, 2, 5))
        slots = [slot for run in tables.slots(row, start, start + count) for slot in run]
        if random.random() < 0.3:
            context.leave_out(row, start, start + count)
            owner |= dict.fromkeys(slots)
            length[row] += count
            continue
        end = start + random.randint(1, count)  # guesses behind are wrong, and their entries no longer good
        begin = context.read(row, start, end)
        if begin.cleared >= 0:
            assert begin.cleared == tables.first(row, 8)[begin.first_block]
            cleared = range(begin.cleared * SIZE, begin.cleared * SIZE + start % SIZE)
            owner |= dict.fromkeys(cleared, (text[row], -1))
        owner |= dict.fromkeys(slots)
        owner |= {slot: (text[row], start + at) for at, slot in enumerate(slots[: end - start])}
        seen = [slot for run in tables.slots(row, begin.first_block * SIZE, end) for slot in run]
        for position, slot in enumerate(seen, begin.first_block * SIZE):
            assert owner[slot] in ((text[row], position), (text[row], -1))
        length[row] = end
