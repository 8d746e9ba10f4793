"""The engine core around the scheduler: filling, settling, probes, failures (rows D1-D3, D13, F2, F8, S8)."""

from __future__ import annotations

import math
from itertools import accumulate

import msgspec
import pytest

from core_numbers import core_stats
from fakes import CoreRig
from penstock.batch import StepResult
from penstock.config.engine import SchedulerConfig
from penstock.errors import InvalidRequestError, StageLostError
from penstock.operations import StartProfile


def busy(num_stages: int, async_depth: int, latency: int | None = None) -> CoreRig:
    rig = CoreRig(num_stages=num_stages, async_depth=async_depth, latency=latency, eos_token_ids=())
    for index in range(8):
        rig.add(f"r{index}", 4, max_tokens=6)
    return rig


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_d1_f2_s8_the_pipe_is_filled_to_its_depth_and_no_further(num_stages: int, async_depth: int) -> None:
    config = SchedulerConfig(prefill_chunk=1, max_num_batched_tokens=2)
    rig = CoreRig(
        num_stages=num_stages, async_depth=async_depth, latency=None, scheduler=config, eos_token_ids=()
    )
    rig.add("r", 30, max_tokens=9)
    depth = num_stages + async_depth
    rig.step()
    assert rig.core.num_inflight == depth
    for _ in range(5):
        rig.step()
        assert rig.core.num_inflight == depth
    rig.run_until_idle()
    out = accumulate(1 if kind == "submit" else -1 for kind, _ in rig.executor.events)
    assert max(out) == depth


@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_d2_results_settle_in_order_and_the_freed_slot_is_filled_at_once(
    num_stages: int, async_depth: int
) -> None:
    rig = busy(num_stages, async_depth)
    rig.run_until_idle()
    submitted = [step for kind, step in rig.executor.events if kind == "submit"]
    returned = [step for kind, step in rig.executor.events if kind == "result"]
    assert submitted == returned == list(range(len(submitted)))
    for index in range(8):
        assert rig.result(f"r{index}") == rig.expected(f"r{index}", index)


def test_d2_step_returns_early_while_nothing_has_come() -> None:
    rig = busy(num_stages=2, async_depth=0)
    assert rig.step() == []
    assert rig.step() == []
    assert ("result", 0) not in rig.executor.events


def test_d2_step_blocks_on_the_oldest_only_when_asked_and_only_when_nothing_came() -> None:
    rig = busy(num_stages=2, async_depth=0)
    rig.step()
    assert len(rig.step(timeout_s=1.0)) > 0
    assert rig.executor.events.count(("result", 0)) == 1
    assert ("result", 1) not in rig.executor.events
    rig.executor.release(1)
    rig.step(timeout_s=1.0)
    assert ("result", 2) not in rig.executor.events, "it waited although a result had come"


def test_d2_several_results_at_once_are_all_settled_before_the_pipe_is_filled() -> None:
    rig = busy(num_stages=2, async_depth=0)
    rig.step()
    rig.settle()
    assert rig.core.num_inflight == 2
    events = len(rig.executor.events)
    rig.settle(2)
    kinds = [kind for kind, _ in rig.executor.events[events:]]
    assert kinds == ["result", "result", "submit", "submit"]


def test_d2_it_drains_when_there_is_nothing_to_schedule() -> None:
    rig = busy(num_stages=3, async_depth=1)
    for index in range(8):
        rig.abort(f"r{index}")
    assert not rig.core.is_idle or rig.core.num_inflight == 0
    rig.run_until_idle()
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks


def test_f8_idle_only_when_every_slot_is_empty() -> None:
    rig = CoreRig(num_stages=2, latency=None)
    assert rig.core.is_idle
    rig.add("r", 3, max_tokens=4)
    assert not rig.core.is_idle
    rig.step()
    rig.abort("r")
    assert not rig.core.is_idle, "its step is in flight"
    rig.settle()
    assert rig.core.is_idle


def test_d13_an_abort_between_result_and_settling_is_heard_first() -> None:
    rig = busy(num_stages=2, async_depth=0)
    rig.step()
    rig.executor.release(2)
    assert rig.core.abort("r0")
    updates = rig.step()
    assert "r0" not in {update.request_id for update in updates}
    assert updates


def test_the_steps_in_flight_move_whenever_something_is_settled_or_submitted() -> None:
    config = SchedulerConfig(prefill_chunk=2)
    rig = CoreRig(num_stages=2, latency=None, scheduler=config)
    rig.add("r", 12, max_tokens=1)
    assert rig.core.steps_in_flight == (0, 0)
    assert rig.step() == []
    assert rig.core.steps_in_flight == (0, 2)
    rig.step()
    assert rig.core.steps_in_flight == (0, 2), "nothing has happened"
    assert rig.settle() == [], "a prompt chunk brings no update"
    assert rig.core.steps_in_flight == (1, 3), "and yet the pipe has moved, at the same fill"
    assert rig.core.num_inflight == 2


