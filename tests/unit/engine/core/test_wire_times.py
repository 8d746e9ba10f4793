"""What wires take is measured, and plans in flight follow it (several hosts, row R15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fakes import FakeExecutor
from penstock.batch import NO_META, ScheduledBatch, StageSpans, StageTimes
from penstock.config.engine import SchedulerConfig
from penstock.engine.core import wire_times
from penstock.engine.core.plan_depth import WireDepth
from penstock.engine.core.stall_limits import LEAST_S, SLOWNESS, MeasuredLimit
from penstock.engine.core.wire_times import LOOK_S, NO_WIRE_TIMES, WireTimes
from penstock.scheduler.cost_model import StageCost, StepShape
from penstock.scheduler.pacing import WireTime
from penstock.trace.phases import Phase
from wire_pipe import PROBE_S, WireRig

ARITHMETIC = StageCost(read=0.0005, per_token=0.0096, overhead=0.0004)  # 10 ms for a row
HALF = StageCost(read=0.0005, per_token=0.0048, overhead=0.0002)
WEIGHTS = StageCost(read=0.010, per_token=1e-5)
WIRE_S = 0.05  # each way
MOST = 40


def plan_of(step: int, num_tokens: int, awaited: Sequence[int] = ()) -> ScheduledBatch:
    rows = [0] if num_tokens else []
    return ScheduledBatch(step_id=step, rows=rows, num_tokens=[num_tokens] * len(rows), awaited=list(awaited))


class Reported(FakeExecutor):
    """Stages that have reported just this."""

    def __init__(
        self, steps: dict[int, float], num_stages: int = 2, num_steps: int = 0, probes_s: float = 0.0
    ) -> None:
        super().__init__(depth=1)
        self._own = [
            StageSpans(
                stage=stage,
                began_ns=0,
                phases=bytes([Phase.WAIT_PREV, Phase.FORWARD] * len(steps)),
                durations_ns=[ns for seconds in steps.values() for ns in (777, round(seconds * 1e9))],
                steps=[(2 * index, step, 9) for index, step in enumerate(steps)],
            )
            for stage in range(num_stages)
        ]
        self._times = [
            StageTimes(
                stage=stage,
                num_steps=num_steps,
                wall_ns=0,
                busy_ns=round(num_steps * 1e7 + probes_s * 1e9),
                phase_ns=[],
                busy_ratio=0,
            )
            for stage in range(num_stages)
        ]

    def spans(self) -> list[StageSpans]:
        return self._own

    def stage_times(self) -> list[StageTimes]:
        return self._times


def measuring(num_links: int = 1) -> tuple[WireDepth, WireTimes]:
    depth = WireDepth(2, MOST, None)
    return depth, WireTimes(depth, 2, num_links)


def cross(wire: WireTimes, plan: ScheduledBatch, seconds: float) -> None:
    wire.submitted(plan)
    wire.crossed(plan, seconds)


def test_the_latency_is_the_least_round_trip_of_the_newest_plans_without_tokens() -> None:
    depth, wire = measuring()
    found = []
    for step, seconds in enumerate((0.3, 0.1, 0.2, 0.5, 0.4, 0.6)):
        cross(wire, plan_of(step, 0), seconds)
        found.append(depth.wire.latency)
    assert found == [0.3, 0.1, 0.1, 0.1, 0.2, 0.4]


def test_a_plan_that_meets_others_tells_nothing() -> None:
    depth, wire = measuring()
    cross(wire, plan_of(0, 0), 0.1)
    first, second, third = plan_of(1, 16), plan_of(2, 16), plan_of(3, 0)
    for plan in (first, second, third):
        wire.submitted(plan)
    for plan, seconds in ((first, 0.5), (second, 0.01), (third, 0.001)):
        wire.crossed(plan, seconds)
    wire.follow(1.0, Reported({1: 0.15, 2: 0.0}))
    assert depth.wire == WireTime(0.1, pytest.approx((0.5 - 2 * 0.15 - 0.1) / 16), 1)


def test_plans_without_tokens_are_in_nobodys_way() -> None:
    depth, wire = measuring()
    plans = [plan_of(0, 0), plan_of(1, 32)]
    for plan in plans:
        wire.submitted(plan)
    wire.crossed(plans[0], 0.1)
    wire.crossed(plans[1], 0.164)
    wire.follow(1.0, Reported({1: 0.0}))
    assert depth.wire == WireTime(0.1, pytest.approx(0.002), 1)


def test_what_comes_to_the_latency_for_each_token_is_shared_by_the_links() -> None:
    depth, wire = measuring(num_links=4)
    cross(wire, plan_of(0, 0), 0.1)
    cross(wire, plan_of(1, 100), 0.1 + 0.4 + 2 * 0.05)
    wire.follow(1.0, Reported({1: 0.05}))
    assert depth.wire == WireTime(0.1, pytest.approx(0.001), 4)


def test_a_plan_of_which_a_stage_has_not_reported_waits_and_one_of_few_tokens_tells_nothing() -> None:
    depth, wire = measuring()
    cross(wire, plan_of(0, 0), 0.1)
    cross(wire, plan_of(1, 7), 5.0)
    cross(wire, plan_of(2, 16), 0.3)
    wire.follow(1.0, Reported({1: 0.0, 2: 0.05}, num_stages=1))
    assert depth.wire.per_token == 0.0
    wire.follow(2.0, Reported({1: 0.0, 2: 0.05}))
    assert depth.wire.per_token == pytest.approx(0.1 / 16)


def test_a_result_that_has_waited_for_the_store_tells_nothing() -> None:
    depth, wire = measuring()
    cross(wire, plan_of(0, 0, awaited=[3]), 9.0)
    assert depth.wire.latency == 0.0


def test_plans_that_nobody_reports_of_are_forgotten() -> None:
    _, wire = measuring()
    cross(wire, plan_of(0, 0), 0.1)
    for step in range(1, 100):
        cross(wire, plan_of(step, 16), 0.2)
    assert len(wire._unreported) <= 16


def test_a_new_epoch_begins_with_samples_of_its_own_and_the_old_number() -> None:
    depth, wire = measuring()
    cross(wire, plan_of(0, 0), 0.1)
    wire.submitted(plan_of(1, 9))
    wire.forget()
    assert wire.wants_look, "at once: the pipe is empty"
    assert depth.wire.latency == 0.1
    cross(wire, plan_of(2, 0), 0.3)
    assert depth.wire.latency == 0.3, "the wire may be another one, and a longer"


def test_what_stages_take_on_average_is_told_once_all_have_reported() -> None:
    depth, wire = measuring()
    wire.follow(1.0, Reported({}, num_stages=1, num_steps=3))
    assert depth.reported == []
    wire.follow(2.0, Reported({}, num_steps=7))
    assert depth.reported == pytest.approx([0.01, 0.01])
    wire.follow(3.0, Reported({}, num_steps=7))
    assert depth.reported == pytest.approx([0.01, 0.01]), "nothing new"


def test_probes_of_an_idle_night_are_not_the_time_of_the_first_steps_after_it() -> None:
    depth, wire = measuring()
    wire.follow(1.0, Reported({}, num_steps=7))
    wire.follow(2.0, Reported({}, num_steps=7, probes_s=7.2))
    wire.follow(3.0, Reported({}, num_steps=8, probes_s=7.2))
    assert depth.reported == pytest.approx([0.01, 0.01])


def test_a_look_is_due_some_time_after_the_last_and_seldom_beside_the_trip() -> None:
    depth, wire = measuring()
    wire.follow(0.0, Reported({}))
    wire.follow(1000.0, Reported({}))
    assert not wire.wants_look, "no plan has ever crossed"
    cross(wire, plan_of(0, 0), 0.1)
    wire.follow(1001.0, Reported({}))
    wire.follow(1000.0 + LOOK_S, Reported({}))
    assert not wire.wants_look
    depth.trip_s = 0.5
    wire.follow(1002.0 + LOOK_S, Reported({}))
    assert not wire.wants_look, "a hundred trips take longer"
    wire.follow(1002.0 + 50.0, Reported({}))
    assert wire.wants_look
    wire.submitted(plan_of(1, 9))
    assert wire.wants_look, "that was not it"
    wire.crossed(plan_of(1, 9), 0.2)
    wire.submitted(plan_of(2, 0))
    assert not wire.wants_look


def test_nothing_is_measured_without_a_wire() -> None:
    wire = NO_WIRE_TIMES
    wire.submitted(plan_of(0, 4))
    wire.crossed(plan_of(0, 4), 1.0)
    wire.follow(1e9, Reported({}))
    wire.forget()
    assert not wire.wants_look


# With a whole core, over simulated stages


def rig(cost: StageCost, **options: Any) -> WireRig:
    return WireRig(cost, cost, max_plans_in_flight=MOST, **options)


def started(one: WireRig) -> WireRig:
    """The first probe has crossed, as before the first request."""
    one.run(0.5)
    return one


def test_r15_a_wire_of_50_ms_each_way_costs_no_throughput_once_the_plans_in_flight_are_up() -> None:
    rates = {}
    for name, wire_s, most in (("none", 0.0, MOST), ("bounded", WIRE_S, "auto"), ("filled", WIRE_S, MOST)):
        one = started(WireRig(ARITHMETIC, ARITHMETIC, wire_s=wire_s, max_plans_in_flight=most))
        one.add_streams(16)
        one.run(3.0)
        rates[name] = one.rate(15.0)
    assert rates["bounded"] < 0.65 * rates["none"], "two plans, as there are stages, leave them idle"
    assert rates["filled"] >= 0.95 * rates["none"]


def test_r15_stages_of_10_ms_and_100_ms_of_wire_have_twelve_plans_in_flight() -> None:
    one = started(rig(ARITHMETIC, wire_s=WIRE_S))
    one.add_streams(12)
    one.run(3.0)
    assert one.depth.wire.latency == pytest.approx(2 * WIRE_S, abs=0.01)
    assert one.core.stats().scheduler.micro_batches in (11, 12, 13)
    assert one.pipe.most_in_flight in (12, 13, 14)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> float:
    """Looks follow one another sooner than they would; seconds between two."""
    monkeypatch.setattr(wire_times, "LOOK_S", 1.5)
    monkeypatch.setattr(wire_times, "LOOK_TRIPS", 10)
    return 3.0


def test_r15_the_number_falls_back_when_the_delay_is_gone_and_rises_when_it_comes(often: float) -> None:
    one = started(rig(ARITHMETIC))
    one.add_streams(12)
    one.run(3.0)
    assert one.depth.number == 2
    assert one.core.stats().scheduler.micro_batches == 2
    one.lay_wire(WIRE_S)
    one.run(4 * often)
    assert one.depth.number in (12, 13)
    one.lay_wire(0.0)
    one.run(2 * often)
    assert one.depth.number == 2
    assert one.core.stats().scheduler.micro_batches == 2
    before = one.pipe.most_in_flight
    one.pipe.most_in_flight = 0
    one.run(3.0)
    assert one.pipe.most_in_flight <= 2 < before


def test_r15_hosts_that_are_near_have_as_many_plans_in_flight_as_one_host() -> None:
    rates = []
    for wire_s, most in ((0.0, "auto"), (0.0, MOST), (0.0002, MOST)):
        one = started(WireRig(ARITHMETIC, ARITHMETIC, wire_s=wire_s, max_plans_in_flight=most))
        one.add_streams(16)
        one.run(3.0)
        one.pipe.most_in_flight = 0
        rates.append(one.rate(5.0))
        assert one.core.stats().scheduler.micro_batches == one.depth.number == 2
        assert one.pipe.most_in_flight == 2
    assert min(rates) >= 0.99 * max(rates)


@pytest.mark.parametrize("cost", [ARITHMETIC, WEIGHTS])
def test_r15_one_stream_keeps_one_plan(cost: StageCost) -> None:
    one = started(rig(cost, wire_s=WIRE_S))
    one.add_streams(1)
    one.run(2.0)
    one.pipe.most_in_flight = 0
    count = one.run(24.0)
    trip_s = 2 * WIRE_S + 2 * cost.seconds(one_row())
    assert one.core.stats().scheduler.micro_batches == 1
    assert one.pipe.most_in_flight == 1, "none lies at the first stage, where a prompt would wait behind it"
    assert count >= int(24.0 / trip_s) - 1, "no token waits for a look's probe"


def test_r15_plans_with_few_tokens_still_take_all_streams_once_a_round() -> None:
    few = SchedulerConfig(max_num_seqs=64, prefill_chunk=8, max_num_batched_tokens=16)
    one = started(rig(WEIGHTS, wire_s=WIRE_S, scheduler=few))
    one.add_streams(64)
    one.run(6.0)
    one.pipe.most_in_flight = 0
    one.run(2.0)
    assert one.core.stats().scheduler.micro_batches < 4 <= one.pipe.most_in_flight


def one_row() -> StepShape:
    return StepShape(1, 1, 1)


def test_r15_micro_batches_bound_by_weights_are_not_split_for_the_wire() -> None:
    """Twelve parts would read the weights twelve times in a cycle that takes 120 ms with one part."""
    one = started(rig(WEIGHTS, wire_s=WIRE_S))
    one.add_streams(8)
    one.run(2.0)
    assert one.rate(8.0) >= 0.95 * 8 / 0.12


@pytest.mark.parametrize("async_depth", [0, 1])
def test_r15_a_prompt_over_a_long_wire_waits_for_no_round_of_the_decodes(async_depth: int) -> None:
    """Few decodes are in few plans, all on their way: the prompt enters the first stage when it comes."""
    one = started(rig(WEIGHTS, wire_s=WIRE_S, async_depth=async_depth))
    one.add_streams(8)
    one.run(2.0)
    assert one.core.stats().scheduler.micro_batches < one.depth.number
    waits = []
    for _ in range(5):
        one.run(0.73)
        began = one.clock.now
        one.add_streams(1, prompt_len=16, max_tokens=1)
        name = [*one.requests][-1]
        while not one.is_finished(name):
            one.run(1e-4)
        waits.append(one.clock.now - began)
    step_s = WEIGHTS.seconds(StepShape(16, 136, 1))
    own_s = 2 * WIRE_S + 3 * step_s  # two chunks through two stages
    assert max(waits) <= own_s + step_s + 0.002, "behind a step under way at most"


def test_r15_where_costs_are_unknown_the_reports_tell_how_many_plans_fill_the_wire() -> None:
    rates = []
    for wire_s in (0.0, WIRE_S):
        one = started(rig(HALF, wire_s=wire_s, knows_costs=False))
        one.add_streams(24)
        one.run(6.0)
        rates.append(one.rate(5.0))
    assert rates[1] >= 0.93 * rates[0]


def test_r15_prompts_fill_the_wire_too() -> None:
    """Prompts alone: chunks follow one another without waiting for tokens."""
    spent = []
    for wire_s, most in ((0.0, MOST), (WIRE_S, "auto"), (WIRE_S, MOST)):
        one = started(WireRig(ARITHMETIC, ARITHMETIC, wire_s=wire_s, max_plans_in_flight=most))
        began = one.clock.now
        one.add_streams(16, prompt_len=300, max_tokens=1)
        while not one.core.is_idle:
            one.run(0.2)
        spent.append(one.clock.now - began)
    assert spent[2] <= 1.05 * spent[0] + 0.4
    assert spent[2] < spent[1]


def test_r15_prompts_and_the_decodes_beside_them_share_the_wire() -> None:
    """Chunks go between the decodes, and wait for no token of theirs."""
    cost = StageCost(read=0.010, per_token=2e-4)
    chunks = SchedulerConfig(max_num_seqs=64, prefill_chunk=64, max_num_batched_tokens=96)
    spent, rates = [], []
    for wire_s, most in ((0.0, MOST), (WIRE_S, "auto"), (WIRE_S, MOST)):
        one = started(
            WireRig(cost, cost, wire_s=wire_s, max_plans_in_flight=most, scheduler=chunks, block_size=64)
        )
        one.add_streams(8)
        one.run(2.0)
        began, streams = one.clock.now, list(one.requests)
        before = sum(len(one.tokens(name)) for name in streams)
        one.add_streams(4, prompt_len=900, max_tokens=1)
        while not all(one.is_finished(name) for name in one.requests if name not in streams):
            one.run(0.1)
        spent.append(one.clock.now - began)
        rates.append((sum(len(one.tokens(name)) for name in streams) - before) / spent[-1])
    assert spent[2] <= 1.1 * spent[0] + 2 * WIRE_S + 0.1
    assert spent[2] < 0.5 * spent[1]
    round_of_them = (
        len(streams) / spent[-1]
    )  # none of their plans waited at the first stage when the prompts came
    assert rates[2] + round_of_them >= rates[1]


def test_r15_slow_links_are_counted() -> None:
    """A link is as slow as a stage, so that three plans keep all busy."""
    one = started(rig(ARITHMETIC))
    one.pipe.token_s = 0.0096
    one.add_streams(12, prompt_len=16)
    one.run(12.0)
    assert one.depth.wire.per_token == pytest.approx(0.0096, rel=0.05)
    assert one.depth.number == 3
    assert one.rate(5.0) >= 0.95 / 0.0098


def test_r15_a_busy_pipe_is_looked_through_now_and_then(often: float) -> None:
    one = started(rig(ARITHMETIC, wire_s=WIRE_S))
    one.add_streams(12)
    one.run(3.0)
    first = len(one.pipe.plans)
    one.run(3 * often)
    probes = [plan for plan in one.pipe.plans[first:] if not plan.rows]
    assert 3 <= len(probes) <= 5
    assert all(plan.meta == NO_META or plan.meta.held for plan in probes)


def test_r15_the_limit_of_a_stall_counts_the_queue_and_the_wire() -> None:
    limit = MeasuredLimit(60.0)
    one = started(rig(ARITHMETIC, wire_s=0.4, stall_limit=limit, recovers=True))
    one.add_streams(12)
    one.run(30.0)
    round_trip_s = 0.8 + 2 * 0.12
    assert one.core.num_inflight > 2
    assert SLOWNESS * 0.8 <= limit.seconds(1) <= SLOWNESS * 2 * round_trip_s
    one.lay_wire(0.9)
    one.run(40.0)
    assert one.core.loss is None, "a wire that becomes slower is not a loss"
    one.pipe.is_silent = True
    began, allowed = one.clock.now, limit.seconds(1)
    while one.core.has_pipe:
        one.step(timeout_s=0.5)
    assert LEAST_S <= one.clock.now - began <= allowed + 2.0


def test_r15_after_a_loss_with_many_plans_in_flight_every_stream_goes_on_with_its_tokens() -> None:
    one = started(rig(HALF, wire_s=WIRE_S, recovers=True))
    one.add_streams(12, max_tokens=60)
    for _ in range(2):
        one.run(2.0)
        assert one.core.num_inflight > 4
        one.pipe.lose_stage(1, "killed")
        one.step()
        assert not one.core.has_pipe
        one.rejoin()
        assert one.core.stats().loss is not None
    one.run_until_idle()
    for arrival, name in enumerate(one.requests):
        assert one.result(name) == one.expected(name, arrival)


def test_a_probe_alone_tells_the_latency_at_once() -> None:
    one = started(rig(ARITHMETIC, wire_s=WIRE_S))
    assert one.depth.wire.latency == pytest.approx(2 * WIRE_S + 2 * PROBE_S)
    one.lay_wire(0.01)
    one.run(2.5)
    assert one.depth.wire.latency == pytest.approx(0.02 + 2 * PROBE_S)
