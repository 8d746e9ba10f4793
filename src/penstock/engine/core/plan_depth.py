"""Finds how many plans in flight keep every stage busy: one for each stage, and more for links between hosts.

In this module, links between hosts are called wires. The trip of a plan takes the time of all stages and all
wires, with the way of the result back to the core. Meanwhile the slowest of them could work on other plans,
so that the pipe is full with

    (sum of stages + wires) / slowest        plans, rounded up: two stages of 10 ms and 30 ms of wire take 5

    stage 0   | 0 | 1 | 2 | 3 | 4 | 5 | 6 |      plan 5 goes when the result of plan 0 is back
    stage 1             | 0 | 1 | 2 | 3 |
    result                            ^0  ^1

The time of a stage for a plan is predicted by the learnt costs. Where they are not known, it is the average
that the stage has reported. `engine.core.wire_times` measures the wires. The number follows averages over the
last plans: large chunks of prompts need fewer plans in flight than small decodes, and should not queue up.
The scheduler reads the number through `scheduler.pacing.PlanDepth`. This module reads no clock.
"""

from __future__ import annotations

import math

from penstock.scheduler.cost_model import CostModel, StepShape
from penstock.scheduler.pacing import NO_WIRE_TIME
from penstock.scheduler.plan_builder import PlanBuilder

_NEWEST_WEIGHT = 0.2  # weight of the newest plan in the averages
_MARGIN = 0.05  # a number that is too small by at most this share is right: another plan would gain little


class WireDepth:
    """The number of plans in flight that fills all stages and the wires (links between hosts) between them.

    It implements `scheduler.pacing.PlanDepth`.

    Args:
        num_stages: number of stages, which is also the least number of plans.
        largest: the most plans that may fill the pipe.
        costs: learnt costs of the stages; None: they are not known, and `reported` counts.

    Attributes:
        number: how many plans fill the pipe now.
        wire: times of the wires; written by `engine.core.wire_times`.
        reported: seconds of each stage for a plan, on average; written by `engine.core.wire_times`.
        trip_s: seconds from a plan to its result, without queues; an average over the last plans.
    """

    def __init__(self, num_stages: int, largest: int, costs: CostModel | None) -> None:
        assert largest >= num_stages, f"{largest} plans cannot fill {num_stages} stages"
        self.number = self._least = num_stages
        self.largest = largest
        self.wire = NO_WIRE_TIME
        self.reported: list[float] = []
        self.trip_s = 0.0
        self._slowest_s = 0.0  # seconds of the slowest stage or link for a plan, an average as `trip_s`
        self._costs = costs

    def planned(self, plan: PlanBuilder) -> None:
        """Choose `number` anew, by the size of a plan that is issued now.

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
        """Return the seconds that each stage takes for a plan; empty if nothing is known about them."""
        costs = None if self._costs is None else self._costs.costs()
        if costs is None:
            return self.reported
        shape = StepShape(num_tokens, plan.attended, sum(plan.window_sizes))
        return [cost.seconds(shape) for cost in costs]

    def _chosen(self) -> int:
        """Return `number` unchanged if it is right within the margin; else the least number that is right."""
        exact = self.trip_s / self._slowest_s if self._slowest_s else 0.0
        least, most = math.ceil((1.0 - _MARGIN) * exact), math.ceil((1.0 - _MARGIN / 2) * exact)
        number = self.number if least <= self.number <= most else least
        return max(self._least, min(number, self.largest))
