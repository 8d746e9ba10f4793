"""How many drafts are sent, against trying all sizes."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.speculation.drafter import Draft
from penstock.speculation.window_sizes import LEAST_CHANCE, window_sizes


def draft(size: int, chance: float) -> Draft:
    return Draft(list(range(size)), chance)


def test_while_a_step_costs_the_same_everything_likely_is_sent() -> None:
    assert window_sizes([draft(8, 0.95), draft(3, 1.0)], 2, lambda tokens: 1.0) == [8, 3]


def test_what_is_unlikely_is_never_sent() -> None:
    assert window_sizes([draft(8, 0.5)], 1, lambda tokens: 1.0) == [2]  # 0.125 is too little
    assert window_sizes([draft(8, LEAST_CHANCE / 2)], 1, lambda tokens: 1.0) == [0]


def test_where_every_token_costs_as_much_as_the_first_nothing_is_sent() -> None:
    assert window_sizes([draft(4, 1.0)] * 3, 3, lambda tokens: float(tokens)) == [0, 0, 0]


def test_the_likelier_draft_goes_first() -> None:
    seconds = lambda tokens: max(6.0, 3.0 * tokens)  # noqa: E731  # two tokens more are free
    assert window_sizes([draft(4, 0.6), draft(4, 0.9)], 0 + 2, lambda tokens: max(4.0, float(tokens))) == [
        0,
        2,
    ]
    assert window_sizes([draft(4, 0.6), draft(4, 0.9)], 2, seconds) == [0, 0]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_sizes_yield_more_tokens_a_second(seed: int) -> None:
    """With a roofline for a cost, whose slope only grows, the greedy choice is the best one."""
    chance = random.Random(seed)
    drafts = [draft(chance.randint(0, 4), chance.uniform(0.3, 1.0)) for _ in range(chance.randint(1, 3))]
    read, each = chance.uniform(1, 8), chance.uniform(0.2, 1.5)
    num_rows = chance.randint(len(drafts), 5)

    def seconds(tokens: int) -> float:
        return max(read, each * tokens)

    def rate(sizes: tuple[int, ...]) -> float:
        gains = [
            sum(own.chance**depth for depth in range(1, size + 1))
            for own, size in zip(drafts, sizes, strict=True)
        ]
        return (num_rows + sum(gains)) / seconds(num_rows + sum(sizes))

    every = itertools.product(*(range(len(own.token_ids) + 1) for own in drafts))
    chosen = tuple(window_sizes(drafts, num_rows, seconds))
    assert rate(chosen) >= 0.9 * max(
        map(rate, every)
    )  # it asks for a margin, and leaves out what is unlikely
    assert rate(chosen) >= rate((0,) * len(drafts))
