"""A simulated pipeline, as values: the costs of its stages, the wires between them, and their memory.

    core ──plan_s──▶ stage 0 ──wire──▶ stage 1 ──wire──▶ … ──▶ stage P-1 ──return_wire──▶ core and stage 0

`simulator.flow` lets plans pass it. Where the times come from is the caller's affair: measured stages, the
figures of devices (`simulator.planned_pipe`), or a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.layouts.stage_times import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A way from one stage to the next, or from the last one back.

    Attributes:
        latency_s: of every message; any number of them are on the way at once.
        per_token_s: for which the hidden states of a token occupy the wire, one plan after the other.
        jitter_s: by which a message is late at most; each time another part of it. Messages keep their order.
    """

    latency_s: float = 0.0
    per_token_s: float = 0.0
    jitter_s: float = 0.0


NO_WIRE = Wire()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipe:
    """One pipeline.

    Attributes:
        stages: times of each stage while others compute too.
        alone: the same while no other stage computes; empty: as with others.
        wires: [P - 1] from each stage to the next; empty: there are none that take time.
        return_wire: of samples, to the core and to the first stage.
        plan_s: from the core to the stages.
        num_links: wires between hosts; what they take the engine measures, and sends more plans.
        num_blocks: of the KV cache, on each stage.
        has_known_costs: ranks compute the same numbers however plans are cut, so that the engine cuts them by
            time (`scheduler.pacing`); else it cuts by plain rules, as it does on GPUs.
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
    """A stage that is lost.

    Attributes:
        stage, replica: which one it is.
        at_s: after the start of the run.
        away_s: until another one is in its place, with its weights, and the next epoch begins.
    """

    stage: int
    at_s: float
    away_s: float
    replica: int = 0
