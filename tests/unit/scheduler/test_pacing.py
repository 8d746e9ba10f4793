"""Plans of equal time, the inter-token target, and how many micro-batches [d10]."""

from __future__ import annotations

import pytest

from fakes import taught
from penstock.batch import ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.engine.core.plan_depth import WireDepth
from penstock.scheduler.chunking import FixedBudget, TokenBudget
from penstock.scheduler.cost_model import CostModel, StageCost, StepShape, attended_by
from penstock.scheduler.pacing import MIN_CHUNK, FixedDepth, Pacing, PlanDepth, WireTime, cycle_seconds
from wire_pipe import WireRig

NOTHING = StepShape(0, 0, 0)
WEIGHT_BOUND = StageCost(read=0.030, per_token=0.002)  # two stages on one memory, both reading
ALONE = StageCost(read=0.015, per_token=0.002)
LONG_CONTEXT = StageCost(read=0.004, per_token=0.002, per_attended=1e-6, overhead=0.05)


def pacing(
    model: CostModel,
    *,
    num_stages: int = 2,
    target_s: float = 0.1,
    max_chunk: int = 512,
    depth: PlanDepth | None = None,
) -> Pacing:
    budget = TokenBudget(
        max_tokens=2048, chunk=max_chunk, max_decodes_beside_prefill=2048, num_stages=num_stages
    )
    return Pacing(model, budget, depth or FixedDepth(num_stages), inter_token_target_s=target_s)


@pytest.mark.parametrize(
    ("stages", "groups", "seconds"), [([1.0, 2.0], 1, 3.0), ([1.0, 2.0], 2, 4.0), ([1.0, 1.0, 1.0], 2, 3.0)]
)
def test_the_cycle_is_the_longer_of_the_trip_and_of_the_slowest_stage(
    stages: list[float], groups: int, seconds: float
) -> None:
    assert cycle_seconds(stages, groups) == seconds


def test_d10_bound_by_weights_one_micro_batch_bound_by_arithmetic_two() -> None:
    found = pacing(taught(WEIGHT_BOUND, WEIGHT_BOUND, alone=[ALONE, ALONE]))
    groups = {n: found.num_micro_batches(n, n) for n in (1, 4, 8, 32, 64)}
    assert groups == {1: 1, 4: 1, 8: 1, 32: 2, 64: 2}


def test_d10_stages_that_share_nothing_are_always_all_used() -> None:
    found = pacing(taught(*[StageCost(read=0.001, per_token=0.002)] * 4), num_stages=4)
    assert [found.num_micro_batches(n, n) for n in (1, 2, 3, 4, 64)] == [1, 2, 3, 4, 4]


def test_d10_the_number_of_micro_batches_changes_only_for_a_clear_gain() -> None:
    """At 15 rows a whole one takes 2 x 30 ms alone, two halves 2 x 30 shared: within the margin of both."""
    found = pacing(taught(WEIGHT_BOUND, WEIGHT_BOUND, alone=[ALONE, ALONE]))
    assert found.num_micro_batches(64, 64) == 2
    assert found.num_micro_batches(15, 15) == 2, "kept"
    assert found.num_micro_batches(8, 8) == 1
    assert found.num_micro_batches(15, 15) == 1, "kept"


def wire_depth(number: int, wire: WireTime) -> WireDepth:
    depth = WireDepth(2, 40, None)
    depth.number, depth.wire = number, wire
    return depth


def test_r15_a_wire_is_filled_with_smaller_micro_batches_where_arithmetic_decides() -> None:
    """48 rows take 120 ms of each stage however they are split: in 12 parts a trip takes as long, too."""
    cost = StageCost(read=0.001, per_token=0.0025)
    found = pacing(taught(cost, cost), depth=wire_depth(12, WireTime(latency=0.1)))
    assert 11 <= found.num_micro_batches(48, 48) <= 12
    assert pacing(taught(cost, cost)).num_micro_batches(48, 48) == 2


def test_r15_a_wire_is_not_filled_with_micro_batches_that_each_read_all_weights_for_nothing() -> None:
    """The trip takes 120 ms with one part as with twelve: more would only read the weights more often."""
    cost = StageCost(read=0.010, per_token=0.0001)
    depth = wire_depth(12, WireTime(latency=0.1))
    found = pacing(taught(cost, cost), depth=depth)
    found.num_micro_batches(1, 1)
    assert found.num_micro_batches(8, 8) == 1


