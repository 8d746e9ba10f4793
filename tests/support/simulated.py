"""Small simulated pipes and loads for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.config.engine import SchedulerConfig
from penstock.scheduler.cost_model import StageCost
from penstock.simulator.pipe import SimulatedPipe, Wire
from penstock.simulator.replica import EngineSettings
from penstock.simulator.simulation import FinishedRun, Simulation
from penstock.workloads.requests import BenchRequest

STEP_S = 0.01
SMALL = EngineSettings(
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=48, prefill_chunk=32)
)


def pipe_of(num_stages: int, *, hop_s: float = 0.0, **given: Any) -> SimulatedPipe:
    """Equal stages that take `STEP_S` for any plan."""
    cost = StageCost(read=STEP_S, per_token=0.0)
    fields: dict[str, Any] = {
        "stages": [cost] * num_stages,
        "wires": [Wire(latency_s=hop_s)] * (num_stages - 1),
        "num_blocks": 256,
        "block_size": 4,
        "max_model_len": 256,
    }
    return SimulatedPipe(**(fields | given))


def load_of(
    count: int, *, prompt_len: int = 8, output_len: int = 4, gap_s: float = 0.0
) -> list[BenchRequest]:
    """Requests with prompts of their own."""
    return [
        BenchRequest(
            index=index,
            arrival_s=index * gap_s,
            prompt_token_ids=[100 + index] * prompt_len,
            output_len=output_len,
        )
        for index in range(count)
    ]


def run_of(
    pipeline: SimulatedPipe,
    requests: Sequence[BenchRequest],
    settings: EngineSettings = SMALL,
    **given: Any,
) -> FinishedRun:
    """A finished run; all requests have ended."""
    run = Simulation(pipeline, settings, **given).run(requests)
    assert len(run.accounts) == len(requests)
    return run
