"""The ring of steps in flight: rows D1, F2, F3, S8."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.engine import ParallelConfig
from penstock.pipeline.inflight import InflightQueue


@pytest.mark.parametrize(
    ("num_stages", "async_depth", "depth"),
    [(1, 0, 1), (1, 1, 2), (2, 0, 2), (2, 1, 3), (2, 2, 4), (3, 0, 3), (4, 0, 4), (4, 2, 6)],
)
def test_d1_f2_s8_depth_is_stages_plus_async_depth(num_stages: int, async_depth: int, depth: int) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=num_stages, async_depth=async_depth)
    queue: InflightQueue[str] = InflightQueue(parallel.depth, num_stages=num_stages)
    for step in range(depth):
        assert not queue.is_full
        assert queue.push(f"plan {step}") == step
    assert queue.is_full
    with pytest.raises(AssertionError, match=f"step {depth} would overwrite step 0"):
        queue.push("one too many")


@pytest.mark.parametrize(
    ("async_depth", "next_slots", "first_rank_slots"),
    [(0, [1, 0], [0, 1]), (1, [1, 2, 0], [2, 0, 1]), (2, [1, 2, 3, 0], [2, 3, 0, 1])],
)
def test_f3_slot_arithmetic_for_two_stages(
    async_depth: int, next_slots: list[int], first_rank_slots: list[int]
) -> None:
    depth = 2 + async_depth
    queue: InflightQueue[str] = InflightQueue(depth, num_stages=2)
    assert [queue.slot(step + 1) for step in range(depth)] == next_slots
    assert [queue.slot(step + 2) for step in range(depth)] == first_rank_slots
    assert [queue.slot(step) for step in range(2 * depth)] == [*range(depth), *range(depth)]


def test_f2_a_slot_never_shows_another_slots_entry() -> None:
    queue: InflightQueue[str] = InflightQueue(3)
    for step in range(20):
        if queue.is_full:
            assert queue.pop() == f"plan {step - 3}"
        queue.push(f"plan {step}")
        queue.check_invariants()
    assert (queue.oldest_step, queue.next_step, len(queue)) == (17, 20, 3)
    assert queue.oldest() == "plan 17"


def test_pop_from_an_empty_ring_is_our_bug() -> None:
    queue: InflightQueue[str] = InflightQueue(2)
    with pytest.raises(AssertionError, match="no step is in flight"):
        queue.pop()


def test_depth_below_the_stages_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="depth 1 is below the 2 stages"):
        InflightQueue(1, num_stages=2)


def test_clear_forgets_entries_but_not_the_step_count() -> None:
    queue: InflightQueue[str] = InflightQueue(2)
    queue.push("a")
    queue.push("b")
    queue.clear()
    queue.check_invariants()
    assert (len(queue), queue.oldest_step) == (0, 2)
    assert queue.push("c") == 2
    assert queue.pop() == "c"


def test_check_invariants_sees_a_slot_that_was_lost() -> None:
    queue: InflightQueue[str] = InflightQueue(2)
    queue.push("a")
    queue._slots[0] = None
    with pytest.raises(AssertionError, match="steps in flight need"):
        queue.check_invariants()


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 6), st.lists(st.booleans(), max_size=60))
def test_f2_behaves_as_a_bounded_fifo(depth: int, pushes: list[bool]) -> None:
    queue: InflightQueue[int] = InflightQueue(depth)
    model: list[int] = []
    for push in pushes:
        if push and len(model) < depth:
            model.append(queue.push(queue.next_step))
        elif not push and model:
            assert queue.pop() == model.pop(0)
        queue.check_invariants()
        assert len(queue) == len(model)
        assert queue.is_full == (len(model) == depth)
