"""How many plans fill a pipe, from what its stages and wires take (several hosts, row R15)."""

from __future__ import annotations

import pytest

from fakes import taught
from penstock.batch import GREEDY
from penstock.engine.core.plan_depth import WireDepth
from penstock.scheduler.cost_model import StageCost
from penstock.scheduler.pacing import FixedDepth, WireTime
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.queues import RequestState

TEN_MS = StageCost(read=0.010, per_token=1e-9)


def plan_of(num_tokens: int) -> PlanBuilder:
    plan = PlanBuilder(0)
    request = RequestState(
        request_id="r",
        arrival=0,
        arrival_time=0.0,
        prompt_len=num_tokens,
        max_len=num_tokens + 1,
        stop_ids=frozenset(),
        sampling=GREEDY,
        token_ids=[0] * num_tokens,
        prefill_len=num_tokens,
        pooling="last",
    )
    plan.add_chunk(request, num_tokens, [])
    return plan


def depth_of(*stages: StageCost, largest: int = 40) -> WireDepth:
    return WireDepth(len(stages), largest, taught(*stages))


def number_after(depth: WireDepth, num_plans: int = 40, num_tokens: int = 4) -> int:
    for _ in range(num_plans):
        depth.planned(plan_of(num_tokens))
    return depth.number


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_without_a_wire_there_is_a_plan_for_each_stage(num_stages: int) -> None:
    fixed = FixedDepth(num_stages)
    fixed.planned(plan_of(100))
    assert (fixed.number, fixed.largest, fixed.wire.of_links(7)) == (num_stages, num_stages, [])
    assert number_after(depth_of(*[TEN_MS] * num_stages)) == num_stages


@pytest.mark.parametrize(
    ("latency_ms", "number"), [(0.0, 2), (0.3, 2), (1.0, 2), (5.0, 3), (30.0, 5), (100.0, 12), (1000.0, 40)]
)
def test_r15_as_many_plans_as_the_trip_is_longer_than_the_slowest_stage(
    latency_ms: float, number: int
) -> None:
    depth = depth_of(TEN_MS, TEN_MS)
    depth.wire = WireTime(latency=latency_ms / 1000)
    assert number_after(depth) == number


def test_r15_fast_stages_are_bounded_by_the_slowest() -> None:
    depth = depth_of(TEN_MS, StageCost(read=0.002, per_token=1e-9), StageCost(read=0.003, per_token=1e-9))
    assert number_after(depth) == 3, "never fewer than stages"
    depth.wire = WireTime(latency=0.085)
    assert number_after(depth) == 10


def test_r15_the_bytes_of_a_plan_on_a_slow_link_take_a_place_of_their_own() -> None:
    """A link of 5 ms a token takes 20 ms for a plan: the slowest of all, and others wait for it."""
    depth = depth_of(TEN_MS, TEN_MS)
    depth.wire = WireTime(latency=0.04, per_token=0.005, num_links=1)
    assert number_after(depth) == 4, "(10 + 10 + 20 + 40) / 20"


def test_r15_large_chunks_need_fewer_plans_than_small_decodes() -> None:
    depth = depth_of(*[StageCost(read=0.001, per_token=0.0025)] * 2)
    depth.wire = WireTime(latency=0.1)
    assert number_after(depth, num_tokens=4) == 12
    assert number_after(depth, num_plans=1, num_tokens=200) < 6, "a single one is much"
    assert number_after(depth, num_tokens=200) <= 3
    assert number_after(depth, num_tokens=4) == 12


def test_r15_a_number_that_is_right_within_the_margin_stays() -> None:
    depth = depth_of(TEN_MS, TEN_MS)
    numbers = []
    for latency_ms in (100, 97, 102, 96, 103, 60, 62, 58, 101):
        depth.wire = WireTime(latency=latency_ms / 1000)
        numbers.append(number_after(depth))
    assert numbers == [12, 12, 12, 12, 12, 8, 8, 8, 12]


def test_r15_where_costs_are_not_known_the_reports_of_the_stages_count() -> None:
    depth = WireDepth(2, 40, None)
    depth.wire = WireTime(latency=0.1)
    assert number_after(depth) == 2, "nothing is known"
    depth.reported = [0.010, 0.005]
    assert number_after(depth) == 11


def test_a_plan_without_tokens_tells_nothing() -> None:
    depth = depth_of(TEN_MS, TEN_MS)
    depth.wire = WireTime(latency=0.1)
    depth.planned(PlanBuilder(0))
    assert (depth.number, depth.trip_s) == (2, 0.0)
    assert number_after(depth, num_plans=1) == 12
