"""The recurrence of plans in a pipe, against closed forms."""

from __future__ import annotations

import math

import pytest

from penstock.layouts.recurrence import bubble_of_one_pass, pass_plans, steady_state


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "bubble"),
    [
        (4, 1, 0.75),
        (4, 4, 0.4286),
        (4, 8, 0.2727),
        (4, 16, 0.1579),
        (8, 1, 0.875),
        (8, 8, 0.4667),
        (2, 1, 0.5),
    ],
)
def test_bubbles_of_one_pass(num_stages: int, num_micro_batches: int, bubble: float) -> None:
    assert bubble_of_one_pass(num_stages, num_micro_batches) == pytest.approx(bubble, abs=5e-5)


def test_i10_one_batch_takes_all_stages_and_the_ways_between_them() -> None:
    passage = pass_plans(1, lambda _, __: 3.0, lambda _, __: 0.5, 4)
    assert passage.ends == [4 * 3.0 + 3 * 0.5]
    assert passage.bubble == pytest.approx(1 - 12.0 / (4 * 13.5))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_what_needs_no_hidden_states_is_done_before_they_come(num_stages: int) -> None:
    ahead_s = [0.5] * num_stages
    alone = steady_state([[2.0] * num_stages], [[0.0] * (num_stages - 1)], ahead_s=ahead_s)
    assert alone.cycle_s == pytest.approx(2.0 + 1.5 * (num_stages - 1))
    assert alone.bubble == pytest.approx(1 - 2.0 / alone.cycle_s)
    full = steady_state(
        [[2.0] * num_stages] * num_stages, [[0.0] * (num_stages - 1)] * num_stages, ahead_s=ahead_s
    )
    assert full.cycle_s == pytest.approx(2.0 * num_stages)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
def test_i10_a_single_micro_batch_keeps_one_stage_busy(num_stages: int) -> None:
    state = steady_state([[2.0] * num_stages], [[0.0] * (num_stages - 1)])
    assert state.cycle_s == pytest.approx(2.0 * num_stages)
    assert state.bubble == pytest.approx((num_stages - 1) / num_stages)


def test_i10_as_many_micro_batches_as_stages_leave_no_bubble_and_a_wire_wants_more() -> None:
    assert steady_state([[2.0] * 4] * 4, [[0.0] * 3] * 4).bubble == pytest.approx(0.0)
    with_wire = steady_state([[2.0] * 4] * 4, [[1.0] * 3] * 4, return_s=1.0)
    assert with_wire.cycle_s == pytest.approx(12.0)
    assert with_wire.bubble == pytest.approx(1 - 8 / 12)
    assert steady_state([[2.0] * 4] * 6, [[1.0] * 3] * 6, return_s=1.0).bubble == pytest.approx(0.0)


@pytest.mark.parametrize("spread", [0.3, 0.6])
def test_uneven_steps_of_one_micro_batch_change_no_mean_and_those_of_two_make_stages_wait(
    spread: float,
) -> None:
    alone = steady_state([[2.0] * 2], [[0.0]], spread=spread)
    assert alone.cycle_s == pytest.approx(4.0, rel=0.02)
    assert alone.bubble == pytest.approx(0.5, abs=0.01)
    two = steady_state([[2.0] * 2] * 2, [[0.0]] * 2, spread=spread)
    # Of two log-normal times with this sigma, the mean of the longer one is (1 + erf(sigma / 2)) x the mean:
    # with two micro-batches, each pair of stages begins together.
    sigma = math.sqrt(math.log1p(spread**2))
    assert two.cycle_s == pytest.approx(4.0 * (1 + math.erf(sigma / 2)), rel=0.02)
    assert two == steady_state([[2.0] * 2] * 2, [[0.0]] * 2, spread=spread)


def test_i10_the_slowest_stage_sets_the_pace_of_unlike_stages() -> None:
    state = steady_state([[1.0, 3.0, 1.0]] * 3, [[0.0, 0.0]] * 3)
    assert state.cycle_s == pytest.approx(9.0)
    assert state.bubble == pytest.approx(1 - 15 / 27)
