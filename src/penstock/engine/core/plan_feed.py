"""Fills the pipe: makes plans while there is room for them, and notes why a plan comes late.

    room in the pipe? ──▶ pace allows it? ──▶ a request may run? ──▶ plan ──▶ executor
          no: held              no                 no: starved

Owned by `engine.core.core`, which settles results; the scheduler decides what is in a plan.
"""

from __future__ import annotations

import msgspec

from penstock.batch import NO_META, PlanMeta, ScheduledBatch
from penstock.engine.core.calibration import Calibration
from penstock.engine.core.operations_in_force import OperationsInForce
from penstock.engine.core.pace import Pace
from penstock.engine.core.steps_in_flight import StepsInFlight
from penstock.engine.core.wire_times import NO_WIRE_TIMES, AnyWireTimes
from penstock.executor.base import Executor
from penstock.scheduler.scheduler import Scheduler

_STARVED = PlanMeta(starved=True)
_HELD = PlanMeta(held=True)


class PlanFeed:
    """Gets plans from the scheduler and submits them to an executor, while the pipe has room.

    Args:
        steps: steps in flight; what is submitted joins them.
        pace: how fast plans may follow one another.
        operations: say whether ranks report their times after the next plan.
        calibration: how many plans are issued ahead, and what learns from them.
        wire: measures the time between the stages, and for that wants the pipe empty now and then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: StepsInFlight,
        pace: Pace,
        operations: OperationsInForce,
        calibration: Calibration,
        wire: AnyWireTimes = NO_WIRE_TIMES,
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._pace = pace
        self._operations = operations
        self._calibration = calibration
        self._wire = wire
        self._meta = _STARVED  # of the next plan: why it is not issued now

    @property
    def interval_ms(self) -> int:
        """The least time between two plans with work, which an administrator may set; 0 sets no limit."""
        return self._pace.interval_ms

    def next_wakeup(self) -> float:
        """Return the clock time at which the pace allows the next plan; infinite if it does now."""
        return self._pace.next_wakeup()

    def fill(self, executor: Executor, epoch: int) -> None:
        """Submit plans until the pipe is full, no request may run, or the pace allows no more."""
        if self._wire.wants_look and not self._look(executor, epoch):
            return
        while len(self._steps) < self._scheduler.useful_depth + self._calibration.async_depth:
            # Asked before there is a plan: one that is made has changed the scheduler, and must be issued.
            if not self._pace.allows_plan:
                self._meta = NO_META  # ranks wait for a plan
                return
            plan = self._scheduler.plan_step(self._steps.next_step)
            if plan is None:
                self._meta = _STARVED
                return
            self._pace.planned()
            self._submit(plan, executor, epoch)
        self._meta = _HELD

    def probe(self, executor: Executor, epoch: int) -> None:
        """Submit a probe, a plan without requests; its result proves that all stages work."""
        self._submit(self._scheduler.plan_probe(self._steps.next_step), executor, epoch)

    def learn(self, now: float, executor: Executor) -> None:
        """Learn what plans and wires (links between hosts) cost from the stages' reports.

        `now`: clock seconds.
        """
        self._calibration.costs.follow(now, executor.reports.spans)
        self._wire.follow(now, executor.reports)

    def _look(self, executor: Executor, epoch: int) -> bool:
        """Send a plan that meets no other once the pipe is empty; return whether others may follow."""
        if len(self._steps):
            self._meta = _HELD
            return False
        self.probe(executor, epoch)
        return True

    def _submit(self, plan: ScheduledBatch, executor: Executor, epoch: int) -> None:
        meta, self._meta = self._meta, NO_META
        if self._operations.wants_times:
            meta = msgspec.structs.replace(meta, wants_times=True)
        plan = msgspec.structs.replace(plan, epoch=epoch, meta=meta)
        self._calibration.costs.submitted(plan, alone=self._scheduler.is_one_alone)
        # In flight before it is sent: the time to send it counts as time in the stages.
        step = self._steps.push(plan)
        step.digest = executor.submit_plan(plan)