def test_r15_the_micro_batches_follow_the_wire_up_to_what_is_allocated() -> None:
    cost = StageCost(read=0.001, per_token=0.0025)
    depth = wire_depth(12, WireTime(latency=0.1))
    found = pacing(taught(cost, cost), depth=depth)
    assert found.num_micro_batches(48, 48) > 10
    depth.wire = WireTime(latency=0.0)
    assert found.num_micro_batches(48, 48) == 2, "it has become fast"
    depth.wire, depth.largest = WireTime(latency=0.1), 7
    assert found.num_micro_batches(48, 48) == 7
    assert found.num_micro_batches(1, 1) == 1, "one stream keeps one plan"


def test_r15_what_a_link_takes_for_the_bytes_of_a_plan_is_counted_as_a_stage_is() -> None:
    """A link of 2 ms a row, beside stages of 1 ms a row: three parts, and not two, keep it busy."""
    cost = StageCost(read=0.0001, per_token=0.001)
    wire = WireTime(latency=0.0, per_token=0.001, num_links=1)
    assert pacing(taught(cost, cost), depth=wire_depth(3, wire)).num_micro_batches(48, 48) == 3


def test_r15_prompts_beside_decodes_leave_room_for_all_plans_of_a_cycle_within_the_target() -> None:
    cost = StageCost(read=0.010, per_token=0.001, per_attended=1e-7, overhead=0.001)
    decodes = StepShape(8, 800, 8)
    chunks = []
    for depth in (None, wire_depth(5, WireTime(latency=0.2))):
        found = pacing(taught(cost, cost), target_s=0.5, depth=depth)
        chunks.append(found.prompt_budget(decodes, anybody_decodes=True, backlog=10_000).take(0, 4000))
    assert cost.seconds(StepShape(8 + chunks[0], 800, 8)) <= 0.5 / 2
    assert cost.seconds(StepShape(8 + chunks[1], 800, 8)) <= 0.5 / 5
    assert chunks[1] < chunks[0]


def test_costs_that_are_not_known_leave_the_plain_rules() -> None:
    found = pacing(CostModel(2))
    assert found.num_micro_batches(8, 8) == 2
    budget = found.prompt_budget(NOTHING, anybody_decodes=False, backlog=100)
    assert isinstance(budget, FixedBudget)


def sizes(found: Pacing, length: int) -> list[int]:
    """Chunks of a lone prompt, one a plan, each settled before the next."""
    start, chunks = 0, []
    while start < length:
        budget = found.prompt_budget(NOTHING, anybody_decodes=False, backlog=length)
        assert budget is not None
        chunks.append(budget.take(start, length - start))
        start += chunks[-1]
    return chunks