# Probes


def test_the_first_probe_goes_at_once_and_then_one_a_second() -> None:
    rig = CoreRig(num_stages=2)
    probed_at = []
    for _ in range(100):
        rig.step()
        if len(rig.executor.plans) > len(probed_at):
            probed_at.append(rig.clock.now)
        rig.clock.advance(0.1)
    assert 9 <= len(probed_at) <= 10
    assert probed_at[0] == 100.0
    assert all(not plan.rows and not plan.need_sampled for plan in rig.executor.plans)


def test_a_probe_that_does_not_come_back_is_not_followed_by_another() -> None:
    rig = CoreRig(latency=None)
    for _ in range(5):
        rig.step()
        rig.clock.advance(3.0)
    assert rig.core.num_inflight == 1
    assert rig.core.stats().stalled_s == 15.0
    assert rig.core.stats().last_result_age_s == math.inf
    rig.settle()
    assert rig.core.stats().last_result_age_s == 0.0
    assert rig.core.stats().stalled_s == 0.0


def test_r2_a_step_that_never_returns_ends_every_request_in_time() -> None:
    rig = CoreRig(latency=None, stall_timeout_s=30.0)
    rig.add("a", 5, max_tokens=3)
    rig.step()
    rig.clock.advance(30.0)
    assert rig.step() == []
    assert rig.core.next_wakeup() == rig.clock.now
    rig.clock.advance(0.1)
    (update,) = rig.step()
    assert update.finish_reason == "error"
    assert update.error is not None
    assert update.error.kind == "WaitTimeoutError"
    assert "step 0 has been in the stages for 30 s. Requests of the step: a." in update.error.message
    assert rig.core.failure == update.error


def test_d9_a_large_plan_may_take_longer_than_a_probe() -> None:
    rig = CoreRig(latency=None)
    rig.step()
    assert rig.core.stats().stall_limit_s == 5.0
    rig.settle()
    rig.add("a", 40, max_tokens=3)
    rig.step()
    assert rig.core.stats().stall_limit_s > 5.0


def test_no_probe_while_there_is_work() -> None:
    rig = busy(num_stages=2, async_depth=0)
    while not rig.core.is_idle:
        rig.clock.advance(2.0)
        rig.step(timeout_s=1.0)
    assert all(plan.rows for plan in rig.executor.plans)


def test_f8_an_operation_that_waits_for_a_plan_brings_no_probe_beside_plans_in_flight() -> None:
    """The pipe has room for one, but the result of a plan in flight will tell as much."""
    rig = CoreRig(num_stages=2, latency=None)
    rig.add("r", 3, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.core.operate((b"", 1), StartProfile())
    assert rig.core.operations.wants_plan
    assert rig.core.num_inflight == 1
    rig.step()
    assert rig.core.num_inflight == 1
    rig.run_until_idle()
    assert all(plan.rows for plan in rig.executor.plans)
    assert rig.result("r") == rig.expected("r")


def test_f8_a_request_that_comes_while_a_probe_is_out_starts_at_once() -> None:
    rig = CoreRig(num_stages=2, latency=None)
    rig.step()
    rig.add("r", 3, max_tokens=2)
    rig.step()
    assert [bool(plan.rows) for plan in rig.executor.plans] == [False, True]
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r")


def test_next_wakeup_is_the_next_probe_or_expiry() -> None:
    config = SchedulerConfig(max_num_seqs=1, queue_timeout_s=10.0)
    rig = CoreRig(latency=None, scheduler=config)
    assert rig.core.next_wakeup() <= rig.clock.now
    rig.step()
    assert rig.core.next_wakeup() == math.inf, "a probe is out: only an event can bring work"
    rig.settle()
    assert rig.core.next_wakeup() == rig.clock.now + 1.0
    rig.add("a", 3, max_tokens=2)
    rig.add("b", 3, max_tokens=2)
    rig.step()
    assert rig.core.next_wakeup() == rig.clock.now + 10.0
    rig.run_until_idle()
    assert rig.core.next_wakeup() == rig.clock.now + 1.0


# Refusals and failures


def test_a_refused_request_leaves_nothing_behind() -> None:
    rig = CoreRig(max_model_len=8)
    with pytest.raises(InvalidRequestError, match="has 8 tokens; the model takes 8"):
        rig.add("r", 8)
    assert rig.core.is_idle
    assert not rig.abort("r")


def check_everybody_failed(rig: CoreRig, message: str) -> None:
    for request_id, updates in rig.updates.items():
        assert updates[-1].finish_reason == "error", request_id
        assert updates[-1].error is not None
        assert message in updates[-1].error.message
    assert rig.core.is_idle
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks
    assert rig.step(timeout_s=1.0) == []
    assert rig.core.next_wakeup() == math.inf


def test_a_lost_stage_ends_every_request_with_the_first_cause() -> None:
    rig = busy(num_stages=2, async_depth=1)
    rig.step(timeout_s=1.0)
    rig.executor.lose_stage(1, "killed by signal 9")
    rig.step()
    check_everybody_failed(rig, "stage 1 was lost: killed by signal 9")
    assert rig.core.failure is not None
    assert rig.core.failure.stage == 1
    with pytest.raises(StageLostError, match="killed by signal 9"):
        rig.add("late", 3)


def test_a_stage_lost_at_submit_keeps_the_tokens_that_had_come() -> None:
    rig = busy(num_stages=1, async_depth=0)
    rig.step()
    rig.executor.release(1)
    shown = rig.executor.poll_results(0.0)
    rig.executor.poll_results = lambda timeout_s: [shown.pop()] if shown else []  # type: ignore[method-assign]
    rig.executor.lose_stage(0, "out of memory")
    updates = rig.step()
    assert sum(len(update.token_ids) for update in updates) == 8
    check_everybody_failed(rig, "out of memory")


def test_the_loop_may_give_the_pipeline_up_itself() -> None:
    rig = busy(num_stages=2, async_depth=0)
    rig.step()
    updates = rig.core.fail(StageLostError("stage 0 hangs.", stage=0).info())
    assert {update.finish_reason for update in updates} == {"error"}
    assert len(updates) == 8
    assert rig.step() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_id": 1}, "expected the result of step 0, received that of step 1 (1 in flight)"),
        ({"epoch": 3}, "the result of step 0: expected (epoch, digest, rows) (0, "),
        ({"token_ids": [[1]]}, ", 1). Requests of the step: r0, r1, "),
        ({"digest": 77}, "found (0, 77, 8). Requests of the step: r0, r1, "),
    ],
)
def test_dr1_a_result_that_is_not_ours_ends_the_epoch(change: dict[str, object], message: str) -> None:
    rig = busy(num_stages=2, async_depth=0)
    rig.step()
    (result,) = rig.executor.poll_results(1.0)
    wrong = msgspec.structs.replace(result, **change)
    rig.executor.poll_results = lambda timeout_s: [wrong]  # type: ignore[method-assign]
    rig.step()
    check_everybody_failed(rig, message)


