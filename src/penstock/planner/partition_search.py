"""Finds the best split of the layers over the stages by an exact search in tables of costs.

Called with the tables of `planner.performance`. All costs are whole nanoseconds, so that sums are exact and
the same tables give the same split on every machine. Splits are compared by these, in this order:

1. the cost of the slowest stage;
2. the sum of the squares of the stages' costs: of equally fast splits, the most balanced one is best;
3. the layers of the first stage, then of the next, and so on: fewer are better.

The split decides how many rows a step has: as many as the stage with the least KV memory allows. So the
search goes through all numbers of rows. For each it finds the best split whose steps have exactly so many
rows, by dynamic programming over stages and layers. Then it takes the best of these splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """The rows and the costs of one stage, by its number of layers.

    Attributes:
        max_rows: [num_layers + 1] most rows of a step that the stage's memory allows beside 0, 1, … layers;
            0: so many layers do not fit.
        cost_ns: (layers, rows of a step) -> nanoseconds that the stage spends on a typical request.
    """

    max_rows: Sequence[int]
    cost_ns: Callable[[int, int], int]


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """A split and its merit. Splits are ordered by their fields, and the smallest split is the best.

    Attributes:
        slowest_ns: nanoseconds that the slowest stage spends on a typical request.
        squares: sum of the squares of all stages' costs.
        layers: number of layers of each stage.
        num_rows: rows of a step.
    """

    slowest_ns: int
    squares: int
    layers: tuple[int, ...]
    num_rows: int


def judge(tables: Sequence[StageTable], layers: Sequence[int]) -> Split | None:
    """Return a given split with its merit; None if it does not fit."""
    num_rows = min(table.max_rows[count] for table, count in zip(tables, layers, strict=True))
    if num_rows == 0:
        return None
    costs = [table.cost_ns(count, num_rows) for table, count in zip(tables, layers, strict=True)]
    return Split(max(costs), sum(cost * cost for cost in costs), tuple(layers), num_rows)


def best_split(tables: Sequence[StageTable], num_layers: int) -> Split | None:
    """Return the best of all splits with at least one layer per stage; None if no split fits."""
    best: Split | None = None
    candidates = {rows for table in tables for rows in table.max_rows[1:] if rows}
    for num_rows in sorted(candidates, reverse=True):
        split = _best_with(tables, num_layers, num_rows, None if best is None else best.slowest_ns)
        if split is not None and (best is None or split < best):
            best = split
    return best


def second_best(tables: Sequence[StageTable], num_layers: int, best: Split) -> Split | None:
    """Return the best of all splits but `best`; it differs from `best` in at least one stage."""
    splits = [
        best_split([*tables[:stage], _without(tables[stage], count), *tables[stage + 1 :]], num_layers)
        for stage, count in enumerate(best.layers)
    ]
    return min((split for split in splits if split is not None), default=None)


def _without(table: StageTable, num_layers: int) -> StageTable:
    """Return the table of the same stage, in which exactly `num_layers` layers do not fit."""
    return replace(table, max_rows=[0 if n == num_layers else rows for n, rows in enumerate(table.max_rows)])


@dataclass(frozen=True, slots=True)
class _Choice:
    """A number of layers that a stage may have, and its cost for the rows of a step in question."""

    num_layers: int
    cost_ns: int
    is_tightest: bool  # the stage's memory allows exactly these rows, and no more


def _best_with(
    tables: Sequence[StageTable], num_layers: int, num_rows: int, limit_ns: int | None
) -> Split | None:
    """Return the best split whose steps have exactly `num_rows` rows; None if there is none.

    Args:
        limit_ns: splits with a stage of a higher cost are left out, since a better split is known.
    """
    most = num_layers - len(tables) + 1
    choices = [
        [
            choice
            for choice in _choices(table, most, num_rows)
            if limit_ns is None or choice.cost_ns <= limit_ns
        ]
        for table in tables
    ]
    cheapest = _cheapest(choices, num_layers, max)
    if cheapest is None:
        return None
    slowest_ns, _ = cheapest
    kept = [[choice for choice in of_stage if choice.cost_ns <= slowest_ns] for of_stage in choices]
    cheapest = _cheapest(kept, num_layers, lambda total, cost: total + cost * cost)
    assert cheapest is not None, "the slowest stage was found with these choices"
    squares, layers = cheapest
    return Split(slowest_ns, squares, layers, num_rows)


def _choices(table: StageTable, most: int, num_rows: int) -> list[_Choice]:
    return [
        _Choice(count, table.cost_ns(count, num_rows), table.max_rows[count] == num_rows)
        for count in range(1, most + 1)
        if table.max_rows[count] >= num_rows
    ]


def _cheapest(
    choices: Sequence[Sequence[_Choice]], num_layers: int, add: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]] | None:
    """Return the cheapest way to place all layers so that at least one stage is a tightest one.

    Args:
        choices: for each stage, the numbers of layers that it may have, rising.
        add: (cost of the stages so far, cost of one more) -> cost of all of them. It must not fall if the
            first of the two costs rises.

    Returns:
        The cost, and the layers of each stage; None if there is no such way.
    """
    best = {(0, False): (0, ())}  # (layers placed, a tightest stage is among them) -> (cost, layers)
    reached: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = dict(best)
    for stage, of_stage in enumerate(choices):
        most = num_layers - (len(choices) - stage - 1)  # the later stages have a layer each
        before, reached = reached, {}
        for (placed, is_tight), (cost, layers) in before.items():
            for choice in of_stage:
                if placed + choice.num_layers > most:
                    break
                state = (placed + choice.num_layers, is_tight or choice.is_tightest)
                way = (add(cost, choice.cost_ns), (*layers, choice.num_layers))
                if state not in reached or way < reached[state]:
                    reached[state] = way
    return reached.get((num_layers, True))
