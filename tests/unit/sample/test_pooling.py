"""Vectors from hidden states: what each pooling takes, that chunks change no bit, and what a row forgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.batch import GREEDY, NewRow, ScheduledBatch
from penstock.config.engine import Pooling
from penstock.sample.pooling import PoolingRows

HIDDEN = 5
NUM_TOKENS = 200
STATES = np.random.default_rng(4).normal(size=(NUM_TOKENS, HIDDEN)).astype(np.float32) * 1e3


def entering(row: int, pooling: Pooling | None, num_tokens: int = NUM_TOKENS) -> NewRow:
    return NewRow(row, 0, f"r{row}", num_tokens, [1] * num_tokens, GREEDY, pooling)


def pooled(chunks: Sequence[int], pooling: Pooling, states: NDArray[np.float32] = STATES) -> bytes:
    """The vector of one row that is run in these chunks."""
    rows, start, found = PoolingRows(), 0, []
    for step, count in enumerate(chunks):
        end = start + count
        plan = ScheduledBatch(
            step_id=step,
            rows=[3],
            num_tokens=[count],
            start_positions=[start],
            new_rows=[entering(3, pooling)] if step == 0 else [],
            pooled=[3] if end == len(states) else [],
        )
        chunk = states[start:end].copy()
        rows.apply(plan)
        found += rows.step(plan, lambda indices, chunk=chunk: chunk[indices])
        chunk[:] = np.nan  # the memory is used again
        start = end
    (vector,) = found
    return vector


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("last", STATES[-1]), ("cls", STATES[0]), ("mean", STATES.astype(np.float64).mean(0))],
)
def test_each_pooling_takes_its_tokens(pooling: Pooling, expected: NDArray[np.float64]) -> None:
    found = np.frombuffer(pooled([NUM_TOKENS], pooling), dtype="<f4")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "cls", "mean"])
@pytest.mark.parametrize(
    "chunks", [[1] * 200, [199, 1], [1, 199], [64, 64, 64, 8], [63, 65, 72], [7] * 28 + [4]]
)
def test_chunks_change_no_bit(pooling: Pooling, chunks: list[int]) -> None:
    assert pooled(chunks, pooling) == pooled([NUM_TOKENS], pooling)


def test_a_sum_of_unlike_numbers_keeps_the_small_ones() -> None:
    states = np.array([[1e7]] + [[0.25]] * 2000, dtype=np.float32)
    (found,) = np.frombuffer(pooled([700, 700, 601], "mean", states), dtype="<f4")
    assert found == np.float32((1e7 + 500) / 2001)


def test_rows_of_a_plan_are_kept_apart_and_others_are_left_alone() -> None:
    rows = PoolingRows()
    plan = ScheduledBatch(
        step_id=0,
        rows=[2, 0, 1],
        num_tokens=[1, 3, 2],
        start_positions=[9, 0, 0],
        new_rows=[entering(0, "mean", 3), entering(1, "cls", 2), entering(2, None)],
        pooled=[0, 1],
    )
    asked: list[list[int]] = []

    def states_of(indices: NDArray[np.int64]) -> NDArray[np.float32]:
        asked.append(indices.tolist())
        return STATES[indices]

    rows.apply(plan)
    mean, first = (np.frombuffer(vector, dtype="<f4") for vector in rows.step(plan, states_of))
    assert asked == [[1, 2, 3, 4]], "no token of the row that generates, one of the row that wants one"
    np.testing.assert_allclose(mean, STATES[1:4].mean(0), rtol=1e-5)
    assert (first == STATES[4]).all()


def test_nothing_is_asked_for_where_no_row_is_pooled() -> None:
    plan = ScheduledBatch(step_id=0, rows=[0], num_tokens=[2], start_positions=[0])
    rows = PoolingRows()
    rows.apply(plan)
    assert rows.step(plan, lambda indices: pytest.fail("asked")) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_none(bad: float) -> None:
    states = STATES.copy()
    states[100, 2] = bad
    assert pooled([90, 110], "mean", states) == b""
    assert pooled([90, 110], "last", states) == pooled([90, 110], "last")


@pytest.mark.parametrize("way", ["freed", "again", "reset"])
def test_a_row_that_enters_again_begins_anew(way: str) -> None:
    rows = PoolingRows()
    begun = ScheduledBatch(
        step_id=0, rows=[0], num_tokens=[4], start_positions=[0], new_rows=[entering(0, "mean", 6)]
    )
    rows.apply(begun)
    rows.step(begun, lambda indices: STATES[50:][indices])
    if way == "reset":
        rows.reset()
    again = ScheduledBatch(
        step_id=1,
        rows=[0],
        num_tokens=[6],
        start_positions=[0],
        freed_rows=[0] if way == "freed" else [],
        new_rows=[entering(0, "mean", 6)],
        pooled=[0],
    )
    rows.apply(again)
    (vector,) = rows.step(again, lambda indices: STATES[indices])
    np.testing.assert_allclose(np.frombuffer(vector, dtype="<f4"), STATES[:6].mean(0), rtol=1e-5)
