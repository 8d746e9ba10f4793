"""Operations on a running core: in force from one plan on, and complete when a later one has crossed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fakes import CoreRig
from penstock.batch import ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.errors import ErrorInfo
from penstock.operations import (
    Abort,
    CloseSession,
    FlushCache,
    OpenSession,
    Operation,
    OperationDone,
    Pause,
    PauseMode,
    Resume,
    SlowDown,
    StartProfile,
    StopProfile,
)

LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)


class OperatedRig(CoreRig):
    """Its operations are numbered in the order in which they are asked for."""

    def operate(self, operation: Operation) -> None:
        self._asked = getattr(self, "_asked", 0) + 1
        next_step = self.core.steps_in_flight[1]
        for update in self.core.operations.accept((b"", self._asked), operation, next_step):
            self.updates[update.request_id].append(update)
        self.core.check_invariants()

    def finished(self) -> dict[int, OperationDone]:
        """Those that have come to their end since the last call."""
        return {number: done for (_, number), done in self.core.operations.take_done()}

    def complete(self) -> OperationDone:
        """Step until one operation has come to its end."""
        for _ in range(500):
            self.step(timeout_s=1.0)
            if done := self.finished():
                (found,) = done.values()
                return found
        raise AssertionError("it never was complete")

    def plans_from(self, step: int) -> list[ScheduledBatch]:
        return [plan for plan in self.executor.plans if plan.step_id >= step]


def busy(num_stages: int = 3, async_depth: int = 1, **options: object) -> OperatedRig:
    rig = OperatedRig(num_stages=num_stages, async_depth=async_depth, recovers=True, **options)
    rig.add("greedy", 5, max_tokens=9, ignore_eos=True)
    rig.add("seeded", 11, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    rig.add("long", 23, max_tokens=20, ignore_eos=True)
    return rig


def assert_exact(rig: OperatedRig) -> None:
    rig.run_until_idle()
    for arrival, name in enumerate(rig.requests):
        assert rig.result(name) == rig.expected(name, arrival)


@pytest.mark.parametrize("num_steps", range(0, 30, 3))
@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (2, 1), (3, 2)])
def test_g4_a_pause_keeps_every_request_where_it_is(
    num_stages: int, async_depth: int, num_steps: int
) -> None:
    rig = busy(num_stages, async_depth)
    for _ in range(num_steps):
        rig.step(timeout_s=1.0)
    first = rig.core.steps_in_flight[1]
    rig.operate(Pause("keep"))
    done = rig.complete()
    assert done.accepted_step == first
    assert done.completed_step is not None
    assert done.completed_step >= first
    assert done.error is None
    assert rig.core.num_inflight == 0
    assert [plan.rows for plan in rig.plans_from(first)] == [[]], "one plan without rows proves it"
    assert rig.core.stats().scheduler.paused

    before = {name: rig.tokens(name) for name in rig.requests}
    rig.add("late", 4, max_tokens=3, ignore_eos=True)
    for _ in range(5):
        rig.clock.advance(1.0)
        rig.step(timeout_s=1.0)
    assert {name: rig.tokens(name) for name in before} == before
    assert not any(plan.rows for plan in rig.plans_from(first))
    assert len(rig.plans_from(first)) >= 5, "the stages are probed all the while"

    rig.operate(Resume())
    assert not rig.core.stats().scheduler.paused
    assert rig.complete().error is None
    assert_exact(rig)


def test_g4_a_pause_can_wait_for_those_who_have_started() -> None:
    rig = busy(scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, prefill_chunk=8))
    rig.step(timeout_s=1.0)
    rig.operate(Pause("wait"))
    done = rig.complete()
    assert rig.is_finished("greedy")
    assert rig.is_finished("seeded")
    assert rig.tokens("long") == []
    first_idle = max(plan.step_id for plan in rig.plans if plan.rows) + 1
    assert done.accepted_step < first_idle <= (done.completed_step or 0)
    rig.operate(Resume())
    assert_exact(rig)


def test_g4_who_was_preempted_has_started() -> None:
    """Three requests that do not fit the pool together: each is thrown out and comes back."""
    rig = OperatedRig(num_stages=2, num_blocks=9, block_size=2, latency=None)
    for name in ("a", "b", "c"):
        rig.add(name, 3, max_tokens=9, ignore_eos=True)
    while not rig.core.stats().scheduler.num_preemptions:
        rig.settle()
    rig.operate(Pause("wait"))
    rig.add("late", 3, max_tokens=2, ignore_eos=True)
    rig.complete()
    assert [rig.is_finished(name) for name in ("a", "b", "c", "late")] == [True, True, True, False]
    rig.operate(Resume())
    assert_exact(rig)


@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_g4_a_pause_can_give_up_what_is_there(num_steps: int) -> None:
    rig = busy(latency=None)
    rig.step()
    for _ in range(num_steps):
        rig.settle()
    rig.operate(Pause("abort"))
    for name in rig.requests:
        error = rig.updates[name][-1].error
        assert error is not None
        assert (error.kind, error.code) == ("UnavailableError", "paused")
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks
    counts = {name: len(rig.updates[name]) for name in rig.requests}
    rig.complete()
    assert {name: len(rig.updates[name]) for name in counts} == counts, "what was in flight is dropped"
    rig.add("next", 7, max_tokens=5, ignore_eos=True)
    rig.operate(Resume())
    rig.run_until_idle()
    assert rig.result("next") == rig.expected("next", 3)


def test_g4_a_pause_that_is_not_complete_ends_with_the_resumption() -> None:
    rig = busy()
    rig.step(timeout_s=1.0)
    rig.operate(Pause("wait"))
    rig.operate(Resume())
    (done,) = rig.finished().values()
    assert done.completed_step is None
    assert done.error is not None
    assert done.error.kind == "AbortedError"
    assert_exact(rig)


def test_g4_a_pause_that_another_one_overtakes_says_so() -> None:
    rig = busy()
    rig.step(timeout_s=1.0)
    rig.operate(Pause("wait"))
    rig.operate(Pause("keep"))
    (overtaken,) = rig.finished().values()
    assert overtaken.error is not None
    assert overtaken.error.kind == "AbortedError"
    rig.operate(Pause("keep"))
    assert not rig.finished(), "two of a kind are complete together"
    for _ in range(9):
        rig.step(timeout_s=1.0)
    assert [done.error for done in rig.finished().values()] == [None, None]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_g4_a_stage_that_is_lost_only_delays_it(mode: PauseMode) -> None:
    rig = busy()
    for _ in range(6):
        rig.step(timeout_s=1.0)
    rig.operate(Pause(mode))
    assert rig.core.lose_epoch(LOST) == []
    rig.step()
    assert rig.finished() == {}
    lost = rig.core.steps_in_flight[1]
    rig.rejoin()
    done = rig.complete()
    assert (done.completed_step or 0) >= lost, "a plan of the new epoch proves it"
    assert rig.core.stats().scheduler.paused
    rig.operate(Resume())
    assert_exact(rig)


def test_g4_a_request_that_waits_through_a_pause_times_out_all_the_same() -> None:
    rig = OperatedRig(num_stages=2, scheduler=SchedulerConfig(max_num_seqs=2, queue_timeout_s=30.0))
    rig.operate(Pause("keep"))
    rig.add("r", 4)
    rig.clock.advance(31.0)
    rig.step()
    error = rig.updates["r"][-1].error
    assert error is not None
    assert error.code == "queue_timeout"


@pytest.mark.parametrize("seed", range(30))
def test_g4_pauses_at_any_moment_change_no_token(seed: int) -> None:
    chance = random.Random(seed)
    rig = busy(chance.choice([1, 2, 3]), chance.choice([0, 1, 2]), num_blocks=chance.choice([12, 64]))
    for number in range(60):
        rig.step(timeout_s=chance.choice([0.0, 1.0]))
        what = chance.random()
        if what < 0.15:
            rig.operate(Pause(chance.choice(["keep", "wait"])))
        elif what < 0.35:
            rig.operate(Resume())
        elif what < 0.4:
            rig.core.lose_epoch(LOST)
            rig.rejoin()
        elif what < 0.5:
            rig.add(f"r{number}", 3, max_tokens=4, ignore_eos=True)
    rig.operate(Resume())
    assert_exact(rig)


@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (2, 1), (3, 2)])
def test_g4_an_abort_ends_those_that_it_names_and_nobody_else(
    num_stages: int, async_depth: int, num_steps: int
) -> None:
    """Every rank is delayed: nothing has come back of what is in flight."""
    rig = busy(num_stages, async_depth, latency=None)
    rig.step()
    for _ in range(num_steps):
        rig.settle()
    first = rig.core.steps_in_flight[1]
    rig.operate(Abort(["seeded", "gone"]))
    ended = rig.updates["seeded"][-1]
    assert ended.error is not None
    assert (ended.error.kind, ended.error.code) == ("AbortedError", "aborted_by_administrator")
    counts = len(rig.updates["seeded"])
    done = rig.complete()
    assert done.accepted_step == first <= (done.completed_step or -1)
    assert done.aborted == ["seeded"]
    assert not any("seeded" in [new.request_id for new in plan.new_rows] for plan in rig.plans_from(first))
    rig.run_until_idle()
    assert len(rig.updates["seeded"]) == counts, "what was in flight for it is dropped"
    for arrival, name in ((0, "greedy"), (2, "long")):
        assert rig.result(name) == rig.expected(name, arrival)
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks


def test_g4_an_abort_of_all_reaches_those_that_wait() -> None:
    rig = busy(scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, prefill_chunk=8))
    rig.step(timeout_s=1.0)
    rig.operate(Abort())
    assert sorted(rig.complete().aborted or []) == ["greedy", "long", "seeded"]
    assert rig.core.is_idle
    rig.operate(Abort())
    assert rig.complete().aborted == [], "there is nobody, and that is no error"
    rig.add("next", 7, max_tokens=5, ignore_eos=True)
    rig.run_until_idle()
    assert rig.result("next") == rig.expected("next", 3)


def test_g4_an_id_stands_for_all_sequences_of_a_request() -> None:
    asked = Abort(["a1", "b"])
    found = [name for name in ("a1-0", "a1-12", "a1", "a", "a11-0", "ba-0", "b-1-2") if asked.concerns(name)]
    assert found == ["a1-0", "a1-12", "a1", "b-1-2"]
    choices = [name for name in ("u-0", "u-0/1", "u-0/12", "u-1", "u-1/1") if Abort(["u-0"]).concerns(name)]
    assert choices == ["u-0", "u-0/1", "u-0/12"]


def test_g4_a_stage_that_is_lost_only_delays_an_abort() -> None:
    rig = busy()
    for _ in range(6):
        rig.step(timeout_s=1.0)
    rig.operate(Abort(["long"]))
    rig.core.lose_epoch(LOST)
    rig.step()
    assert rig.finished() == {}
    lost = rig.core.steps_in_flight[1]
    rig.rejoin()
    done = rig.complete()
    assert (done.completed_step or 0) >= lost, "a plan of the new epoch proves it"
    assert done.aborted == ["long"]
    rig.run_until_idle()
    for arrival, name in enumerate(("greedy", "seeded")):
        assert rig.result(name) == rig.expected(name, arrival)


def test_g4_an_abort_does_not_wait_for_a_pause() -> None:
    rig = busy(latency=None)
    rig.step()
    rig.operate(Pause("wait"))
    rig.operate(Abort(["long"]))
    while not (finished := rig.finished()):
        rig.settle()
    assert [done.aborted for done in finished.values()] == [["long"]]
    assert not rig.is_finished("seeded"), "the pause still waits for it"
    rig.operate(Resume())
    rig.executor.latency = 0
    rig.run_until_idle()
    assert rig.result("greedy") == rig.expected("greedy", 0)


@pytest.mark.parametrize("num_steps", [0, 5])
@pytest.mark.parametrize("operation", [StartProfile(), StopProfile()])
def test_g4_ranks_report_at_the_step_at_which_a_profile_begins_or_ends(
    operation: Operation, num_steps: int
) -> None:
    rig = busy()
    for _ in range(num_steps):
        rig.step(timeout_s=1.0)
    first = rig.core.steps_in_flight[1]
    rig.operate(operation)
    done = rig.complete()
    rig.run_until_idle()
    told = [plan.step_id for plan in rig.executor.plans if plan.meta.wants_times]
    assert done.accepted_step == first == told[0], "the same plan tells every rank"
    assert told == [*range(first, told[-1] + 1)]
    assert (done.completed_step or 0) <= told[-1] < max(plan.step_id for plan in rig.plans), "and no longer"
    assert_exact(rig)


def test_g4_a_stage_that_is_lost_does_not_lose_the_beginning_of_a_profile() -> None:
    rig = busy()
    rig.step(timeout_s=1.0)
    rig.operate(StartProfile())
    rig.core.lose_epoch(LOST)
    lost = rig.core.steps_in_flight[1]
    rig.rejoin()
    rig.complete()
    assert next(plan for plan in rig.executor.plans if plan.meta.wants_times).step_id == lost
    assert_exact(rig)


@pytest.mark.parametrize("seed", range(20))
def test_d18_operations_of_all_kinds_at_any_moment_change_no_token(seed: int) -> None:
    """With stages lost in between; every operation ends, proved by a plan that was made under it."""
    chance = random.Random(seed)
    rig = busy(
        chance.choice([1, 2, 3]), chance.choice([0, 1, 2]), num_blocks=chance.choice([12, 64]), eviction="lru"
    )
    kinds: list[Callable[[], Operation]] = [
        lambda: Abort([chance.choice(list(rig.requests))]),
        lambda: SlowDown(chance.choice([0, 1, 300])),
        StartProfile,
        StopProfile,
        FlushCache,
        lambda: Pause(chance.choice(["keep", "wait"])),
        Resume,
        lambda: OpenSession(chance.choice("xy")),
        lambda: CloseSession(chance.choice("xy")),
    ]
    finished: dict[int, OperationDone] = {}
    num_asked = 0
    for number in range(60):
        rig.clock.advance(chance.choice([0.0, 0.1, 0.4]))
        rig.step(timeout_s=chance.choice([0.0, 1.0]))
        what = chance.random()
        if what < 0.4:
            rig.operate(chance.choice(kinds)())
            num_asked += 1
        elif what < 0.47:
            for update in rig.core.lose_epoch(LOST):
                rig.updates[update.request_id].append(update)
            rig.rejoin()
        elif what < 0.57:
            rig.add(f"r{number}", 3, max_tokens=4, ignore_eos=True)
        finished |= rig.finished()
    for operation in (Resume(), SlowDown(0)):
        rig.operate(operation)
    rig.run_until_idle()
    for _ in range(5):
        rig.step(timeout_s=1.0)
    finished |= rig.finished()
    assert len(finished) == num_asked + 2
    aborted = {name for done in finished.values() for name in done.aborted or ()}
    for done in finished.values():
        assert done.error is not None or (done.completed_step or -1) >= done.accepted_step
    for arrival, name in enumerate(rig.requests):
        if name in aborted:
            assert (rig.updates[name][-1].error or LOST).code == "aborted_by_administrator"
            assert rig.expected(name, arrival)[0][: len(rig.tokens(name))] == rig.tokens(name)
        elif rig.finish_reason(name) != "error":  # in the pipe at two losses, with no token between
            assert rig.result(name) == rig.expected(name, arrival)
    assert sum(rig.finish_reason(name) == "error" for name in rig.requests) < len(rig.requests)
    assert not rig.core.operations.wants_times
