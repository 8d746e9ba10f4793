"""Shares of the stages' time between two reports, without the idle time around a run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from core_numbers import core_stats
from penstock.batch import StageTimes
from penstock.engine.stats import StageMemory
from penstock.reports.stage_use import (
    StageCounts,
    counts_in_view,
    counts_of_core,
    have_all_reported_since,
    stage_figures,
)
from penstock.trace.phases import Phase


def counts(stage: int, wall_s: float, **others: Any) -> StageCounts:
    return StageCounts(stage=stage, wall_s=wall_s, **others)


def test_idle_time_around_a_run_is_left_out() -> None:
    before = counts(0, 10.0, busy_s=1.0, num_steps=5, bubble_s={"no_work": 8.0, "wait_prev": 0.5})
    after = counts(
        0,
        16.0,
        busy_s=3.0,
        forward_s=1.5,
        sample_s=0.5,
        num_steps=25,
        bubble_s={"no_work": 10.5, "wait_prev": 1.5},
    )
    (found,) = stage_figures([before], [after], run_s=4.0)
    assert found.busy == pytest.approx(2.0 / 4.0)
    assert found.causes == pytest.approx({"no_work": 0.5 / 4.0, "wait_prev": 1.0 / 4.0})
    assert found.overhead == pytest.approx(0.5 / 4.0)
    assert found.busy + found.bubble + found.overhead == pytest.approx(1.0)
    assert found.sampling == pytest.approx(0.25)
    assert found.num_steps == 20
    assert found.step_s == pytest.approx(0.1)


def test_no_more_is_left_out_than_the_stage_was_idle() -> None:
    before, after = (
        counts(0, 1.0, bubble_s={"no_work": 0.0}),
        counts(0, 4.0, busy_s=2.5, bubble_s={"no_work": 0.25}),
    )
    (found,) = stage_figures([before], [after], run_s=1.0)
    assert found.causes["no_work"] == 0.0
    assert found.busy == pytest.approx(2.5 / 2.75)


def test_a_stage_that_began_anew_has_memory_and_no_shares() -> None:
    before, after = counts(1, 50.0, busy_s=20.0), counts(1, 3.0, busy_s=1.0, kv_bytes=7)
    (found,) = stage_figures([before], [after], run_s=2.0, resident_bytes={(0, 1): 99})
    assert (found.num_steps, found.busy, found.kv_bytes, found.resident_bytes) == (0, 0.0, 7, 99)
    (new,) = stage_figures([], [after], run_s=2.0)
    assert new.busy == 0.0


def test_a_core_and_a_view_tell_the_same() -> None:
    spent_ns = {Phase.FORWARD: 700, Phase.SAMPLE: 300, Phase.WAIT_PREV: 500, Phase.TAKE: 100}
    stats = core_stats(
        stage_times=[
            StageTimes(
                stage=1,
                replica=2,
                num_steps=3,
                wall_ns=1600,
                busy_ns=900,
                phase_ns=[spent_ns.get(phase, 0) for phase in Phase],
                busy_ratio=0.5,
            )
        ],
        stage_memory=[StageMemory(stage=1, replica=2, kv_bytes=6, stranded_bytes=5, weight_bytes=4)],
    )
    (of_core,) = counts_of_core(stats)
    assert (of_core.forward_s, of_core.sample_s, of_core.busy_s) == pytest.approx((7e-7, 3e-7, 9e-7))
    assert set(of_core.bubble_s) == {"no_work", "wait_plan", "wait_token", "wait_prev", "comm", "wait_next"}
    assert (of_core.weight_bytes, of_core.kv_bytes, of_core.stranded_bytes) == (4, 6, 5)
    view = {
        "replicas": [{"replica": 2, "stages": [{**msgspec.to_builtins(of_core), "replica": 0, "host": "a"}]}]
    }
    assert counts_in_view(view) == [of_core]
    assert counts_of_core(None) == []


def test_an_answer_of_another_server_is_no_view() -> None:
    with pytest.raises(msgspec.ValidationError):
        counts_in_view({"object": "list", "data": []})


def test_all_stages_have_reported_when_each_clock_has_moved() -> None:
    before = [counts(0, 1.0), counts(1, 2.0)]
    assert not have_all_reported_since(before, [counts(0, 1.5), counts(1, 2.0)])
    assert have_all_reported_since(before, [counts(0, 1.5), counts(1, 2.5)])
    assert not have_all_reported_since([], [])
    assert not have_all_reported_since([], [counts(0, 0.0)])
