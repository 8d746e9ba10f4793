"""What `benchmarks/plan_accuracy.py` does without an engine: points, windows, what is learnt of steps."""

from __future__ import annotations

import importlib
import itertools
import random
import statistics
from typing import Any

import pytest

from paths import REPOSITORY
from penstock.batch import StageSpans
from penstock.config.engine import ModelConfig
from penstock.layouts.model_sizes import read_sizes
from penstock.scheduler.cost_model import StepSample, StepShape
from penstock.trace.phases import Phase

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    accuracy: Any = importlib.import_module("plan_accuracy")
    learnt: Any = importlib.import_module("learnt_layout")
    loads: Any = importlib.import_module("measured_loads")

MS = 1_000_000


def test_d7_calibration_and_grid_share_no_point_and_a_seed_draws_the_same() -> None:
    points = accuracy.draw(3, "demo 2x1", 40, 16384)
    assert points == accuracy.draw(3, "demo 2x1", 40, 16384)
    assert points != accuracy.draw(4, "demo 2x1", 40, 16384)
    assert not {(point.concurrency, point.prompt) for point in points} & set(accuracy.CALIBRATION)
    assert all(1 <= point.concurrency <= 64 and 16 <= point.prompt <= 1024 for point in points)
    assert all(point.concurrency * point.prompt <= 16384 for point in points)


def test_the_bubble_of_a_window_is_what_no_stage_computes() -> None:
    spans = [
        StageSpans(
            stage=stage,
            began_ns=0,
            phases=bytes([Phase.FORWARD, Phase.WAIT_PREV, Phase.SAMPLE]),
            durations_ns=[4 * MS, 4 * MS, 2 * MS],
            steps=[(0, 7, 3)],
        )
        for stage in (0, 1)
    ]
    assert loads._bubble(spans, 2, 0, 10 * MS) == pytest.approx(0.4)
    assert loads._bubble(spans, 2, 2 * MS, 6 * MS) == pytest.approx(0.5)
    (sample,) = loads._decodes(spans[:1], 0, MS, [(-1, 100.0), (1, 200.0)])
    assert sample.shape == StepShape(3, 300, 3)
    assert (sample.forward_s, sample.sample_s) == (pytest.approx(0.004), pytest.approx(0.002))
    (first,) = loads._chunks(spans[:1], [(0, 10 * MS, 0.0)], loads.Point(1, 3), 1)
    assert (first.step.shape, first.beside) == (StepShape(3, 6, 1), 0)
    assert not loads._chunks(spans[:1], [(0, 10 * MS, 100.0)], loads.Point(3, 3), 3)


def measured_at(point: Any, time_per_token_s: float) -> Any:
    step = StepSample(StepShape(1, 50, 1), time_per_token_s, 0.0, 0.0)
    return loads.Measured(
        point=point,
        time_per_token_s=time_per_token_s,
        ttft_s=2 * time_per_token_s,
        bubble=0.5,
        context=50,
        spread=0.0,
        samples=[[step]],
        chunks=[[loads.ChunkSample(step, 0)]],
    )


def test_a_stretch_in_which_the_machine_was_slow_counts_as_any_other() -> None:
    points = [loads.Point(1, prompt) for prompt in range(1, learnt.STRETCH + 1)]
    slow = (1.0, 1.25, 0.8)  # of each round, which is a stretch
    in_order = [measured_at(point, speed * 0.01 * point.prompt) for speed in slow for point in points]
    for point, mean in learnt.means_of(learnt.steadied(in_order)).items():
        assert mean.time_per_token_s == pytest.approx(0.01 * point.prompt)
        assert mean.ttft_s == pytest.approx(0.02 * point.prompt)
        assert [step.forward_s for step in mean.samples[0]] == pytest.approx([0.01 * point.prompt] * 3)


def test_the_mean_of_rounds_is_that_of_equal_times_not_of_equal_tokens() -> None:
    point = loads.Point(1, 20)
    both = loads.Measured.mean([measured_at(point, 0.010), measured_at(point, 0.030)])
    assert both.time_per_token_s == pytest.approx(0.015)


