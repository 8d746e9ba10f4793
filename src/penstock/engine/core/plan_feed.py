"""Fills the pipe with plans while there is room for them, and records why a plan comes late.

    room in the pipe? ──▶ pace allows it? ──▶ a request may run? ──▶ plan ──▶ executor
          no: held              no                 no: starved

A plan says whether it was held because the pipe was full, or starved because no request could run. Owned by
`engine.core.core`, which settles results; the scheduler decides what is in a plan.
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
        scheduler: makes the plans.
        steps: the steps in flight, to which the submitted ones are added.
        pace: limits how fast plans may follow one another.
        operations: knows whether ranks should report their times after the next plan.
        calibration: says how many plans are issued ahead, and learns the costs of plans.
        wire: measures the time between the stages; for that it wants the pipe to be empty now and then.
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
        self._probe_step = -1  # the newest probe
        self._meta = _STARVED  # what the next plan will say about why it is not issued now

    @property
    def interval_ms(self) -> int:
        """The least time between two plans with work, which an administrator may set; 0 sets no limit."""
        return self._pace.interval_ms

    def next_wakeup(self) -> float:
        """Return the clock time at which the pace allows the next plan; infinite if it allows one now."""
        return self._pace.next_wakeup()

    def fill(self, executor: Executor, epoch: int) -> None:
        """Submit plans until the pipe is full, no request may run, or the pace allows no more."""
        if self._wire.wants_look and not self._look(executor, epoch):
            return
        while len(self._steps) < self._scheduler.num_useful(self._calibration.async_depth, self._num_probes):
            # Asked before a plan is made: making it changes the scheduler, so that it must then be issued.
            if not self._pace.allows_plan:
                self._meta = NO_META  # neither held nor starved: ranks wait because the engine is slowed down
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
        self._probe_step = self._steps.next_step
        self._submit(self._scheduler.plan_probe(self._probe_step), executor, epoch)

    @property
    def _num_probes(self) -> int:
        """How many of the plans in flight are probes; one at most, since each goes into an empty pipe."""
        return int(len(self._steps) > 0 and self._probe_step >= self._steps.oldest_step)

    def learn(self, now: float, executor: Executor) -> None:
        """Learn the costs of plans and wires (links between hosts) from the stages' reports.

        Args:
            now: clock seconds.
            executor: has the reports.
        """
        self._calibration.costs.follow(now, executor.reports.spans)
        self._wire.follow(now, executor.reports)

    def _look(self, executor: Executor, epoch: int) -> bool:
        """Send a probe once the pipe is empty, so that it meets no other plan; return whether it was sent."""
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
        # The step is in flight before it is sent, so that the time to send it counts as time in the stages.
        step = self._steps.push(plan)
        step.digest = executor.submit_plan(plan)