def test_d10_chunks_shrink_while_the_context_grows_and_take_equal_time() -> None:
    chunks = sizes(pacing(taught(LONG_CONTEXT, LONG_CONTEXT)), 4000)
    full = chunks[:-1]
    assert sum(chunks) == 4000
    assert full == sorted(full, reverse=True), "never larger later on"
    assert min(full) >= max(full[0] // 4 - MIN_CHUNK, MIN_CHUNK), "nor smaller than a quarter"
    start, seconds = 0, []
    for chunk in full:
        shape = StepShape(chunk, attended_by(start, chunk), 0)
        seconds.append(LONG_CONTEXT.seconds(shape))
        start += chunk
    above_floor = [s for s, chunk in zip(seconds, full, strict=True) if chunk > full[0] // 4 + MIN_CHUNK]
    assert max(above_floor) <= 1.05 * seconds[0]
    assert min(above_floor) >= 0.7 * seconds[0], "cut to whole multiples of 4"


def test_a_lone_prompt_is_cut_so_that_it_passes_the_pipe_soonest() -> None:
    cost = StageCost(read=0.010, per_token=0.002, overhead=0.002)
    found = pacing(taught(cost, cost))
    chunk = sizes(found, 512)[0]

    def passes_in(size: int) -> float:
        return (512 / size + 1) * cost.seconds(StepShape(size, 0, 0))

    assert passes_in(chunk) <= 1.03 * min(map(passes_in, range(4, 513)))


@pytest.mark.parametrize("num_decodes", [1, 8, 16])
@pytest.mark.parametrize("target_s", [0.1, 0.2, 0.5])
def test_prompts_beside_decodes_keep_the_inter_token_target(num_decodes: int, target_s: float) -> None:
    cost = StageCost(read=0.010, per_token=0.001, per_attended=1e-7, overhead=0.001)
    found = pacing(taught(cost, cost), target_s=target_s)
    decodes = StepShape(num_decodes, num_decodes * 100, num_decodes)
    budget = found.prompt_budget(decodes, anybody_decodes=True, backlog=10_000)
    assert budget is not None
    chunks = [budget.take(0, 4000), budget.take(0, 4000)]
    total = StepShape(
        num_decodes + sum(chunks),
        decodes.attended + sum(attended_by(0, chunk) for chunk in chunks),
        num_decodes,
    )
    assert chunks[0] >= MIN_CHUNK
    assert cost.seconds(total) <= target_s / 2 + 1e-9
    longer = total._replace(tokens=total.tokens + 2 * MIN_CHUNK)
    assert cost.seconds(longer) > target_s / 2 or chunks[0] == 512, "and use what it leaves"


def test_a_target_that_decodes_alone_break_still_lets_prompts_on() -> None:
    slow = StageCost(read=1.0, per_token=0.1)
    found = pacing(taught(slow, slow), target_s=0.05)
    decodes = StepShape(4, 4, 4)
    budget = found.prompt_budget(decodes, anybody_decodes=True, backlog=1000)
    assert budget is not None
    chunk = budget.take(0, 1000)
    assert chunk == MIN_CHUNK
    assert slow.seconds(StepShape(4 + chunk, 0, 4)) <= 1.5 * slow.seconds(decodes)


def test_plans_in_flight_share_a_backlog_evenly() -> None:
    cheap = StageCost(read=0.0001, per_token=1e-6)
    found = pacing(taught(cheap, cheap), num_stages=2)
    first = found.prompt_budget(StepShape(8, 80, 8), anybody_decodes=True, backlog=200)
    assert first is not None
    assert first.take(0, 200) == 100, "half of the backlog"
    assert first.take(0, 200) == 0


def test_a_lone_prompt_does_not_hang_on_how_fast_the_weights_were_read_when_that_was_measured() -> None:
    """Chunks of 8 would be best by these costs, and take twice as long if reading takes twice as long."""
    cost = StageCost(read=0.015, per_token=0.0019, overhead=0.0003)

    def seconds(size: int, read: float) -> float:
        return (512 / size + 1) * (cost.overhead + max(read, cost.per_token * size))

    (chunk, *_) = sizes(pacing(taught(cost, cost)), 512)
    best = min(seconds(size, cost.read) for size in range(8, 257))
    assert seconds(chunk, cost.read) <= 1.035 * best
    assert seconds(chunk, 2 * cost.read) <= 1.035 * best
    assert seconds(8, 2 * cost.read) > 1.9 * best


def test_without_a_target_a_burst_beside_decodes_does_not_empty_the_stages_behind() -> None:
    """Half of the backlog in one plan would let the second stage wait for it as long as it takes."""
    cost = StageCost(read=0.030, per_token=0.002, overhead=0.001)
    found = pacing(taught(cost, cost), target_s=1e9, max_chunk=2048)
    decodes = StepShape(16, 1600, 16)
    budget = found.prompt_budget(decodes, anybody_decodes=True, backlog=4000)
    assert budget is not None
    chunk = budget.take(0, 4000)

    def passes_in(size: int) -> float:
        return (4000 / size + 1) * (cost.seconds(decodes) + 0.002 * size)

    assert passes_in(chunk) <= 1.03 * min(map(passes_in, range(8, 2001)))
    assert chunk < 400


def test_the_end_of_a_prompt_may_have_any_length() -> None:
    cheap = StageCost(read=0.0001, per_token=1e-6)
    budget = pacing(taught(cheap), num_stages=1).prompt_budget(NOTHING, anybody_decodes=False, backlog=37)
    assert budget is not None
    assert budget.take(0, 37) == 37


def test_a_prompt_beside_the_last_decode_of_all_is_cut_as_beside_any(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = StageCost(read=0.010, per_token=1e-4)
    one = WireRig(cost, cost, scheduler=SchedulerConfig(prefill_chunk=512, inter_token_target_ms=30))
    beside: list[list[int]] = []
    submit = one.pipe.submit_plan

    def submit_and_note(plan: ScheduledBatch) -> int:
        if plan.num_tokens[:1] == [1] and len(plan.rows) > 1:
            beside.append(list(plan.num_tokens))
        return submit(plan)

    monkeypatch.setattr(one.pipe, "submit_plan", submit_and_note)
    one.add("A", 4, max_tokens=8, ignore_eos=True)
    while len(one.tokens("A")) < 4:
        one.run(1e-3)
    one.add("B", 2000, max_tokens=1, ignore_eos=True)
    one.run(1.0)
    assert len(one.tokens("A")) == 8
    assert len(beside) > 1
    assert len({chunk for _, chunk in beside}) == 1, "the last is no longer, though nobody decodes behind it"
