"""The first measurements, over stages that are simulated in fake time."""

from __future__ import annotations

from collections import deque
from typing import Self

import msgspec
import pytest

from fakes import FakeClock
from penstock.batch import (
    NO_STORE_USE,
    BuiltGrammar,
    LinkOrder,
    OrderResult,
    RankLoaded,
    ScheduledBatch,
    StageSpans,
    StageTimes,
    StepResult,
    StoreUse,
    decode_to_rank,
    encode,
)
from penstock.config.engine import CacheConfig, ParallelConfig, SchedulerConfig
from penstock.engine.core.calibration import calibrate
from penstock.engine.core.cost_learning import CostLearner
from penstock.errors import WaitTimeoutError
from penstock.executor.base import KVPlan
from penstock.process.config import CoreConfig
from penstock.runner.request_rows import RequestRows
from penstock.scheduler.cost_model import StageCost, StepShape
from penstock.trace.phases import Phase

SHARED = StageCost(read=0.030, per_token=0.002, per_attended=4e-7, overhead=0.001)
ALONE = StageCost(read=0.015, per_token=0.002, per_attended=4e-7, overhead=0.001)


class SimulatedPipe:
    """An executor whose stages take the time of their cost; the clock moves only while somebody polls.

    Args:
        plan_delay_s: from the submission of a plan until the first stage has it.
        head_s: of sampling, on the last stage.
    """

    def __init__(
        self,
        clock: FakeClock,
        num_stages: int,
        *,
        plan_delay_s: float = 0.0,
        head_s: float = 0.010,
        block_size: int = 32,
    ) -> None:
        self.clock, self.num_stages, self.plan_delay_s = clock, num_stages, plan_delay_s
        self.head_s = head_s
        self.plans: list[ScheduledBatch] = []
        self.rows = RequestRows(16, 1024, block_size)  # checks that the plans are those that a rank takes
        self._free_at = [0.0] * num_stages
        self._done_at: deque[float] = deque()
        self._steps: list[list[tuple[int, int, list[tuple[Phase, float]]]]] = [[] for _ in range(num_stages)]
        self._reports: list[StageSpans] = []
        self.is_silent = False

    def submit_plan(self, plan: ScheduledBatch) -> None:
        wire = decode_to_rank(encode(plan))
        assert isinstance(wire, ScheduledBatch)
        assert wire.step_id == len(self.plans)
        self.plans.append(wire)
        self.rows.apply(wire)
        self.rows.append_blocks(wire)
        self.rows.advance(wire, self.rows.span_of(wire)[1])
        cost = SHARED if self._done_at and self.num_stages > 1 else ALONE
        shape, ready = StepShape.of(wire), self.clock.now + self.plan_delay_s
        for stage in range(self.num_stages):
            head_s = self.head_s if stage == self.num_stages - 1 and shape.samples else 0.0
            spans = [(Phase.TAKE, cost.overhead), (Phase.FORWARD, cost.seconds(shape) - cost.overhead)]
            spans.append((Phase.SAMPLE, head_s))
            ready = max(ready, self._free_at[stage]) + sum(seconds for _, seconds in spans)
            self._free_at[stage] = ready
            self._steps[stage].append((wire.step_id, shape.tokens, spans))
        self._done_at.append(ready)
        if wire.meta.wants_times:
            self._report()

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        if self.is_silent or not self._done_at:
            self.clock.advance(timeout_s)
            return []
        self.clock.now = max(self.clock.now, self._done_at.popleft())
        return [StepResult(step_id=len(self.plans) - len(self._done_at) - 1)]

    @property
    def reports(self) -> Self:
        return self

    def spans(self) -> list[StageSpans]:
        return self._reports

    def _report(self) -> None:
        for stage, steps in enumerate(self._steps):
            spans = [span for _, _, of_step in steps for span in of_step]
            self._reports.append(
                StageSpans(
                    stage=stage,
                    began_ns=0,
                    phases=bytes(phase for phase, _ in spans),
                    durations_ns=[round(seconds * 1e9) for _, seconds in spans],
                    steps=[(3 * i, step, tokens) for i, (step, tokens, _) in enumerate(steps)],
                )
            )

    def start(self) -> KVPlan:
        raise NotImplementedError

    def poll_start(self) -> KVPlan | None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        raise NotImplementedError

    def stage_times(self) -> list[StageTimes]:
        return []

    def finished_orders(self) -> list[OrderResult]:
        return []

    def store_use(self) -> StoreUse:
        return NO_STORE_USE

    def built_grammars(self) -> list[BuiltGrammar]:
        return []

    def exchange_link(self, order: LinkOrder) -> None:
        raise NotImplementedError

    def wait_sources(self) -> list[int]:
        return []


