"""An executor without ranks: it takes plans, and gives results at the simulated times at which they end.

`engine.core.core` calls it as it calls the executor of real ranks. The reports of the stages' times are made
from the flow, so that the engine measures simulated links as it measures real ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container

from penstock.batch import (
    NO_STORE_USE,
    BuiltGrammar,
    EntryAnswers,
    EntryCall,
    LinkOrder,
    OrderResult,
    ScheduledBatch,
    SpansKey,
    StageSpans,
    StageTimes,
    StepResult,
    StoreUse,
)
from penstock.executor.base import KVPlan
from penstock.scheduler.cost_model import StepShape
from penstock.simulator.flow import Floats, PlanFlow
from penstock.simulator.pipe import SimulatedPipe
from penstock.simulator.sampled import SampledRows
from penstock.trace.phases import Phase

_MAX_UNQUEUED = 16  # most plans whose times are reported: the newest that were alone in the pipe


def no_record(plan: ScheduledBatch) -> int:
    """Return 0 as the digest of any plan, and keep nothing."""
    return 0


class SimulatedExecutor:
    """The executor of one epoch, whose stages are simulated.

    Args:
        pipeline: the pipe.
        flow: computes when plans pass this pipe; it goes on in the next epoch.
        clock: the clock of the simulation.
        is_alone: returns whether the plan that is sent is the only micro-batch.
        record: called with every plan; returns the plan's digest, which its result has too.
    """

    def __init__(
        self,
        pipeline: SimulatedPipe,
        flow: PlanFlow,
        clock: Callable[[], float],
        *,
        is_alone: Callable[[], bool],
        record: Callable[[ScheduledBatch], int] = no_record,
    ) -> None:
        self._flow = flow
        self._clock = clock
        self._is_alone = is_alone
        self._record = record
        self._return_wire = pipeline.return_wire
        self._sampled = SampledRows()
        self._results: deque[tuple[float, StepResult]] = deque()  # when each is at the core
        self._samples: deque[tuple[int, float]] = deque()  # (step, when its samples are at the first stage)
        self._samples_at = -math.inf  # when the samples of the newest consumed step were there
        self.reports = SimulatedReports(pipeline.num_stages, flow)

    @property
    def next_at(self) -> float:
        """The clock time at which the next result is due; infinite if no plan is in flight."""
        return self._results[0][0] if self._results else math.inf

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Send a plan through the simulated stages, and keep its result until it is due."""
        digest, now = self._record(plan), self._clock()
        shape = StepShape.of(plan)
        has_company = bool(self._results)
        ends_at = self._flow.send(
            plan.step_id,
            shape,
            now,
            samples_at=self._consumed(plan.consume_through),
            alone=self._is_alone(),
            cause=_cause(plan),
        )
        ids, rejected = self._sampled.sample(plan)
        result = StepResult(
            step_id=plan.step_id, epoch=plan.epoch, digest=digest, token_ids=ids, num_rejected=rejected
        )
        back_at = ends_at + self._return_wire.latency_s + self._flow.jitter(self._return_wire)
        if self._results:
            back_at = max(back_at, self._results[-1][0])
        self._results.append((back_at, result))
        self._samples.append((plan.step_id, back_at))
        if shape.tokens and not has_company:
            self.reports.keep(plan.step_id, shape.tokens, self._flow.newest_works())
        return digest

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Return the results that are due by the clock, in step order, without waiting."""
        now, results, taken = self._clock(), self._results, []
        while results and results[0][0] <= now:
            taken.append(results.popleft()[1])
            self._flow.arrived()
        return taken

    def abandon(self) -> None:
        """Drop the plans in flight, since a stage is lost."""
        self._flow.give_up(self._clock())
        self._results.clear()

    def start(self) -> KVPlan:
        raise AssertionError("simulated stages are there from the beginning")

    def poll_start(self) -> KVPlan | None:
        raise AssertionError("simulated stages are there from the beginning")

    def call_store(self, rank: int, call: EntryCall) -> bool:
        raise AssertionError("simulated stages have no store")

    def exchange_link(self, order: LinkOrder) -> None:
        raise AssertionError("simulated links are never exchanged")

    def wait_sources(self) -> list[int]:
        return []

    def shutdown(self) -> None:
        """Do nothing: there are no processes."""

    def _consumed(self, step: int) -> float:
        """Return when the first stage has the samples of all steps up to this one."""
        while self._samples and self._samples[0][0] <= step:
            self._samples_at = self._samples.popleft()[1]
        return self._samples_at


class SimulatedReports:
    """The reports of simulated stages: the seconds for which they computed. All other reports are empty."""

    def __init__(self, num_stages: int, flow: PlanFlow) -> None:
        self._num_stages = num_stages
        self._flow = flow
        self._unqueued: deque[tuple[int, int, Floats]] = deque(maxlen=_MAX_UNQUEUED)

    def keep(self, step: int, num_tokens: int, works: Floats) -> None:
        """Keep the times of the stages for a plan that met no other plan in the pipe.

        Args:
            works: seconds that each stage computes the plan.
        """
        self._unqueued.append((step, num_tokens, works))

    def stage_times(self) -> list[StageTimes]:
        """Return the seconds that each simulated stage has computed since its start, in stage order."""
        num_steps, busy = self._flow.busy_seconds()
        return [
            StageTimes(
                stage=stage,
                num_steps=num_steps,
                wall_ns=0,
                busy_ns=round(1e9 * seconds),
                phase_ns=[],
                busy_ratio=0.0,
            )
            for stage, seconds in enumerate(busy.tolist())
        ]

    def spans(self) -> list[StageSpans]:
        """Return, for each stage, one span of computing for each plan that was kept."""
        steps = [(index, step, tokens) for index, (step, tokens, _) in enumerate(self._unqueued)]
        return [
            StageSpans(
                stage=stage,
                began_ns=0,
                phases=bytes([Phase.FORWARD] * len(steps)),
                durations_ns=[round(1e9 * works[stage]) for _, _, works in self._unqueued],
                steps=steps,
            )
            for stage in range(self._num_stages)
        ]

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        return []  # only clients read the work of all ranks, and a simulation has none

    def finished_orders(self) -> list[OrderResult]:
        return []

    def store_use(self) -> StoreUse:
        return NO_STORE_USE

    def entry_answers(self) -> list[EntryAnswers]:
        return []

    def built_grammars(self) -> list[BuiltGrammar]:
        return []


def _cause(plan: ScheduledBatch) -> Phase:
    """Return the phase of stages that have to wait for the plan, as `pipeline.stage` has it for real ones.

    On the last stage `WAIT_PLAN` takes the place of `WAIT_NEXT`; `simulator.flow` sees to that.
    """
    if plan.meta.starved:
        return Phase.NO_WORK
    return Phase.WAIT_NEXT if plan.meta.held else Phase.WAIT_PLAN
