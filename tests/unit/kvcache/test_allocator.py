"""Block tables per request, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool


def make(num_blocks: int = 4, block_size: int = 4) -> BlockAllocator:
    return BlockAllocator(BlockPool(num_blocks), block_size)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert make().blocks_for(tokens) == blocks


def test_grow_adds_a_block_only_at_a_boundary() -> None:
    allocator = make()
    first = allocator.grow(7, 4)
    assert first is not None
    assert len(first) == 1
    assert allocator.grow(7, 4) == []
    second = allocator.grow(7, 5)
    assert second is not None
    assert allocator.table(7) == first + second
    assert allocator.num_free_blocks == 2
    assert allocator.owners() == {7}


def test_dr6_growing_beyond_the_pool_changes_nothing() -> None:
    allocator = make()
    allocator.grow(1, 8)
    assert allocator.grow(1, 20) is None
    assert allocator.grow(2, 12) is None
    assert len(allocator.table(1)) == 2
    assert allocator.owners() == {1}
    assert allocator.num_free_blocks == 2
    allocator.check_invariants()


def test_free_gives_all_blocks_back_once() -> None:
    allocator = make()
    allocator.grow(1, 16)
    assert allocator.num_free_blocks == 0
    allocator.free(1)
    assert allocator.num_free_blocks == allocator.num_blocks == 4
    assert allocator.table(1) == []
    with pytest.raises(KeyError):
        allocator.free(1)


def test_capacity_in_tokens() -> None:
    assert make(num_blocks=5, block_size=16).capacity_tokens == 80


def test_blocks_without_tokens_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="blocks of 0 tokens"):
        make(block_size=0)


def test_check_invariants_sees_shared_and_ownerless_blocks() -> None:
    allocator = make()
    allocator.grow(1, 4)
    allocator._tables[2] = allocator.table(1)
    with pytest.raises(AssertionError, match="block 0 has 1 holders and 2 owners"):
        allocator.check_invariants()
    allocator._tables.clear()
    with pytest.raises(AssertionError, match="block 0 has 1 holders and 0 owners"):
        allocator.check_invariants()


@settings(derandomize=True, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60),
)
def test_tables_follow_a_plain_model(
    num_blocks: int, block_size: int, operations: list[tuple[int, int]]
) -> None:
    allocator = make(num_blocks, block_size)
    tables: dict[int, list[int]] = {}
    for owner, tokens in operations:
        if tokens == 0 and owner in tables:
            allocator.free(owner)
            del tables[owner]
        elif tokens > 0:
            held = tables.get(owner, [])
            missing = max(0, -(-tokens // block_size) - len(held))
            free = num_blocks - sum(map(len, tables.values()))
            added = allocator.grow(owner, tokens)
            assert (added is None) == (missing > free)
            if added:
                assert len(added) == missing
                tables[owner] = held + added
        allocator.check_invariants()
        assert {one: allocator.table(one) for one in tables} == tables
