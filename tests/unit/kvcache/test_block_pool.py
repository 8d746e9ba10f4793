"""Free and taken blocks."""

from __future__ import annotations

from array import array

import pytest

from penstock.kvcache.block_pool import BlockPool


def test_blocks_are_taken_once_and_come_back() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    assert first is not None
    assert sorted(first) == [0, 1, 2]
    assert pool.num_free == 1
    pool.check_invariants()
    pool.give_back(first)
    assert pool.num_free == 4
    pool.check_invariants()


def test_dr6_too_few_blocks_take_none() -> None:
    pool = BlockPool(3)
    pool.take(2)
    assert pool.take(2) is None
    assert pool.num_free == 1
    pool.check_invariants()
    assert pool.take(0) == []


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(8)
    blocks = pool.take(3)
    assert blocks is not None
    pool.give_back(blocks)
    assert pool.take(3) == blocks


@pytest.mark.parametrize("blocks", [[0, 0], [1]])
def test_freeing_twice_is_our_bug(blocks: list[int]) -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(blocks)


def test_an_empty_pool_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="a pool of 0 blocks"):
        BlockPool(0)


@pytest.mark.parametrize(
    ("free", "taken", "message"),
    [
        ([1, 1], [1, 0], "twice"),
        ([1, 0], [1, 0], "a taken block is in the free list"),
        ([], [1, 0], "a block is lost"),
    ],
)
def test_check_invariants_sees_damage(free: list[int], taken: list[int], message: str) -> None:
    pool = BlockPool(2)
    pool._free[:] = free
    pool._holders[:] = array("i", taken)
    with pytest.raises(AssertionError, match=message):
        pool.check_invariants()
