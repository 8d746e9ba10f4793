"""Whether windows should follow each other, and how large they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from penstock.speculation.streaming import PipeTimes, streamed_size


def per_token(stages: Sequence[float]) -> Callable[[int], list[float]]:
    return lambda tokens: [seconds * tokens for seconds in stages]


def fixed(stages: Sequence[float]) -> Callable[[int], list[float]]:
    return lambda tokens: list(stages)


def alike(seconds: Callable[[int], list[float]], **given: float) -> PipeTimes:
    return PipeTimes(seconds, seconds, **given)


@pytest.mark.parametrize("chance", [0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_stages", [2, 4, 20])
def test_where_time_is_tokens_windows_of_one_stream(chance: float, num_stages: int) -> None:
    assert streamed_size(chance, 9, alike(per_token([0.01] * num_stages))) == 1


@pytest.mark.parametrize("num_stages", [2, 4, 20])
def test_where_windows_cost_no_more_than_tokens_they_are_large(num_stages: int) -> None:
    assert streamed_size(0.97, 9, alike(fixed([0.01] * num_stages))) == 9
    assert streamed_size(0.3, 9, alike(fixed([0.01] * num_stages))) == 0, "one window has all that is right"


def test_one_stage_has_nothing_to_fill() -> None:
    for seconds in (fixed([0.01]), per_token([0.01])):
        assert streamed_size(0.9, 9, alike(seconds)) == 0


def test_a_hopeless_guess_is_not_worth_it() -> None:
    assert streamed_size(0.01, 9, alike(fixed([0.01] * 4))) == 0


def test_stages_that_hinder_each_other_are_better_used_one_at_a_time() -> None:
    times = PipeTimes(fixed([0.01, 0.01]), fixed([0.03, 0.03]))
    assert streamed_size(0.5, 4, times) == 0


def test_a_wire_is_to_be_filled_like_stages() -> None:
    assert streamed_size(0.5, 9, alike(per_token([0.01]), latency=0.05)) > 0


def test_streams_that_fill_the_pipe_by_themselves_need_no_guesses() -> None:
    times = alike(per_token([0.01] * 2))
    assert streamed_size(0.5, 1, times) == 1
    assert streamed_size(0.5, 1, times._replace(num_streams=2)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_rates_are_those_of_a_pipe_that_is_played(seed: int) -> None:
    """Windows are played one by one; the size that is chosen is nearly the best of all."""
    random = Random(seed)
    stages, chance = (
        [random.uniform(0.5, 2.0) for _ in range(random.randint(2, 6))],
        random.uniform(0.3, 0.95),
    )
    base = random.uniform(0.0, 3.0)

    def seconds(tokens: int) -> list[float]:
        return [stage * max(base, tokens) for stage in stages]

    def played(size: int) -> float:
        """Tokens a second of a stream."""
        luck, tokens, took = Random(1), 0, 0.0
        for _ in range(4000):
            right = 0
            while luck.random() < chance:
                right += 1
            tokens += right + 1
            took += sum(seconds(size)) + max(seconds(size)) * (right // size)
        return tokens / took

    chosen = streamed_size(chance, 8, alike(seconds))
    assert chosen > 0
    assert played(chosen) >= 0.97 * max(map(played, range(1, 9)))
