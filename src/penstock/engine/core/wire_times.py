"""Measures how long plans spend on links between hosts, from the core's clock and reports of the stages.

    round trip of a plan = time in the stages + time on the wires + time in queues

Wires are the links between hosts. Clocks of different hosts are never compared. If a plan is sent while no
plan with tokens is in flight, it waits in no queue. Its round trip less the time that the stages report is
then the time on the wires:

- A plan without tokens shows the latency, since it takes the stages next to no time.
- A plan with tokens shows how much each token adds to the latency.

An idle engine sends a plan without tokens each second, its probe. A busy engine lets the pipe run empty now
and then, for about a hundredth of its time, and then sends a probe first. Without that, only plans that wait
in queues would be measured. A queue would look like a longer wire, the core would send more plans, and the
queue would grow. A wire that has become faster would not be noticed.

The engine core reports its plans here, and `engine.core.plan_depth` gets the measured times.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from penstock.batch import ScheduledBatch, StageSpans, StageTimes
from penstock.engine.core.cost_learning import step_times
from penstock.engine.core.plan_depth import WireDepth
from penstock.executor.base import Reports
from penstock.scheduler.pacing import WireTime

FOLLOW_S = 1.0  # between two looks at the reports: stages report about as often
LOOK_S = 10.0  # after so long without a probe that met no other plan, the pipe is to run empty
LOOK_TRIPS = 100  # but only after so many trips of a plan: running empty costs about one trip
_NUM_SAMPLES = 3  # the least of so many last samples counts: a sample may be too long, but never too short
_MIN_TOKENS = 8  # plans with fewer tokens do not show the time of a token: the latency hides it
_MAX_UNREPORTED = 16  # the most measured plans that wait for the stages' reports


class NoWireTimes:
    """The null `WireTimes`, where the number of plans in flight is fixed: nothing is measured.

    Attributes:
        wants_look: always False.
    """

    wants_look = False

    def submitted(self, plan: ScheduledBatch) -> None:
        """Do nothing, since nothing is measured."""

    def crossed(self, plan: ScheduledBatch, seconds: float) -> None:
        """Do nothing, since nothing is measured."""

    def forget(self) -> None:
        """Do nothing, since nothing is measured."""

    def follow(self, now: float, reports: Reports) -> None:
        """Do nothing, since nothing is measured."""


NO_WIRE_TIMES = NoWireTimes()


class WireTimes:
    """Measures the latency and the time per token of the wires (links between hosts) of one pipeline.

    Args:
        depth: gets the measured times.
        num_stages: number of stages; a plan with tokens is evaluated once all of them have reported on it.
        num_links: number of links between hosts that a plan crosses on its way through the stages.

    Attributes:
        wants_look: True: no plan may be issued until the pipe is empty; then a probe is to be sent first.
    """

    def __init__(self, depth: WireDepth, num_stages: int, num_links: int) -> None:
        self.wants_look = False
        self._depth = depth
        self._num_stages = num_stages
        self._num_links = num_links
        self._num_working = 0  # plans with tokens in flight
        self._unqueued: set[int] = set()  # steps in flight that were sent while no plan with tokens was
        self._unreported: dict[int, tuple[int, float]] = {}  # of those that are back: tokens and round trip
        self._latencies: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._per_token: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._busy: dict[int, tuple[int, int]] = {}  # by stage: number of steps so far, nanoseconds for them
        self._mean_s: dict[int, float] = {}  # by stage: mean seconds for a plan, by the newest report
        self._has_looked = False
        self._looked_at = math.inf
        self._next_at = -math.inf  # clock seconds at which `follow` looks again

    def submitted(self, plan: ScheduledBatch) -> None:
        """Record a plan that is sent now.

        Its round trip will be measured if no plan with tokens is in flight.
        """
        num_tokens = plan.total_tokens
        if self._num_working == 0:
            self._unqueued.add(plan.step_id)
            self.wants_look = self.wants_look and num_tokens > 0
        self._num_working += num_tokens > 0

    def crossed(self, plan: ScheduledBatch, seconds: float) -> None:
        """Record that the result of a plan has come, so many seconds after the plan was sent."""
        num_tokens = plan.total_tokens
        self._num_working -= num_tokens > 0
        if plan.step_id not in self._unqueued:
            return
        self._unqueued.remove(plan.step_id)
        if plan.awaited:
            return  # its result may have waited for the store
        if num_tokens == 0:
            self._has_looked = True
            self._latencies.append(seconds)
            self._tell()
            return
        self._unreported[plan.step_id] = num_tokens, seconds
        if len(self._unreported) > _MAX_UNREPORTED:
            del self._unreported[next(iter(self._unreported))]

    def forget(self) -> None:
        """Forget the plans in flight, which will not return, and all samples: the wires may have changed.

        The times that were passed on last stay in force until new ones are measured.
        """
        self.wants_look = True  # a look costs nothing now: the pipe is empty
        self._num_working = 0
        self._unqueued.clear()
        self._unreported.clear()
        self._latencies.clear()
        self._per_token.clear()
        self._busy.clear()

    def follow(self, now: float, reports: Reports) -> None:
        """Learn from the stages' reports, unless that was done less than `FOLLOW_S` ago.

        Args:
            now: clock seconds.
            reports: has the reports of the stages.
        """
        if now < self._next_at:
            return
        self._next_at = now + FOLLOW_S
        if self._unreported:
            self._match(reports.spans())
        self._average(reports.stage_times())
        if self._has_looked:
            self._has_looked, self._looked_at = False, now
        if now - self._looked_at >= max(LOOK_S, LOOK_TRIPS * self._depth.trip_s):
            self.wants_look = True

    def _match(self, reports: Sequence[StageSpans]) -> None:
        """Subtract the time in the stages from the round trips of plans on which all stages have reported."""
        stages: dict[int, dict[int, float]] = defaultdict(dict)  # seconds of each stage, by step
        for report in reports:
            for times in step_times(report, self._unreported):
                stages[times.step][report.stage] = times.seconds
        for step, seconds in stages.items():
            if len(seconds) == self._num_stages:
                num_tokens, round_trip_s = self._unreported.pop(step)
                self._add_sample(num_tokens, round_trip_s - sum(seconds.values()))

    def _add_sample(self, num_tokens: int, wire_s: float) -> None:
        if not self._num_links or not self._latencies or num_tokens < _MIN_TOKENS:
            return
        carrying_s = max(0.0, wire_s - min(self._latencies))
        self._per_token.append(carrying_s / num_tokens / self._num_links)
        self._tell()

    def _tell(self) -> None:
        latency, per_token = min(self._latencies), min(self._per_token, default=0.0)
        self._depth.wire = WireTime(latency, per_token, self._num_links)

    def _average(self, reports: Sequence[StageTimes]) -> None:
        """Pass on the mean time of each stage for a plan, once all stages have reported some plans."""
        for times in reports:
            steps, busy_ns = self._busy.get(times.stage, (0, 0))
            if times.num_steps > steps:
                self._mean_s[times.stage] = (times.busy_ns - busy_ns) / (times.num_steps - steps) / 1e9
            self._busy[times.stage] = times.num_steps, times.busy_ns  # probes are counted too
        if len(self._mean_s) == self._num_stages:
            self._depth.reported = list(self._mean_s.values())


AnyWireTimes = WireTimes | NoWireTimes
