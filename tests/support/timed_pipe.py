"""A pipe whose stages take time of a clock that is set by hand: what a layout yields a second.

Every stage computes one plan at a time, in order. Hidden states take a hop to the next stage, plans and
results a hop from and to the core. A window that is void, as a later plan at the stage has said or as the
last stage knows, takes no time where it has not begun.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from fakes import FakeClock, FakeExecutor
from penstock.batch import GUESSED, ScheduledBatch, StepResult


class TimedPipe(FakeExecutor):
    """Results come when the stages would have computed them.

    Args:
        clock: is set forward while somebody waits for a result.
        seconds: of each stage for a plan.
        hop_s: from a stage to the next.
        core_hop_s: from the core to each stage, and from the last one back.

    Attributes:
        computed: steps that each stage has computed, in order.
    """

    def __init__(
        self,
        *,
        clock: FakeClock,
        seconds: Callable[[int, ScheduledBatch], float],
        hop_s: float = 0.0,
        core_hop_s: float = 0.0,
        **given: Any,
    ) -> None:
        super().__init__(**{**given, "latency": None})
        self._clock = clock
        self._seconds = seconds
        self._hop_s, self._core_hop_s = hop_s, core_hop_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._sent: list[tuple[float, ScheduledBatch]] = []  # when each plan comes to the stages
        num_stages = given["num_stages"]
        self._queues: list[deque[ScheduledBatch]] = [deque() for _ in range(num_stages)]
        self._is_busy = [False] * num_stages
        self._returned = -1  # step whose samples have come back
        self._void: dict[int, bool] = {}  # by step: whether the last stage drops it
        self.computed: list[list[int]] = [[] for _ in range(num_stages)]

    def submit_plan(self, plan: ScheduledBatch) -> int:
        digest = super().submit_plan(plan)
        comes_at = self._clock() + self._core_hop_s
        self._sent.append((comes_at, plan))
        self._at(comes_at, lambda: self._arrive(0, plan))
        return digest

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        deadline = self._clock() + timeout_s
        self._run_until(self._clock())
        while timeout_s > 0 and not self._num_released and self._events and self._events[0][0] <= deadline:
            self._clock.now = max(self._clock.now, self._events[0][0])
            self._run_until(self._clock())
        return super().poll_results(0.0)

    def _result(self, plan: ScheduledBatch, tokens: list[list[int]]) -> StepResult:
        self._void[plan.step_id] = bool(tokens) and not any(tokens)
        return super()._result(plan, tokens)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, event))

    def _run_until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            _, _, event = heapq.heappop(self._events)
            event()

    def _arrive(self, stage: int, plan: ScheduledBatch) -> None:
        self._queues[stage].append(plan)
        self._begin(stage)

    def _begin(self, stage: int) -> None:
        queue, is_last = self._queues[stage], stage == len(self._queues) - 1
        if self._is_busy[stage] or not queue:
            return
        if not is_last and queue[0].consume_through > self._returned:
            return  # until the samples are there
        plan = queue.popleft()
        self._is_busy[stage] = True
        took = 0.0
        if plan.rows and not self._passes(stage, plan):
            took = self._seconds(stage, plan)
            self.computed[stage].append(plan.step_id)
        self._at(self._now() + took, lambda: self._end(stage, plan))

    def _end(self, stage: int, plan: ScheduledBatch) -> None:
        self._is_busy[stage] = False
        if stage + 1 < len(self._queues):
            self._at(self._now() + self._hop_s, lambda: self._arrive(stage + 1, plan))
        else:
            self._at(self._now() + self._core_hop_s, lambda: self._return(plan.step_id))
        self._begin(stage)

    def _return(self, step_id: int) -> None:
        """The result is at the core, and the samples are at the stages."""
        self.release(1)
        self._returned = step_id
        for stage in range(len(self._queues) - 1):
            self._begin(stage)

    def _passes(self, stage: int, plan: ScheduledBatch) -> bool:
        """Whether the window is known to be void when it would be computed."""
        if GUESSED not in plan.token_from:
            return False
        if stage == len(self._queues) - 1:
            return self._void[plan.step_id]
        return any(
            comes_at <= self._now() and rewound.row in plan.rows and rewound.step < plan.step_id
            for comes_at, later in self._sent
            if later.step_id > plan.step_id
            for rewound in later.rewound
        )

    def _now(self) -> float:
        return self._clock()
