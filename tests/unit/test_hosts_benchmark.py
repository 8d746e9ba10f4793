"""What `benchmarks/two_hosts.py` makes of what it has seen: busy shares, plans in flight, bars of pauses."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from host_faults import FAULTS
from paths import REPOSITORY

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    host_load: Any = importlib.import_module("host_load")
    host_pauses: Any = importlib.import_module("host_pauses")
    two_hosts: Any = importlib.import_module("two_hosts")


def look(at: float, busy_s: float, wall_s: float, steps: int) -> Any:
    return host_load.Look(at, {0: host_load.StageSum(busy_s, wall_s, steps)}, 2)


def decoded(ids: list[list[int]]) -> Any:
    return host_load.Decoded(100.0, 0.01, ids, {}, 2)


def test_the_busy_share_is_of_the_midst_of_a_run() -> None:
    looks = [look(1.0, 0.1, 1.0, 1), look(2.5, 1.0, 2.0, 10), look(4.5, 2.8, 4.0, 40)]
    (use,) = host_load.stage_use(looks, began=0.0).values()
    assert use == (pytest.approx(0.9), pytest.approx(0.06))


def test_a_run_that_is_too_short_has_no_busy_share() -> None:
    assert host_load.stage_use([look(2.5, 1.0, 2.0, 10)], began=0.0) == {}
    same = [look(2.5, 1.0, 2.0, 10), look(3.5, 1.0, 2.0, 10)]
    assert math.isnan(host_load.stage_use(same, began=0.0)[0].busy)


def test_plans_fill_the_pipe_when_they_cover_stages_and_ways() -> None:
    assert host_load.plans_to_fill({0: 0.25, 1: 0.25}, 0.0) == 2
    assert host_load.plans_to_fill({0: 0.25, 1: 0.25}, 1.25) == 7
    assert host_load.plans_to_fill({0: 0.5, 1: 0.25}, 0.0) == 2


def test_sequences_that_differ_are_counted() -> None:
    runs = [decoded([[1, 2], [3, 4]]), decoded([[1, 2], [3, 5]]), decoded([[1, 2], [3, 4]])]
    assert host_load.differing(runs) == 1


def test_the_median_leaves_out_what_is_no_number() -> None:
    runs = [decoded([])] * 3
    assert host_load.median_of(runs, lambda run: run.tokens_per_s) == 100.0
    assert math.isnan(host_load.median_of(runs, lambda run: run.slowest_busy))


@pytest.mark.parametrize(
    ("pause_s", "is_same", "met"), [(2.4, True, True), (2.6, True, False), (2.4, False, False)]
)
def test_a_crash_may_pause_two_seconds_above_the_reading(pause_s: float, is_same: bool, met: bool) -> None:
    fault = FAULTS[0]
    assert not fault.is_silent
    outcome = host_pauses.Outcome(fault.name, pause_s, is_same=is_same)
    text, is_met = host_pauses.fault_table([fault], [outcome], 0.5)
    assert is_met == met
    assert fault.name in text


def test_silence_has_the_limit_of_heartbeats_besides() -> None:
    silent = next(fault for fault in FAULTS if fault.is_silent)
    assert host_pauses.bar_s(silent, 0.5) == pytest.approx(5.5)


def test_every_bar_that_the_text_names_is_there() -> None:
    named = two_hosts.__doc__.partition("--bars ")[2].partition("]")[0].split(",")
    assert named == list(two_hosts.BARS)
