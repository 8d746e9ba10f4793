"""Finds how many plans in flight keep every stage busy: one for each stage, and more for wires between.

A plan is on its way for as long as all stages and all wires (links between hosts) take for it, the way back
included. Meanwhile the slowest of them could take other plans, so that the pipe is full with

    (sum of stages + wires) / slowest        plans, rounded up: two stages of 10 ms and 30 ms of wire take 5

    stage 0   | 0 | 1 | 2 | 3 | 4 | 5 | 6 |      plan 5 goes when the result of plan 0 is back
    stage 1             | 0 | 1 | 2 | 3 |
    result                            ^0  ^1

What stages take for a plan is predicted by their costs, or where those are not known is what they have
reported. What wires take is measured by `engine.core.wire_times`. The number follows an average over the last
plans, so that large chunks of prompts, which need few, do not queue up as many as small decodes do. Read by
the scheduler, which knows it as `scheduler.pacing.PlanDepth`. No clock here.
"""

from __future__ import annotations

import math

from penstock.scheduler.cost_model import CostModel, StepShape
from penstock.scheduler.pacing import NO_WIRE_TIME
from penstock.scheduler.plan_builder import PlanBuilder

_NEWEST_WEIGHT = 0.2  # of a plan in the averages
_MARGIN = 0.05  # of the number: the share of the slowest stage's time that another plan must be worth


class WireDepth:
    """The number of plans in flight that fills all stages and the wires (links between hosts) between them.

    It implements `scheduler.pacing.PlanDepth`.

    Args:
        num_stages: P, the least number.
        largest: the most plans that may be in flight.
        costs: of the stages; None: they are not known, and what stages report counts.

    Attributes:
        wire: times of the wires; written by what measures them.
        reported: seconds of each stage for a plan, on average; written by what gets the reports.
        trip_s: seconds from a plan to its result, without queues; an average over the last plans.
    """

    def __init__(self, num_stages: int, largest: int, costs: CostModel | None) -> None:
        assert largest >= num_stages, f"{largest} plans cannot fill {num_stages} stages"
        self.number = self._least = num_stages
        self.largest = largest
        self.wire = NO_WIRE_TIME
        self.reported: list[float] = []
        self.trip_s = 0.0
        self._slowest_s = 0.0  # of a stage or a link, an average as `trip_s`
        self._costs = costs

    def planned(self, plan: PlanBuilder) -> None:
        """Choose the number anew, by the size of a plan that is issued now.

        Implements `PlanDepth.planned`.
        """
        num_tokens = sum(plan.num_tokens)
        stages = self._stage_seconds(plan, num_tokens) if num_tokens else []
        if not stages:
            return
        seconds = [*stages, *self.wire.of_links(num_tokens)]
        trip_s, slowest_s = sum(seconds) + self.wire.latency, max(seconds)
        weight = _NEWEST_WEIGHT if self._slowest_s else 1.0
        self.trip_s += weight * (trip_s - self.trip_s)
        self._slowest_s += weight * (slowest_s - self._slowest_s)
        self.number = self._chosen()

    def _stage_seconds(self, plan: PlanBuilder, num_tokens: int) -> list[float]:
        """Return what each stage takes for a plan; empty if nothing is known of that."""
        costs = None if self._costs is None else self._costs.costs()
        if costs is None:
            return self.reported
        shape = StepShape(num_tokens, plan.attended, sum(plan.window_sizes))
        return [cost.seconds(shape) for cost in costs]

    def _chosen(self) -> int:
        """Return the number as it is, if it is right within the margin; else the least that is."""
        exact = self.trip_s / self._slowest_s if self._slowest_s else 0.0
        least, most = math.ceil((1.0 - _MARGIN) * exact), math.ceil((1.0 - _MARGIN / 2) * exact)
        number = self.number if least <= self.number <= most else least
        return max(self._least, min(number, self.largest))
