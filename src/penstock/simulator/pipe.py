"""A simulated pipeline, as values: the costs of its stages, the wires between them, and their memory.

    core ──plan_s──▶ stage 0 ──wire──▶ stage 1 ──wire──▶ … ──▶ stage P-1 ──return_wire──▶ core and stage 0

`simulator.flow` computes when plans pass the pipe. The caller provides the times, such as those of measured
stages, or those that follow from the figures of devices (`simulator.planned_pipe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.layouts.stage_times import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The connection from one stage to the next, or from the last stage back to the first.

    Attributes:
        latency_s: seconds that every message takes; any number of messages may be under way at once.
        per_token_s: seconds for which the hidden states of one token occupy the wire. The next plan's hidden
            states wait until the wire is free.
        jitter_s: the most seconds by which a message is late; how late each one is, is random. Messages keep
            their order.
    """

    latency_s: float = 0.0
    per_token_s: float = 0.0
    jitter_s: float = 0.0


NO_WIRE = Wire()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipe:
    """One simulated pipeline.

    Attributes:
        stages: times of each stage while other stages compute too.
        alone: times of each stage while no other stage computes; empty: they equal `stages`.
        wires: [P - 1] the wire from each stage to the next; empty: they take no time.
        return_wire: the wire of the samples, to the core and to the first stage.
        plan_s: seconds that a plan takes from the core to the stages.
        num_links: number of wires between hosts. If there are any, the engine measures how long plans are on
            them, and sends more plans.
        num_blocks: number of KV blocks of each stage.
        has_known_costs: the engine knows the costs of its stages, and sizes plans by time
            (`scheduler.pacing`), as it may where results do not depend on how plans are cut. If false, it
            sizes plans by plain rules, as on GPUs.
        spread: the standard deviation of the times that a stage takes for like steps, as a share of their
            mean; how long each step takes is random.
    """

    stages: Sequence[StageTimes]
    alone: Sequence[StageTimes] = ()
    wires: Sequence[Wire] = ()
    return_wire: Wire = NO_WIRE
    plan_s: float = 0.0
    num_links: int = 0
    num_blocks: int
    block_size: int = 16
    max_model_len: int
    has_known_costs: bool = False
    spread: float = 0.0

    def __post_init__(self) -> None:
        num_stages = len(self.stages)
        assert num_stages >= 1, "a pipeline without stages"
        assert len(self.alone) in (0, num_stages), f"{len(self.alone)} costs of {num_stages} stages alone"
        assert len(self.wires) in (0, num_stages - 1), f"{len(self.wires)} wires of {num_stages} stages"

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def stages_alone(self) -> Sequence[StageTimes]:
        """The times while no other stage computes."""
        return self.alone or self.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoss:
    """The loss of a stage.

    Attributes:
        stage, replica: number of the stage, and of its replica.
        at_s: seconds from the start of the run to the loss.
        away_s: seconds from the loss until another process has loaded the stage's weights and the next epoch
            begins.
    """

    stage: int
    at_s: float
    away_s: float
    replica: int = 0