def test_two_measurements_of_a_point_differ_by_as_much_as_its_rounds_say() -> None:
    point, source = loads.Point(1, 20), random.Random(5)
    rounds = [measured_at(point, source.gauss(1.0, 0.1)) for _ in range(8000)]
    of_four = [rounds[start : start + 4] for start in range(0, len(rounds), 4)]
    means = [statistics.mean(each.time_per_token_s for each in own) for own in of_four]
    seen = statistics.mean(abs(one - other) for one, other in itertools.pairwise(means))
    expected = [accuracy.difference_of(own) for own in of_four]
    assert statistics.mean(token for token, _, _ in expected) == pytest.approx(seen, rel=0.1)
    assert all(bubble == 0.0 for _, _, bubble in expected)


def test_more_rows_never_take_less_time() -> None:
    assert learnt.rising([(1, 2.0), (2, 4.0), (3, 3.0), (6, 5.0)]) == (
        (1, 2.0),
        (2, 3.5),
        (3, 3.5),
        (6, 5.0),
    )
    assert learnt.rising([(1, 1.0), (1, 3.0), (2, 4.0)]) == ((1, 2.0), (2, 4.0))


def test_a_token_takes_as_long_as_from_the_first_to_the_last_that_came() -> None:
    arrivals = [[(0, 5), (4 * MS, 7), (10 * MS, 9)], [(1 * MS, 3), (9 * MS, 7)]]
    assert loads._time_per_token(arrivals) == pytest.approx(0.018 / 8)


def test_d7_what_was_learnt_predicts_what_was_measured() -> None:
    def step(tokens: int, context: int, samples: int) -> StepSample:
        attended = tokens * context
        seconds = 0.004 + 0.001 * tokens + 1e-7 * attended
        return StepSample(StepShape(tokens, attended, samples), seconds, 0.0, 0.0005)

    def measured(concurrency: int, prompt: int) -> Any:
        rows, context = concurrency, prompt + 50
        turn_s = 0.001 + 0.0001 * rows
        cycle_s = sum(step(rows, context, rows)[1:]) + turn_s  # type: ignore[arg-type]
        return loads.Measured(
            point=loads.Point(concurrency, prompt),
            time_per_token_s=cycle_s,
            ttft_s=0.010,
            bubble=turn_s / cycle_s,
            context=context,
            spread=0.0,
            samples=[[step(rows, context, rows)] * 5],
            chunks=[[loads.ChunkSample(step(prompt, prompt // 2, 1), 0)] if concurrency == 1 else []],
        )

    sizes = read_sizes(ModelConfig(model="demo"))
    points = [measured(*each) for each in ((1, 48), (1, 400), (4, 160), (12, 24), (48, 64))]
    known = learnt.Calibrated.of(points, 1, sizes)
    other = measured(20, 100)
    predicted = known.predict(other.point, other.context, sizes)
    assert predicted.time_per_token_s == pytest.approx(other.time_per_token_s, rel=0.03)
    assert predicted.bubble == pytest.approx(other.bubble, abs=0.02)


def test_chunks_are_observed_without_the_attention_of_decodes_beside_them() -> None:
    """A decode that is nearly all attention tells nothing of the rest."""
    per_attended = 1e-6

    def decode(rows: int, context: int, plain_s: float) -> StepSample:
        attended = rows * context
        return StepSample(StepShape(rows, attended, rows), plain_s + per_attended * attended, 0.0, 0.0)

    def chunk(tokens: int, beside: int) -> Any:
        seconds = 5e-5 * tokens + per_attended * beside
        return loads.ChunkSample(StepSample(StepShape(tokens, 0, 0), seconds, 0.0, 0.0), beside)

    points = [[decode(2, 100, 0.002)] * 5, [decode(8, 1000, 0.0)] * 5]
    chunks = [[chunk(200, 0)] * 5 + [chunk(900, 0)], [chunk(100, 4000)] * 5]
    times = learnt.observed(points, chunks, per_attended)
    assert times.seconds(StepShape(200, 0, 0)) == pytest.approx(0.010)
    assert times.seconds(StepShape(100, 0, 0)) == pytest.approx(0.005)
    assert [tokens for tokens, _ in times.chunks] == [100, 200]  # what happened once is left out
