"""The simulator decides what a core over ranks decides, plan by plan, and at the same times.

The ranks are those of `fakes`, which replay every plan and check it, behind the pipe of `timed_pipe`, which
goes from event to event in place of scanning the stages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from fakes import CoreRig, FakeClock
from penstock.batch import ScheduledBatch
from penstock.config.engine import CacheConfig
from penstock.scheduler.cost_model import StageCost, StepShape
from penstock.simulator.pipe import SimulatedPipe, Wire
from penstock.simulator.simulation import Simulation
from penstock.workloads.requests import BenchRequest
from simulated import SMALL
from timed_pipe import TimedPipe

HOP_S, CORE_HOP_S = 0.003, 0.001
LENGTHS = [(5, 9), (40, 3), (17, 20), (3, 1), (64, 12), (9, 30), (33, 8), (2, 2)]
NO_CACHE = msgspec.structs.replace(SMALL, cache=CacheConfig(enable_prefix_caching=False))


class RecordedPipe(TimedPipe):
    """Keeps the plans that it is given."""

    def __init__(self, *, plans: list[ScheduledBatch], **given: Any) -> None:
        super().__init__(**given)
        self._plans = plans

    def submit_plan(self, plan: ScheduledBatch) -> int:
        self._plans.append(plan)
        return super().submit_plan(plan)


def decisions_of(plans: list[ScheduledBatch]) -> list[tuple[object, ...]]:
    """What was decided, plan by plan; steps are counted from each plan, since a start sends a probe first."""
    return [
        (
            plan.rows,
            plan.num_tokens,
            plan.start_positions,
            plan.new_blocks,
            plan.need_sampled,
            [source if source < 0 else plan.step_id - source for source in plan.token_from],
            plan.freed_rows,
            [(new.row, new.generation, new.request_id) for new in plan.new_rows],
        )
        for plan in plans
        if plan.rows
    ]


def on_ranks(costs: list[StageCost], num_blocks: int) -> tuple[list[ScheduledBatch], float]:
    """Plans of a core over fake ranks, and how long all requests took."""
    plans: list[ScheduledBatch] = []
    clock = FakeClock()

    def seconds(stage: int, plan: ScheduledBatch) -> float:
        return costs[stage].seconds(StepShape.of(plan))

    rig = CoreRig(
        num_stages=len(costs),
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=256,
        eos_token_ids=(),
        scheduler=SMALL.scheduler,
        clock=clock,
        executor_class=partial(
            RecordedPipe, plans=plans, clock=clock, seconds=seconds, hop_s=HOP_S, core_hop_s=CORE_HOP_S
        ),
    )
    began = clock()
    for number, (prompt_len, max_tokens) in enumerate(LENGTHS):
        rig.add(f"r{number}", prompt_len, max_tokens=max_tokens, ignore_eos=True)
    ended = began
    while rig.scheduler.has_requests:
        rig.step(timeout_s=1.0)
        ended = clock()
    return plans, ended - began


def simulated(costs: list[StageCost], num_blocks: int) -> tuple[list[ScheduledBatch], float]:
    """The same of the simulator."""
    plans: list[ScheduledBatch] = []

    def record(plan: ScheduledBatch) -> int:
        plans.append(plan)
        return 0

    pipeline = SimulatedPipe(
        stages=costs,
        wires=[Wire(latency_s=HOP_S)] * (len(costs) - 1),
        return_wire=Wire(latency_s=CORE_HOP_S),
        plan_s=CORE_HOP_S,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=256,
    )
    requests = [
        BenchRequest(index=index, arrival_s=0.0, prompt_token_ids=[7] * length, output_len=count)
        for index, (length, count) in enumerate(LENGTHS)
    ]
    run = Simulation(pipeline, NO_CACHE, record=record).run(requests)
    run.replicas[0].core.check_invariants()
    return plans, run.ended_s - run.began_s


@pytest.mark.parametrize("num_blocks", [256, 24])  # 24: some are preempted
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_a_simulated_core_makes_the_plans_of_one_over_ranks(num_stages: int, num_blocks: int) -> None:
    costs = [
        StageCost(read=0.01 + 0.002 * stage, per_token=1e-3, per_attended=1e-6) for stage in range(num_stages)
    ]
    plans, seconds = on_ranks(costs, num_blocks)
    others, other_seconds = simulated(costs, num_blocks)
    assert decisions_of(others) == decisions_of(plans)
    assert other_seconds == pytest.approx(seconds)
