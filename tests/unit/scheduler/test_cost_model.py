"""What steps cost, learnt from samples [d10]."""

from __future__ import annotations

import random

import pytest

from fakes import sample_of, taught
from penstock.batch import ScheduledBatch
from penstock.scheduler.cost_model import (
    CostModel,
    StageCost,
    StepSample,
    StepShape,
    attended_by,
    fit_roofline,
)

STAGE = StageCost(
    read=0.030, per_token=0.002, per_attended=4e-7, overhead=0.001, head_read=0.010, per_sample=0.001
)


def test_a_shape_counts_each_position_that_a_token_attends_to() -> None:
    plan = ScheduledBatch(
        step_id=0,
        rows=[3, 1],
        num_tokens=[1, 4],
        start_positions=[9, 2],
        need_sampled=[True, False],
    )
    assert StepShape.of(plan) == (5, 10 + (3 + 4 + 5 + 6), 1)


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 5), (7, 1), (7, 4)])
def test_attended_by_is_the_sum_over_tokens(start: int, num_tokens: int) -> None:
    assert attended_by(start, num_tokens) == sum(start + i + 1 for i in range(num_tokens))


def test_d10_costs_are_found_again_from_steps_of_many_shapes() -> None:
    (found,) = taught(STAGE).costs() or []
    for name in ("read", "per_token", "per_attended", "overhead", "head_read", "per_sample"):
        assert getattr(found, name) == pytest.approx(getattr(STAGE, name), rel=0.05), name


def test_d10_noise_of_a_tenth_moves_predictions_by_less() -> None:
    rng = random.Random(3)
    model = CostModel(1)
    shapes = [StepShape(n, n * context, n) for n in (1, 4, 8, 32, 128) for context in (16, 400)]
    for _ in range(20):
        noisy = [sample_of(STAGE, shape) for shape in shapes]
        noisy = [
            StepSample(s.shape, s.forward_s * rng.uniform(0.9, 1.1), s.sample_s, s.overhead_s) for s in noisy
        ]
        model.learn(0, noisy, alone=False)
    (found,) = model.costs() or []
    for shape in (StepShape(6, 600, 6), StepShape(24, 2000, 24), StepShape(64, 2080, 0)):
        assert found.seconds(shape) == pytest.approx(STAGE.seconds(shape), rel=0.06)


def test_drift_is_followed_without_forgetting_other_shapes() -> None:
    model = taught(STAGE)
    slower = StageCost(read=0.060, per_token=0.002, per_attended=4e-7, overhead=0.001)
    for _ in range(60):
        model.learn(0, [sample_of(slower, StepShape(n, n * 40, 0)) for n in (1, 2, 4, 8)], alone=False)
    (found,) = model.costs() or []
    assert found.seconds(StepShape(4, 160, 0)) == pytest.approx(0.061, rel=0.05)
    assert found.seconds(StepShape(256, 256, 0)) == pytest.approx(
        STAGE.seconds(StepShape(256, 256, 0)), rel=0.1
    )


def test_alone_and_shared_are_two_costs_and_one_stage_has_one() -> None:
    alone = StageCost(read=0.015, per_token=0.002)
    model = taught(STAGE, STAGE, alone=[alone, alone])
    assert (model.costs() or [])[1].read == pytest.approx(0.030, rel=0.05)
    assert (model.costs(alone=True) or [])[1].read == pytest.approx(0.015, rel=0.05)
    single = CostModel(1)
    single.learn(0, [sample_of(STAGE, StepShape(1, 1, 1))], alone=True)
    assert single.costs() == single.costs(alone=True) != None  # noqa: E711


def test_nothing_is_known_before_every_stage_has_reported() -> None:
    model = CostModel(2)
    model.learn(0, [sample_of(STAGE, StepShape(1, 1, 1))], alone=False)
    assert model.costs() is None
    model.learn(1, [sample_of(STAGE, StepShape(1, 1, 1))], alone=False)
    assert model.costs() is not None
    assert model.costs(alone=True) is None


def test_a_bend_that_was_not_seen_is_taken_to_lie_at_twice_the_largest_size() -> None:
    read, per_token, per_attended = fit_roofline([(1, 1, 0.03), (8, 8, 0.03)], [1.0, 1.0])
    assert (read, per_attended) == (pytest.approx(0.03), 0.0)
    assert per_token == pytest.approx(0.03 / 16)


def test_coefficients_are_never_negative() -> None:
    rng = random.Random(5)
    for _ in range(50):
        rows = [(rng.randint(1, 300), rng.randint(1, 9999), rng.uniform(1e-6, 1.0)) for _ in range(6)]
        assert min(fit_roofline(rows, [1.0] * 6)) >= 0.0
