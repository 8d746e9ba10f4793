"""Teaches the cost model the times that stages report of their plans.

`engine.core.calibration` and `engine.core.plan_feed` report which plans they submit, and hand over the
reports of the stages. `scheduler.cost_model` has the model that is taught. Knows no executor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from penstock.batch import NO_GRAMMAR, NewRow, ScheduledBatch, StageSpans
from penstock.scheduler.cost_model import CostModel, StepSample, StepShape
from penstock.trace.phases import Phase

OVERHEAD = (Phase.TAKE, Phase.COMM, Phase.PUT)
LEARN_INTERVAL_S = 1.0
_MAX_SHAPES = 4096  # the most steps that are remembered for later reports of stages
_MAX_SAMPLES = 128  # the most that one report teaches: a tiny model makes thousands of steps a second


class StepTimes(NamedTuple):
    """The time that one stage spent on one step, in seconds, without waiting.

    Attributes:
        step: id of the step.
        forward_s: time in the layers.
        sample_s: time in the output layer and the sampler, on the last stage.
        overhead_s: time for taking inputs, copying hidden states, and sending results.
    """

    step: int
    forward_s: float
    sample_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """The sum of the three times."""
        return self.forward_s + self.sample_s + self.overhead_s


class _Told(NamedTuple):
    """The facts about a step that was submitted.

    Attributes:
        alone: no other plan with work was in flight, so that only one stage at a time computed.
        samples_only: the sampling phase of the last stage is the output layer and the sampler, nothing else.
    """

    shape: StepShape
    alone: bool
    samples_only: bool


class NoCosts:
    """The null `CostLearner`, where plans are not sized by time: it learns nothing."""

    model = None

    def submitted(self, plan: ScheduledBatch, *, alone: bool) -> None:
        """Do nothing, since no costs are learnt."""

    def follow(self, now: float, spans: Callable[[], Sequence[StageSpans]]) -> None:
        """Do nothing, since no costs are learnt."""


NO_COSTS = NoCosts()


class CostLearner:
    """Teaches a cost model how long stages take for plans, from the plans submitted and the stages' reports.

    The sampling time of a step is not learnt if one of its requests has a grammar or is pooled. In that phase
    they wait for masks or add up hidden states, which is not a cost of the output layer.

    Args:
        model: the cost model to teach.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._next_at = -math.inf  # clock seconds at which `follow` learns again
        self._steps: dict[int, _Told] = {}  # by step id, the oldest first
        self._special_rows: set[int] = set()  # rows whose request has a grammar or is pooled
        self._seen_ns: dict[int, int] = {}  # by stage: `began_ns` of the newest report that was learnt from

    def submitted(self, plan: ScheduledBatch, *, alone: bool) -> None:
        """Record a plan that is submitted now, so that its times can be learnt from when stages report them.

        Args:
            alone: only one stage at a time computes, since no other plan with work is in flight.
        """
        self._special_rows.difference_update(plan.freed_rows, [new.row for new in plan.new_rows])
        self._special_rows |= {new.row for new in plan.new_rows if _is_special(new)}
        # A plan that waits for the store, or scores prompts, says nothing about other plans.
        if not plan.rows or plan.awaited or plan.scored:
            return
        samples_only = not plan.mtp and self._special_rows.isdisjoint(plan.rows)
        self._steps[plan.step_id] = _Told(StepShape.of(plan), alone, samples_only)
        if len(self._steps) > _MAX_SHAPES:
            del self._steps[next(iter(self._steps))]

    def follow(self, now: float, reports: Callable[[], Sequence[StageSpans]]) -> None:
        """Learn from the stages' reports, unless that was done less than `LEARN_INTERVAL_S` ago.

        Args:
            now: clock seconds.
            reports: returns what the stages have reported.
        """
        if now >= self._next_at:
            self._next_at = now + LEARN_INTERVAL_S
            self.learn(reports())

    def learn(self, reports: Sequence[StageSpans]) -> None:
        """Learn from the reports of stages; reports that are known already are skipped."""
        for report in reports:
            if report.began_ns <= self._seen_ns.get(report.stage, -1):
                continue
            self._seen_ns[report.stage] = report.began_ns
            samples: dict[bool, list[StepSample]] = defaultdict(list)
            for times in step_times(report):
                step = self._steps.get(times.step)
                if step is not None and times.forward_s:  # a void step, after a wrong guess, is not computed
                    sample_s = times.sample_s if step.samples_only else None
                    sample = StepSample(step.shape, times.forward_s, sample_s, times.overhead_s)
                    samples[step.alone].append(sample)
            for alone, new_samples in samples.items():
                self.model.learn(report.stage, new_samples[-_MAX_SAMPLES:], alone=alone)


def _is_special(new: NewRow) -> bool:
    return new.grammar != NO_GRAMMAR or new.pooling is not None


def step_times(report: StageSpans, wanted: Container[int] | None = None) -> Iterator[StepTimes]:
    """Yield the times of each step with tokens in one report.

    Args:
        wanted: ids of the only steps to yield; None: all.
    """
    ends = [index for index, _, _ in report.steps[1:]] + [len(report.phases)]
    for (begin, step, num_tokens), end in zip(report.steps, ends, strict=True):
        if num_tokens == 0 or (wanted is not None and step not in wanted):
            continue
        spent_ns = [0] * len(Phase)
        spans = zip(report.phases[begin:end], report.durations_ns[begin:end], strict=True)
        for phase, duration_ns in spans:
            spent_ns[phase] += duration_ns
        overhead_ns = sum(spent_ns[phase] for phase in OVERHEAD)
        yield StepTimes(step, spent_ns[Phase.FORWARD] / 1e9, spent_ns[Phase.SAMPLE] / 1e9, overhead_ns / 1e9)
