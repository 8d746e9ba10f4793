"""How long plans may take follows what they have taken (R2, R3; issue 25, point 2)."""

from __future__ import annotations

import pytest

from fakes import CoreRig
from penstock.engine.core.stall_limits import (
    AFTER_LOSS,
    LEAST_S,
    LEAVE_SHARE,
    LONG_LOOK_S,
    SLOWNESS,
    FixedLimit,
    MeasuredLimit,
)
from penstock.errors import LinkClosedError


def measured(*plans: tuple[int, float]) -> MeasuredLimit:
    """A limit that has seen plans of so many tokens take so many seconds."""
    limit = MeasuredLimit(265.0)
    for num_tokens, seconds in plans:
        limit.crossed(num_tokens, 100.0, 100.0 + seconds)
    return limit


@pytest.mark.parametrize(
    ("plans", "num_tokens", "expected_s"),
    [
        ([], 1, 265.0),  # nobody knows how slow the machine is
        ([], 0, LEAST_S),
        ([(0, 9.0)], 1, 265.0),  # an empty plan says nothing of tokens
        ([(8, 0.01)], 8, LEAST_S),
        ([(8, 1.0)], 15, 20.0),  # of the same size
        ([(8, 1.0)], 1, 20.0),  # a smaller one is not slower
        ([(8, 1.0), (1, 0.5)], 1, 10.0),
        ([(8, 1.0)], 64, 160.0),  # as much a token
        ([(8, 1.0), (64, 2.0)], 64, 40.0),
        ([(8, 1.0), (8, 0.5)], 8, 19.6),  # the slowest of its size, which fades
    ],
)
def test_r2_the_limit_follows_the_slowest_plan_of_its_size(
    plans: list[tuple[int, float]], num_tokens: int, expected_s: float
) -> None:
    assert measured(*plans).seconds(num_tokens) == pytest.approx(expected_s)


def test_what_was_too_slow_once_may_take_longer_until_it_has_crossed() -> None:
    limit = measured((64, 1.0), (8, 1.0))
    limit.exceeded(64)
    limit.exceeded(64)
    assert limit.seconds(64) == 20.0 * AFTER_LOSS**2
    limit.crossed(8, 200.0, 201.0)
    assert limit.seconds(64) == 20.0 * AFTER_LOSS**2, "a smaller one proves nothing"
    limit.crossed(64, 300.0, 301.0)
    assert limit.seconds(64) == 20.0


def test_time_in_which_the_core_stood_still_does_not_count_and_teaches_nothing() -> None:
    limit = measured((8, 0.1))
    limit.look(100.0)
    assert limit.look(100.0 + LONG_LOOK_S) < 100.0
    assert limit.look(200.0) == 200.0
    assert limit.look(201.0) == 200.0
    limit.crossed(8, 150.0, 201.0)
    assert limit.seconds(8) == LEAST_S


def test_what_the_user_has_asked_for_stays() -> None:
    limit = FixedLimit(3.0)
    limit.crossed(8, 0.0, 100.0)
    limit.exceeded(8)
    limit.look(0.0)
    assert limit.look(100.0) < 0.0
    assert (limit.seconds(0), limit.seconds(1000)) == (3.0, 3.0)


def stuck() -> CoreRig:
    """A rig with a request whose prompt has crossed in a tenth of a second, and whose next plan does not."""
    rig = CoreRig(latency=None, stall_limit=MeasuredLimit(265.0), recovers=True)
    rig.settle()
    rig.add("a", 5, max_tokens=30)
    rig.step()
    rig.clock.advance(0.1)
    rig.settle()
    assert rig.core.num_inflight == 1
    return rig


def test_r2_a_plan_that_does_not_come_back_is_lost_in_seconds() -> None:
    rig = stuck()
    waited_s = 0.0
    while rig.core.loss is None:
        assert rig.core.next_wakeup() <= rig.clock.now + 1.0, "it looks each second"
        rig.clock.advance(0.5)
        waited_s += 0.5
        rig.step()
    assert waited_s == LEAST_S + 0.5
    assert rig.core.loss.kind == "WaitTimeoutError"
    assert rig.core.leave_s == LEAST_S * LEAVE_SHARE, "others may still compute"


def test_r2_stages_may_finish_the_slowest_plan_that_is_in_the_pipe() -> None:
    """With a link that breaks the oldest plan may be that of a token, and a stage is within a chunk."""
    rig = CoreRig(num_stages=2, latency=None, stall_limit=MeasuredLimit(265.0), recovers=True)
    rig.settle()
    rig.add("a", 5, max_tokens=30)
    rig.step()
    rig.clock.advance(1.0)
    rig.settle()
    rig.add("b", 5, max_tokens=30)
    rig.step()
    assert [step.plan.total_tokens for step in rig.core._steps._inflight.entries()] == [1, 5]
    limit = MeasuredLimit(265.0)
    limit.crossed(5, 0.0, 1.0)
    limit.crossed(1, 0.0, 0.1)
    rig.core._steps._stall_limit = limit
    rig.core.lose_epoch(LinkClosedError("the link is broken.").info())
    assert rig.core.leave_s == SLOWNESS * LEAVE_SHARE


def test_r2_a_core_that_was_suspended_gives_the_stages_time_to_answer() -> None:
    rig = stuck()
    rig.step()
    rig.clock.advance(3600.0)
    for _ in range(10):
        rig.step()
        assert rig.core.loss is None
        rig.clock.advance(0.5)
    rig.settle()
    assert len(rig.updates["a"]) == 2


def test_a_result_that_waits_for_the_store_is_no_stall() -> None:
    rig = stuck()
    rig.core.step()
    rig.clock.advance(1.0)
    steps = rig.core._steps
    steps.add_results([object()])  # type: ignore[list-item]
    for _ in range(10):
        rig.clock.advance(1.0)
        steps.check_progress()