def test_dr1_a_result_nobody_asked_for() -> None:
    rig = CoreRig()
    rig.add("r", 3)
    rig.executor.poll_results = lambda timeout_s: [StepResult(step_id=0)]  # type: ignore[method-assign]
    rig.step()
    check_everybody_failed(rig, "expected the result of step 0, received that of step 0 (0 in flight)")


# Numbers


def test_stats_count_requests_blocks_and_tokens() -> None:
    rig = CoreRig(num_stages=2, latency=None, eos_token_ids=(), scheduler=SchedulerConfig(max_num_seqs=2))
    for name in ("a", "b", "c"):
        rig.add(name, 5, max_tokens=3)
    rig.step()
    rig.settle()
    rig.clock.advance(0.5)
    stats = rig.core.stats()
    assert stats == core_stats(
        num_running=2,
        num_waiting=1,
        num_blocks=64,
        free_blocks=60,
        num_preemptions=0,
        step_id=3,
        inflight=2,
        last_result_age_s=0.5,
        stalled_s=0.5,
        stall_limit_s=5.05,
        epoch=0,
        generated_tokens=2,
        prompt_tokens=10,
        micro_batches=2,
        fill_plans=2,
    )
    rig.run_until_idle()
    stats = rig.core.stats()
    assert (stats.scheduler.generated_tokens, stats.scheduler.prompt_tokens, stats.scheduler.num_running) == (
        9,
        15,
        0,
    )


def test_d6_a_plan_says_why_it_was_not_issued_earlier() -> None:
    rig = CoreRig(num_stages=2, latency=None, eos_token_ids=())
    rig.add("alone", 5, max_tokens=20)
    rig.step()
    for _ in range(4):
        rig.settle()
    assert [(plan.meta.starved, plan.meta.held) for plan in rig.executor.plans] == [(True, False)] * 5
    rig.add("other", 5, max_tokens=20)
    for _ in range(8):
        rig.settle()
    assert [(plan.meta.starved, plan.meta.held) for plan in rig.executor.plans[-6:]] == [(False, True)] * 6


def test_d6_plans_that_fill_an_empty_pipe_are_neither_starved_nor_held() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk=8)
    rig = CoreRig(num_stages=2, latency=None, eos_token_ids=(), scheduler=config)
    for name in "abcd":
        rig.add(name, 8, max_tokens=2)
    rig.step()
    assert [(plan.meta.starved, plan.meta.held) for plan in rig.executor.plans] == [
        (True, False),
        (False, False),
    ]
