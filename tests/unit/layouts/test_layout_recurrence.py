"""The recurrence of plans in a pipe, against closed forms."""

from __future__ import annotations

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


def test_i10_the_slowest_stage_sets_the_pace_of_unlike_stages() -> None:
    state = steady_state([[1.0, 3.0, 1.0]] * 3, [[0.0, 0.0]] * 3)
    assert state.cycle_s == pytest.approx(9.0)
    assert state.bubble == pytest.approx(1 - 15 / 27)
