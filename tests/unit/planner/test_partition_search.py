"""The search finds what trying every split finds: d5, I13, facts e4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import depth
from penstock.planner.partition_search import Split, StageTable, best_split, judge, second_best


def splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to give every stage at least one layer."""
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(1, num_layers - num_stages + 2):
        yield from ((first, *rest) for rest in splits(num_layers - first, num_stages - 1))


def ranked(tables: Sequence[StageTable], num_layers: int) -> list[Split]:
    """All that fit, best first."""
    judged = (judge(tables, layers) for layers in splits(num_layers, len(tables)))
    return sorted(split for split in judged if split is not None)


def linear(
    layer_ns: int, end_ns: int = 0, *, num_layers: int, most: int | None = None, rows: int = 8
) -> StageTable:
    """A stage that takes the same time for every layer, and holds `most` layers."""
    most = num_layers if most is None else most
    max_rows = [rows if 0 < count <= most else 0 for count in range(num_layers + 1)]
    return StageTable(max_rows=max_rows, cost_ns=lambda count, _: end_ns + count * layer_ns)


@st.composite
def any_tables(draw: st.DrawFn) -> tuple[list[StageTable], int]:
    """Stages of unlike speed and memory. Costs are any numbers at all: not linear, not even rising."""
    num_stages = draw(st.integers(1, 4))
    num_layers = num_stages + draw(st.integers(0, 7))
    cells = st.lists(st.integers(0, 5), min_size=num_layers + 1, max_size=num_layers + 1)
    costs = st.lists(st.integers(0, 30), min_size=6 * (num_layers + 1), max_size=6 * (num_layers + 1))
    tables = []
    for _ in range(num_stages):
        max_rows, flat = draw(cells), draw(costs)
        tables.append(
            StageTable(max_rows=max_rows, cost_ns=lambda count, rows, flat=flat: flat[6 * count + rows])
        )
    return tables, num_layers


@pytest.mark.deep
@settings(max_examples=depth(100, 300))
@given(any_tables())
def test_d5_the_search_agrees_with_trying_every_split(drawn: tuple[list[StageTable], int]) -> None:
    tables, num_layers = drawn
    expected = ranked(tables, num_layers)
    found = best_split(tables, num_layers)
    assert found == (expected[0] if expected else None)
    if found is not None:
        assert second_best(tables, num_layers, found) == (expected[1] if len(expected) > 1 else None)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100), st.integers(2, 9)), min_size=2, max_size=4),
    st.integers(0, 10),
)
def test_i13_throttled_ranks_and_memory_limits(stages: list[tuple[int, int, int]], more: int) -> None:
    num_layers = len(stages) + more
    tables = [linear(layer, end, num_layers=num_layers, most=most) for layer, end, most in stages]
    expected = ranked(tables, num_layers)
    assert best_split(tables, num_layers) == (expected[0] if expected else None)


@pytest.mark.parametrize(
    ("tflops", "capacities", "num_layers", "expected"),
    [
        ((312, 165, 82.6), (13, 5, 3), 21, (13, 5, 3)),
        ((312, 165, 82.6), (13, 5, 3), 20, (12, 5, 3)),
        ((82.6, 312, 165, 165, 82.6), (3, 13, 5, 5, 3), 29, (3, 13, 5, 5, 3)),
        ((165, 165), (5, 5), 8, (4, 4)),
    ],
)
def test_layers_follow_speed_within_memory(
    tflops: Sequence[float], capacities: Sequence[int], num_layers: int, expected: tuple[int, ...]
) -> None:
    tables = [
        linear(round(1e9 / speed), num_layers=num_layers, most=most)
        for speed, most in zip(tflops, capacities, strict=True)
    ]
    found = best_split(tables, num_layers)
    assert found is not None
    assert found.layers == expected


def test_61_layers_with_a_heavy_last_stage() -> None:
    """Milliseconds as TensorRT-LLM measured them: 6.3 a layer, 17.8 more for what follows the layers."""
    tables = [linear(6_300_000, num_layers=61) for _ in range(3)]
    tables.append(linear(6_300_000, 17_800_000, num_layers=61))
    found, even = best_split(tables, 61), judge(tables, (16, 15, 15, 15))
    assert found is not None
    assert even is not None
    assert found.layers == (16, 16, 16, 13)
    assert (found.slowest_ns, even.slowest_ns) == (100_800_000, 112_300_000)


def test_d5_a_stage_three_times_as_fast_gets_three_times_the_layers() -> None:
    tables = [linear(10, num_layers=24), linear(30, num_layers=24)]
    found, even = best_split(tables, 24), judge(tables, (12, 12))
    assert found is not None
    assert even is not None
    assert found.layers == (18, 6)
    assert even.slowest_ns / found.slowest_ns == 2.0


def test_equal_splits_are_told_apart_by_balance_and_then_by_the_first_stages() -> None:
    tables = [linear(10, num_layers=7) for _ in range(3)]
    found = best_split(tables, 7)
    assert found is not None
    assert found.layers == (2, 2, 3)
    heavy_end = [linear(10, num_layers=9), linear(10, num_layers=9), linear(10, 90, num_layers=9)]
    found = best_split(heavy_end, 9)
    assert found is not None
    assert found.layers == (4, 4, 1), "the head is the slowest in any case; the others are balanced"


def test_d5_more_rows_can_be_worth_slower_layers() -> None:
    """Without room for keys and values, the fast stage must not take so many layers that all steps shrink."""

    def cost_ns(count: int, rows: int) -> int:
        return count * 1000 // rows

    roomy = StageTable(max_rows=[0, *[8] * 8], cost_ns=lambda count, rows: 2 * cost_ns(count, rows))
    tight = StageTable(max_rows=[0, 8, 8, 8, 8, 1, 1, 1, 1], cost_ns=cost_ns)
    found = best_split([roomy, tight], 8)
    assert found is not None
    assert found.layers == (4, 4)
    assert found.num_rows == 8


def test_nothing_that_fits_is_none() -> None:
    assert best_split([linear(1, num_layers=4, most=1), linear(1, num_layers=4, most=2)], 4) is None
    assert judge([linear(1, num_layers=4, most=1), linear(1, num_layers=4)], (2, 2)) is None
    only = [linear(1, num_layers=2), linear(1, num_layers=2)]
    found = best_split(only, 2)
    assert found is not None
    assert second_best(only, 2, found) is None


def test_eighty_layers_over_eight_stages() -> None:
    tables = [linear(100 + stage, 50 * (stage in (0, 7)), num_layers=80) for stage in range(8)]
    found = best_split(tables, 80)
    assert found is not None
    assert sum(found.layers) == 80
    fitting = [(found.slowest_ns - 1 - 50 * (stage in (0, 7))) // (100 + stage) for stage in range(8)]
    assert sum(fitting) < 80, "no split is faster"
