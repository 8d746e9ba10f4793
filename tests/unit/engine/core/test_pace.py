"""A core that an administrator has slowed down: fewer plans, the same tokens, and nothing else is late."""

from __future__ import annotations

import math

import pytest

from fakes import CoreRig, FakeClock
from penstock.engine.core.pace import Pace
from penstock.errors import ErrorInfo
from penstock.operations import Abort, Operation, OperationDone, SlowDown

LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)
TICK_S = 0.05


class SlowRig(CoreRig):
    """Notes when plans with rows, and those without, go out."""

    def __init__(self, num_stages: int = 2, async_depth: int = 1, latency: int | None = 0) -> None:
        super().__init__(
            num_stages=num_stages,
            async_depth=async_depth,
            latency=latency,
            recovers=True,
            stall_timeout_s=3.0,
        )
        self.planned_at: list[float] = []
        self.probed_at: list[float] = []
        self._num_seen = 0

    def operate(self, operation: Operation) -> None:
        for update in self.core.operations.accept((b"", 1), operation, self.core.steps_in_flight[1]):
            self.updates[update.request_id].append(update)

    def finished(self) -> list[OperationDone]:
        return [done for _, done in self.core.operations.take_done()]

    def tick(self, count: int = 1) -> None:
        """Turn as the core's process does: at each event, and when `next_wakeup` says so."""
        for _ in range(count):
            self.step()
            assert self.core.next_wakeup() > self.clock(), "it would spin"
            for plan in self.executor.plans[self._num_seen :]:
                (self.planned_at if plan.rows else self.probed_at).append(self.clock())
            self._num_seen = len(self.executor.plans)
            self.clock.advance(TICK_S)

    def gaps(self) -> list[float]:
        pairs = zip(self.planned_at, self.planned_at[1:], strict=False)
        return [round(after - before, 6) for before, after in pairs]


def add_two(rig: SlowRig) -> None:
    rig.add("greedy", 5, max_tokens=6, ignore_eos=True)
    rig.add("seeded", 11, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)


def assert_exact(rig: SlowRig) -> None:
    for arrival, name in enumerate(rig.requests):
        assert rig.result(name) == rig.expected(name, arrival)


@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (2, 1), (3, 2)])
def test_g4_plans_keep_their_distance_and_nothing_else_is_late(num_stages: int, async_depth: int) -> None:
    """Longer between two plans than the time after which a silent pipe is given up."""
    rig = SlowRig(num_stages, async_depth)
    rig.operate(SlowDown(4000))
    add_two(rig)
    rig.tick(2)
    while not rig.core.is_idle:
        rig.tick()
        stats = rig.core.stats()
        assert stats.plan_interval_ms == 4000
        assert stats.stalled_s <= stats.stall_limit_s
        assert stats.last_result_age_s < 1.5, "probes cross it all the while"
        assert rig.core.loss is None
    assert len(rig.planned_at) > 4
    assert min(rig.gaps()) >= 4.0
    assert max(rig.gaps()) <= 4.0 + 2 * TICK_S, "it takes the interval, no longer"
    assert len(rig.probed_at) >= 3 * len(rig.gaps())
    assert_exact(rig)
    assert [done.error for done in rig.finished()] == [None]


def test_g4_a_plan_that_was_held_back_says_that_the_core_was_late() -> None:
    """Neither did nobody want to run, nor was the pipe full: ranks count it as waiting for the core."""
    rig = SlowRig()
    add_two(rig)
    rig.tick()
    num_planned = len(rig.plans)
    rig.core.operations.pace.interval_ms = 500  # without a plan that proves it, which would take the blame
    while not rig.core.is_idle:
        rig.tick()
    paced = rig.plans[num_planned:]
    assert len(paced) > 2
    assert not any(plan.meta.starved or plan.meta.held for plan in paced)


def test_g4_full_speed_comes_back_at_once() -> None:
    rig = SlowRig()
    rig.operate(SlowDown(10_000))
    add_two(rig)
    rig.tick(20)
    assert len(rig.planned_at) == 1
    rig.operate(SlowDown(0))
    begin = rig.clock()
    while not rig.core.is_idle:
        rig.tick()
    assert rig.planned_at[1] == begin
    assert rig.clock() - begin < 2.0
    assert_exact(rig)


def test_g4_the_pace_outlives_a_stage_and_a_loss_only_delays_the_answer() -> None:
    rig = SlowRig(latency=None)
    add_two(rig)
    rig.tick(2)
    rig.operate(SlowDown(1000))
    rig.core.lose_epoch(LOST)
    rig.tick(3)
    assert rig.finished() == []
    lost = rig.core.steps_in_flight[1]
    rig.rejoin()
    rig.executor.latency = 0
    rig._num_seen = 0
    rig.planned_at.clear()
    while not rig.core.is_idle:
        rig.tick()
    (done,) = rig.finished()
    assert (done.completed_step or 0) >= lost
    assert min(rig.gaps()) >= 1.0
    assert_exact(rig)


def test_g4_an_abort_is_as_prompt_as_ever() -> None:
    rig = SlowRig()
    rig.operate(SlowDown(10_000))
    add_two(rig)
    rig.tick(4)
    rig.finished()
    rig.operate(Abort(["greedy"]))
    assert rig.is_finished("greedy")
    rig.tick(3)
    assert [done.aborted for done in rig.finished()] == [["greedy"]], "a plan without rows proves it"
    assert len(rig.planned_at) == 1


def test_a_wakeup_is_in_the_future_or_never() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    assert (pace.allows_plan, pace.next_wakeup()) == (True, math.inf)
    pace.interval_ms = 500
    assert pace.allows_plan
    pace.planned()
    assert (pace.allows_plan, pace.next_wakeup()) == (False, clock() + 0.5)
    clock.advance(0.5)
    assert (pace.allows_plan, pace.next_wakeup()) == (True, math.inf)
