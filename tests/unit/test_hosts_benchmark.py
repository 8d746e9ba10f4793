"""What `benchmarks/two_hosts.py` makes of what it has seen: busy shares, plans in flight, bars of pauses."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest

import host_losses
from host_faults import FAULTS
from host_losses import Answer
from paths import REPOSITORY
from penstock.workloads.traces import TraceRow

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    host_load: Any = importlib.import_module("host_load")
    host_pauses: Any = importlib.import_module("host_pauses")
    host_trace: Any = importlib.import_module("host_trace")
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


def timed(num_output: int) -> Any:
    return host_losses.Timed(0.0, [1], num_output)


def test_a_request_is_lost_if_it_failed_or_was_cut_and_is_another_if_a_token_is() -> None:
    requests = [timed(2)] * 4
    expected = [Answer([5, 6])] * 4
    answers = [Answer([5, 6], "", 3.5, 0.5), Answer([5], "closed"), Answer([5]), Answer([5, 7], "", 0.1, 9.0)]
    found = host_losses.compared(requests, answers, expected)
    assert found == (2, 1, 3.5, 9.0)
    assert not found.is_good
    assert host_losses.compared(requests, expected, expected).is_good


def test_a_trace_is_shaped_to_what_two_cores_can_do() -> None:
    rows = [
        TraceRow(arrival_s=0.0, input_len=374, output_len=44),
        TraceRow(arrival_s=2.5, input_len=9000, output_len=3000),
        TraceRow(arrival_s=3.0, input_len=3, output_len=1),
    ]
    requests = host_trace.shaped(rows, 4.0)
    assert [request.arrival_s for request in requests] == [0.0, 10.0, 12.0]
    assert [len(request.prompt) for request in requests] == [23, 96, 1]
    assert [request.num_output for request in requests] == [11, 128, 1]
    assert requests == host_trace.shaped(rows, 4.0)
    longest = two_hosts.Sizes()
    assert longest.num_input + longest.fault_output >= host_trace.MAX_INPUT + host_trace.MAX_OUTPUT


@pytest.mark.parametrize(
    ("struck", "troubles", "num_lost", "is_met"),
    [
        (["a", "b", "a"], [], 0, True),
        ([], [], 0, False),
        (["a"], ["a: never back"], 0, False),
        (["a"], [], 1, False),
    ],
)
def test_the_bar_of_the_trace_is_met_if_hosts_were_lost_and_no_request(
    struck: list[str], troubles: list[str], num_lost: int, is_met: bool
) -> None:
    losses = SimpleNamespace(struck=struck, troubles=troubles)
    found = host_losses.Comparison(num_lost, 0, 4.25, 6.0)
    text, was_met = host_trace.summary(two_hosts.QUICK, [timed(3), timed(4)], losses, found)
    assert was_met == is_met
    assert "7 tokens" in text
    assert f"{len(struck)} times, every 8 s" in text


def test_every_bar_that_the_text_names_is_there() -> None:
    named = two_hosts.__doc__.partition("--bars ")[2].partition("]")[0].split(",")
    assert named == list(two_hosts.BARS)