def core_config(num_stages: int, async_depth: int | str = "auto", *, max_model_len: int = 1024) -> CoreConfig:
    parallel = msgspec.convert(
        {"pipeline_parallel_size": num_stages, "async_depth": async_depth}, ParallelConfig
    )
    return CoreConfig(
        parallel=parallel,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=16),
        seed=0,
        max_model_len=max_model_len,
        vocab_size=100,
        eos_token_ids=[1],
    )


def kv_plan(num_stages: int, *, is_invariant: bool = True, num_blocks: int = 64) -> KVPlan:
    ranks = [
        RankLoaded(
            stage=stage,
            max_blocks=num_blocks,
            block_bytes=0,
            tensor_bytes=0,
            bytes_read=0,
            load_seconds=0.0,
            is_invariant=is_invariant,
        )
        for stage in range(num_stages)
    ]
    return KVPlan(num_blocks=num_blocks, ranks=ranks)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_d10_costs_alone_and_shared_are_found(num_stages: int) -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, num_stages)
    found = calibrate(pipe, core_config(num_stages), kv_plan(num_stages), clock)
    assert isinstance(found.costs, CostLearner)
    assert found.next_step == len(pipe.plans)
    shared, alone = found.costs.model.costs() or [], found.costs.model.costs(alone=True) or []
    assert [cost.head_read for cost in shared] == pytest.approx([0.0] * (num_stages - 1) + [0.010])
    if num_stages > 1:
        for shape in (StepShape(4, 400, 0), StepShape(16, 160, 0), StepShape(64, 30_000, 0)):
            assert shared[0].seconds(shape) == pytest.approx(SHARED.seconds(shape), rel=0.1)
            assert alone[0].seconds(shape) == pytest.approx(ALONE.seconds(shape), rel=0.1)


def test_nothing_of_the_trials_is_left() -> None:
    """No row is held, and every sample has been consumed, before the first request's plan."""
    clock = FakeClock()
    pipe = SimulatedPipe(clock, 2)
    calibrate(pipe, core_config(2), kv_plan(2), clock)
    assert set(pipe.rows.generation) == {-1}
    assert pipe.plans[-1].consume_through == pipe.plans[-2].step_id
    assert pipe.plans[-1].rows == []


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(("delay_s", "depth"), [(0.0, 0), (0.004, 1)])
def test_f10_auto_issues_a_plan_ahead_where_plans_are_slow_to_come(
    delay_s: float, depth: int, num_stages: int
) -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, num_stages, plan_delay_s=delay_s, head_s=0.0)
    assert calibrate(pipe, core_config(num_stages), kv_plan(num_stages), clock).async_depth == depth


@pytest.mark.parametrize("asked", [0, 1, 5])
def test_f10_a_depth_that_is_given_is_kept(asked: int) -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, 2, plan_delay_s=0.004)
    assert calibrate(pipe, core_config(2, asked), kv_plan(2), clock).async_depth == asked


@pytest.mark.parametrize(("asked", "depth"), [("auto", 0), (2, 2)])
def test_ranks_whose_numbers_depend_on_company_are_not_paced_by_time(asked: int | str, depth: int) -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, 2)
    found = calibrate(pipe, core_config(2, asked), kv_plan(2, is_invariant=False), clock)
    assert (found.costs.model, found.next_step, found.async_depth) == (None, 0, depth)
    assert pipe.plans == []


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "block_size"),
    [(2, 64, 32), (3, 64, 32), (33, 64, 32), (1024, 1, 32), (500, 16, 32), (2, 1, 1)],
)
def test_small_models_and_pools_are_measured_with_what_fits(
    max_model_len: int, num_blocks: int, block_size: int
) -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, 2, block_size=block_size)
    config = msgspec.structs.replace(
        core_config(2, max_model_len=max_model_len), cache=CacheConfig(block_size=block_size)
    )
    assert calibrate(pipe, config, kv_plan(2, num_blocks=num_blocks), clock).costs.model is not None
    for plan in pipe.plans:
        assert all(
            0 <= start < start + count <= min(max_model_len, block_size * num_blocks)
            for start, count in zip(plan.start_positions, plan.num_tokens, strict=True)
        )


def test_a_stage_that_does_not_answer_is_told_within_the_deadline() -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, 2)
    pipe.is_silent = True
    with pytest.raises(WaitTimeoutError, match="measurements at start"):
        calibrate(pipe, core_config(2), kv_plan(2), clock)
    assert clock.now <= 100.0 + core_config(2).stall_timeout_s + 1.0


def test_of_a_slow_model_only_the_first_trials_are_made() -> None:
    clock = FakeClock()
    pipe = SimulatedPipe(clock, 2, plan_delay_s=10.0)
    found = calibrate(pipe, core_config(2), kv_plan(2), clock)
    assert isinstance(found.costs, CostLearner)
    assert found.costs.model.costs() is not None
    assert found.costs.model.costs(alone=True) is not None
    assert len(pipe.plans) == 2 + 6 + 1, (
        "one micro-batch alone, a full pipe, and the plan that frees the rows"
    )
    assert found.async_depth == 0
