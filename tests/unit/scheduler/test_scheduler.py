"""The scheduler's decisions, read off the plans that it issues."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from fakes import CoreRig, RankReplica
from penstock.batch import KNOWN, ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.errors import InvalidRequestError, OverloadedError, StageLostError
from penstock.request import GenerationRequest, SamplingParams, StructuredOutputs
from penstock.scheduler.updates import row_error


def rows_of(rig: CoreRig, request_id: str) -> list[tuple[int, int, int, bool]]:
    """(step, start, tokens, sampled) of each plan row of a request that was never preempted."""
    entry = next(p for p in rig.plans if any(new.request_id == request_id for new in p.new_rows))
    row = next(new.row for new in entry.new_rows if new.request_id == request_id)
    found = []
    for plan in rig.plans[rig.plans.index(entry) :]:
        if plan is not entry and row in [*plan.freed_rows, *(new.row for new in plan.new_rows)]:
            break
        if row in plan.rows:
            i = plan.rows.index(row)
            found.append((plan.step_id, plan.start_positions[i], plan.num_tokens[i], plan.need_sampled[i]))
    return found


# One request


@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (1, 2), (2, 0), (2, 1), (4, 0), (4, 2)])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_d11_exactly_max_tokens_and_no_step_beyond(
    num_stages: int, async_depth: int, max_tokens: int
) -> None:
    rig = CoreRig(num_stages=num_stages, async_depth=async_depth, latency=None, eos_token_ids=())
    rig.add("r", 5, max_tokens=max_tokens)
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert len(rig.tokens("r")) == max_tokens
    assert rig.num_dropped == 0, "a decode was scheduled whose sample could not be used"
    assert sum(plan.total_tokens for plan in rig.plans) == 5 + max_tokens - 1


def test_model_length_ends_a_request_without_overshoot() -> None:
    rig = CoreRig(async_depth=2, latency=None, eos_token_ids=(), max_model_len=9)
    rig.add("r", 5, max_tokens=None)
    rig.run_until_idle()
    assert len(rig.tokens("r")) == 4
    assert rig.finish_reason("r") == "length"
    assert rig.num_dropped == 0


def test_a_chunk_that_ends_exactly_at_the_prompts_end_samples() -> None:
    rig = CoreRig(scheduler=SchedulerConfig(prefill_chunk=4))
    rig.add("r", 8, max_tokens=2, ignore_eos=True)
    rig.run_until_idle()
    assert rows_of(rig, "r") == [(0, 0, 4, False), (1, 4, 4, True), (2, 8, 1, True)]
    assert rig.result("r") == rig.expected("r")


def test_e8_prefill_chunks_go_in_consecutive_steps_without_waiting() -> None:
    rig = CoreRig(num_stages=4, latency=None, scheduler=SchedulerConfig(prefill_chunk=5))
    rig.add("r", 17, max_tokens=2)
    rig.step()
    assert rows_of(rig, "r") == [(0, 0, 5, False), (1, 5, 5, False), (2, 10, 5, False), (3, 15, 2, True)]


def test_e8_a_lone_request_decodes_again_as_soon_as_its_token_is_back() -> None:
    rig = CoreRig(num_stages=3, latency=None)
    rig.add("r", 2, max_tokens=3, ignore_eos=True)
    rig.step()
    assert len(rig.plans) == 1, "its token is still in the pipe"
    rig.settle()
    assert len(rig.plans) == 2
    assert rig.plans[1].token_from == [0]
    assert rig.plans[1].consume_through == 0


def test_e8_with_plans_ahead_a_decode_names_a_step_whose_id_is_not_known_yet() -> None:
    rig = CoreRig(num_stages=2, async_depth=1, latency=None)
    for name in ("a", "b"):
        rig.add(name, 2, max_tokens=6, ignore_eos=True)
        rig.step()  # one plan each, so that the two are a step apart
    assert [plan.step_id for plan in rig.plans] == [0, 1, 2]
    ahead = rig.plans[2]
    assert ahead.token_from == [0], "step 0 has not returned, but 2 - 0 >= P"
    assert ahead.consume_through == 0
    rig.run_until_idle()
    assert [rig.result(name) for name in ("a", "b")] == [rig.expected("a", 0), rig.expected("b", 1)]


def test_a_request_says_how_long_it_queued_in_its_first_update_only() -> None:
    rig = CoreRig()
    rig.add("r", 2, max_tokens=3, ignore_eos=True)
    rig.clock.advance(2.5)
    rig.run_until_idle()
    assert [update.queue_seconds for update in rig.updates["r"]] == [2.5, None, None]


@pytest.mark.parametrize(("logprobs", "present"), [(None, False), (0, True)])
def test_logprobs_reach_the_update(logprobs: int | None, present: bool) -> None:
    rig = CoreRig()
    rig.add("r", 2, max_tokens=1, logprobs=logprobs)
    rig.run_until_idle()
    (update,) = rig.updates["r"]
    assert (update.logprobs is not None) == present
    if update.logprobs is not None:
        assert update.logprobs[0].top_ids == update.token_ids


def test_d11_the_stop_id_is_named_and_sent() -> None:
    rig = CoreRig(eos_token_ids=())
    rig.add("free", [5, 6], max_tokens=6)
    rig.run_until_idle()
    third = rig.tokens("free")[2]
    rig.add("stopped", [5, 6], max_tokens=6, stop_token_ids=[third])
    rig.run_until_idle()
    last = rig.updates["stopped"][-1]
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == ("stop", third, [third])
    assert rig.result("stopped") == rig.expected("stopped", 1)
    assert rig.updates["free"][-1].stop_token_id is None


# Several requests


def test_d4_decodes_come_first_then_chunks_within_the_token_budget() -> None:
    config = SchedulerConfig(max_num_batched_tokens=12, prefill_chunk=5, max_num_seqs=4)
    rig = CoreRig(scheduler=config, eos_token_ids=())
    rig.add("a", 3, max_tokens=20)
    rig.step()
    for name, length in (("b", 9), ("c", 9)):
        rig.add(name, length, max_tokens=20)
    rig.step()
    mixed = rig.plans[1]
    assert mixed.num_tokens == [1, 5, 5]
    assert mixed.token_from == [0, KNOWN, KNOWN]
    rig.run_until_idle()
    assert all(plan.total_tokens <= 12 for plan in rig.plans)
    for plan in rig.plans:
        known = [source == KNOWN for source in plan.token_from]
        assert known == sorted(known), "a chunk stands before a decode"


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_d4_prefill_and_decode_both_go_on_when_plans_are_small(tokens: int) -> None:
    config = SchedulerConfig(max_num_batched_tokens=tokens, prefill_chunk=64, max_num_seqs=6)
    rig = CoreRig(scheduler=config, eos_token_ids=())
    for index in range(4):
        rig.add(f"old{index}", 1, max_tokens=40)
    for _ in range(10):
        rig.step()
    generated = {name: len(rig.tokens(name)) for name in rig.updates}
    rig.add("new", 30, max_tokens=2)
    for _ in range(60):
        rig.step()
        if rig.updates["new"]:
            break
    assert rig.updates["new"], "the prompt starved"
    assert all(len(rig.tokens(name)) > count or rig.is_finished(name) for name, count in generated.items()), (
        "a decode starved"
    )


def test_chunks_do_not_depend_on_what_else_runs() -> None:
    """The bits of a result depend on its chunks; so these depend on the prompt alone."""
    config = SchedulerConfig(max_num_batched_tokens=16, prefill_chunk=7, max_num_seqs=8)
    alone = CoreRig(scheduler=config, eos_token_ids=())
    crowded = CoreRig(scheduler=config, eos_token_ids=(), num_stages=3, async_depth=1, latency=2)
    for index in range(6):
        crowded.add(f"other{index}", 3 * index + 1, max_tokens=9)
        crowded.step()
    for rig in (alone, crowded):
        rig.add("r", 40, max_tokens=2)
        rig.run_until_idle()
    shapes = [[row[1:] for row in rows_of(rig, "r")] for rig in (alone, crowded)]
    assert shapes[0] == shapes[1]
    assert [count for _, count, _ in shapes[0]] == [7, 7, 7, 7, 7, 5, 1]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("async_depth", [0, 1, 2])
@pytest.mark.parametrize("num_requests", [4, 7, 12])
def test_e8_micro_batches_become_and_stay_equal(num_stages: int, async_depth: int, num_requests: int) -> None:
    rig = CoreRig(
        num_stages=num_stages,
        async_depth=async_depth,
        latency=num_stages + async_depth - 1,  # a full pipe: a result comes as its slot is needed
        num_blocks=200,
        eos_token_ids=(),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    for index in range(num_requests):
        rig.add(f"r{index}", 3, max_tokens=50)
    for _ in range(60):
        rig.step(timeout_s=1.0)
    sizes = [len(plan.rows) for plan in rig.plans[20:]]
    assert len(sizes) > 20
    share = -(-num_requests // num_stages)
    num_groups = -(-num_requests // share)
    assert max(sizes) == share
    for start in range(len(sizes) - num_groups + 1):
        assert sum(sizes[start : start + num_groups]) == num_requests, "a request misses a trip"


def test_e8_each_request_decodes_once_per_trip_in_a_full_pipe() -> None:
    rig = CoreRig(num_stages=3, latency=2, num_blocks=200, eos_token_ids=())
    for index in range(6):
        rig.add(f"r{index}", 3, max_tokens=40)
    for _ in range(60):
        rig.step(timeout_s=1.0)
    for index in range(6):
        steps = [step for step, *_ in rows_of(rig, f"r{index}")][8:]
        assert {after - before for before, after in pairwise(steps)} == {3}


def test_a_burst_of_prompts_fills_the_pipe_instead_of_one_plan() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, prefill_chunk=8, max_num_seqs=8)
    rig = CoreRig(num_stages=2, latency=None, scheduler=config)
    for index in range(8):
        rig.add(f"r{index}", 8, max_tokens=2)
    rig.step()
    assert [plan.total_tokens for plan in rig.plans] == [32, 32]


def test_requests_start_in_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    rig = CoreRig(num_blocks=6, block_size=4, max_model_len=24, eos_token_ids=())
    rig.add("a", 8, max_tokens=6)
    rig.add("big", 20, max_tokens=2)
    rig.add("small", 1, max_tokens=2)
    rig.run_until_idle()
    started = [new.request_id for plan in rig.plans for new in plan.new_rows]
    assert started == ["a", "big", "small"]
    assert rig.core.stats().scheduler.num_preemptions == 0


# The end of a request


def test_a_request_that_ends_while_later_steps_of_it_are_in_flight() -> None:
    rig = CoreRig(async_depth=2, latency=None, eos_token_ids=())
    rig.add("free", [4, 5], max_tokens=8)
    rig.run_until_idle()
    stop = rig.tokens("free")[1]
    rig.add("r", [4, 5], max_tokens=8, stop_token_ids=[stop])
    rig.step()
    assert rig.core.num_inflight == 3
    rig.settle(2)
    assert rig.finish_reason("r") == "stop"
    assert rig.core.num_inflight == 1, "its last step is still under way"
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks, "its blocks are not"
    assert rig.settle() == [], "no token leaks"
    assert rig.core.is_idle
    assert rig.result("r") == rig.expected("r", 1)
    assert rig.num_dropped == 1


def test_e7_a_row_freed_and_used_again_within_a_trip_gets_a_higher_generation() -> None:
    config = SchedulerConfig(max_num_seqs=1)
    rig = CoreRig(async_depth=2, latency=None, eos_token_ids=(), scheduler=config)
    rig.add("free", [4, 5], max_tokens=8)
    rig.run_until_idle()
    stop = rig.tokens("free")[1]
    rig.add("first", [4, 5], max_tokens=8, stop_token_ids=[stop])
    rig.add("second", [6, 7], max_tokens=4)
    rig.step()
    rig.settle(2)
    plan = next(plan for plan in rig.plans if plan.new_rows and plan.new_rows[0].request_id == "second")
    assert ("result", plan.step_id - 1) not in rig.executor.events, "the row's former step is in flight"
    assert plan.freed_rows == [0]
    assert [(new.row, new.generation, new.request_id) for new in plan.new_rows] == [(0, 2, "second")]
    rig.run_until_idle()
    assert rig.result("second") == rig.expected("second", 2)


def test_freed_rows_wait_for_the_next_plan() -> None:
    rig = CoreRig()
    rig.add("a", 3, max_tokens=1)
    rig.run_until_idle()
    assert rig.executor.replica.rows, "nothing has told the ranks yet"
    rig.clock.advance(5.0)
    rig.step()
    probe = rig.executor.plans[-1]
    assert (probe.rows, probe.freed_rows) == ([], [0])
    rig.step(timeout_s=1.0)
    rig.add("b", 3, max_tokens=1)
    rig.run_until_idle()
    assert rig.plans[-1].freed_rows == [], "announced once"
    assert rig.plans[-1].new_rows[0].generation == 1


def test_all_requests_may_end_in_the_same_step() -> None:
    rig = CoreRig(num_stages=2, async_depth=1, eos_token_ids=())
    for index in range(5):
        rig.add(f"r{index}", 3, max_tokens=1)
    updates = rig.step(timeout_s=1.0)
    assert [update.finish_reason for update in updates] == ["length"] * 5
    assert rig.core.is_idle
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks


def test_a_row_of_nan_logits_ends_its_own_request_only() -> None:
    rig = CoreRig(eos_token_ids=())
    for name in ("a", "bad", "c"):
        rig.add(name, 3, max_tokens=5)
    rig.executor.fail_rows = {2: [1]}
    rig.run_until_idle()
    last = rig.updates["bad"][-1]
    assert (last.finish_reason, last.token_ids) == ("error", [])
    assert last.error is not None
    assert last.error.kind == "NumericalError"
    assert "output token 2 of request bad (step 2)" in last.error.message
    assert len(rig.tokens("bad")) == 2
    assert rig.result("a") == rig.expected("a", 0)
    assert rig.result("c") == rig.expected("c", 2)


def test_r10_a_row_whose_constraints_leave_no_token_ends_with_the_reason() -> None:
    rig = CoreRig(eos_token_ids=())
    for name in ("a", "bad"):
        rig.add(name, 3, max_tokens=5)
    rig.executor.fail_rows = {2: [1]}
    rig.executor.unmet = "its pattern grows too large"
    rig.run_until_idle()
    error = rig.updates["bad"][-1].error
    assert error is not None
    assert (error.kind, error.code, error.param) == ("ConstraintError", "constraint_unmet", None)
    assert "output token 2 of request bad (step 2): its pattern grows too large." in error.message
    assert len(rig.tokens("bad")) == 2
    assert rig.result("a") == rig.expected("a", 0)


@pytest.mark.parametrize(
    ("constraints", "remedy", "param"),
    [
        ({"structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs", "structured_outputs"),
        ({"bad_word_ids": [[3]]}, "bad_words", "bad_words"),
        ({"allowed_token_ids": [3], "min_tokens": 2}, "allowed_token_ids", "allowed_token_ids"),
        ({"allowed_token_ids": [3], "min_tokens": 3}, "allowed_token_ids or min_tokens", None),
        ({"allowed_token_ids": [3], "bad_word_ids": [[3]]}, "allowed_token_ids or bad_words", None),
    ],
)
def test_r10_constraints_that_leave_no_token_are_named(
    constraints: dict[str, Any], remedy: str, param: str | None
) -> None:
    sampling = SamplingParams(max_tokens=5, **constraints)
    request = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=sampling)
    rig = CoreRig(eos_token_ids=(7,))
    rig.scheduler.add_request(request)
    (state,) = rig.scheduler._queues
    state.token_ids += [8, 8]
    error = row_error(state, 4, "its constraints allow no token")
    assert (error.remedy, error.param) == (f"Loosen {remedy}.", param)


# Abort (rows D13, DR7)


def test_d13_abort_while_waiting() -> None:
    rig = CoreRig(scheduler=SchedulerConfig(max_num_seqs=1))
    rig.add("a", 3, max_tokens=4, ignore_eos=True)
    rig.add("b", 3, max_tokens=4)
    rig.step()
    assert rig.abort("b")
    rig.run_until_idle()
    assert rig.updates["b"] == []
    assert rig.result("a") == rig.expected("a")


@pytest.mark.parametrize("results_before", [0, 1, 2, 3])
@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
def test_d13_dr7_abort_in_any_slot(victim: str, results_before: int) -> None:
    rig = CoreRig(num_stages=3, async_depth=1, latency=None, eos_token_ids=())
    for index, name in enumerate("abcd"):
        rig.add(name, 2 + index, max_tokens=6)
        rig.step()
    rig.settle(results_before)
    held = next(r.arrival for r in rig.scheduler._queues if r.request_id == victim)
    sent = rig.tokens(victim)
    assert rig.abort(victim)
    assert held not in rig.allocator.owners(), "its blocks are free at once"
    assert not rig.abort(victim), "it has gone"
    rig.run_until_idle()
    assert rig.tokens(victim) == sent, "a token came after the abort"
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks
    for arrival, name in enumerate("abcd"):
        if name != victim:
            assert rig.result(name) == rig.expected(name, arrival)


def test_d13_abort_during_prefill() -> None:
    rig = CoreRig(num_stages=2, latency=None, scheduler=SchedulerConfig(prefill_chunk=4))
    rig.add("r", 20, max_tokens=4)
    rig.step()
    assert rig.abort("r")
    rig.run_until_idle()
    assert rig.updates["r"] == []
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks


def test_d13_the_same_id_may_come_again_while_old_steps_are_in_flight() -> None:
    rig = CoreRig(async_depth=2, latency=None, eos_token_ids=())
    rig.add("r", [9, 8, 7], max_tokens=6)
    rig.step()
    assert rig.core.num_inflight == 3
    rig.abort("r")
    rig.add("r", [3, 4], max_tokens=6)
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r", 1)


def test_d13_abort_of_nobody() -> None:
    assert not CoreRig().abort("ghost")


# Preemption (row D10)


def crowd(**rig_args: Any) -> CoreRig:
    """Three requests that together outgrow the pool."""
    rig = CoreRig(num_blocks=9, block_size=2, max_model_len=18, eos_token_ids=(), **rig_args)
    for index in range(3):
        rig.add(f"r{index}", 3, max_tokens=13)
    return rig


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_d10_preempted_requests_get_the_same_tokens(num_stages: int, async_depth: int) -> None:
    rig = crowd(num_stages=num_stages, async_depth=async_depth, latency=None)
    rig.run_until_idle()
    assert rig.core.stats().scheduler.num_preemptions > 0
    for arrival in range(3):
        assert rig.result(f"r{arrival}") == rig.expected(f"r{arrival}", arrival)
    finished = [name for name in ("r0", "r1", "r2") if rig.is_finished(name)]
    assert finished == ["r0", "r1", "r2"]


def test_d10_a_resumed_request_enters_with_all_its_tokens() -> None:
    rig = crowd()
    rig.run_until_idle()
    entries = [new for plan in rig.plans for new in plan.new_rows if new.request_id == "r2"]
    assert len(entries) > 1, "it was preempted"
    resumed = entries[-1]
    known = rig.requests["r2"].prompt_token_ids + rig.tokens("r2")
    assert resumed.prompt_len == 3
    assert 3 < len(resumed.token_ids) < len(known)
    assert resumed.token_ids == known[: len(resumed.token_ids)]
    assert resumed.sampling == entries[0].sampling, "same seed, same tokens"


def preempt_with_results_in_flight() -> CoreRig:
    rig = crowd(num_stages=1, async_depth=2, latency=None)
    for _ in range(60):
        rig.settle(1)
        if rig.scheduler._queues.preempted and rig.scheduler._queues.preempted[0].num_pending:
            return rig
    raise AssertionError("nobody was preempted with results in flight")


def test_d10_a_preempted_request_takes_its_late_results_and_waits_for_them() -> None:
    rig = preempt_with_results_in_flight()
    victim = rig.scheduler._queues.preempted[0]
    pending, known = victim.num_pending, len(victim.token_ids)
    while victim.num_pending:
        entered = {new.request_id for plan in rig.plans[-1:] for new in plan.new_rows}
        assert victim.request_id not in entered
        rig.settle(1)
    assert len(victim.token_ids) == known + pending
    rig.run_until_idle()
    for arrival in range(3):
        assert rig.result(f"r{arrival}") == rig.expected(f"r{arrival}", arrival)


def test_d10_d13_abort_of_a_preempted_request() -> None:
    rig = preempt_with_results_in_flight()
    victim = rig.scheduler._queues.preempted[0].request_id
    sent = rig.tokens(victim)
    assert rig.abort(victim)
    rig.run_until_idle()
    assert rig.tokens(victim) == sent
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks


def test_d10_a_request_that_fits_the_pool_alone_always_completes() -> None:
    rig = CoreRig(num_blocks=5, block_size=2, max_model_len=64, eos_token_ids=())
    rig.add("r", 4, max_tokens=None)
    rig.run_until_idle()
    assert len(rig.tokens("r")) == 7, "10 tokens of KV, and a last one that needs none"
    assert rig.finish_reason("r") == "length"


def test_d10_the_oldest_request_never_gives_way() -> None:
    rig = CoreRig(num_blocks=12, block_size=1, max_model_len=13, eos_token_ids=())
    for index in range(8):
        rig.add(f"r{index}", 2, max_tokens=10)
    last_size = 0
    for _ in range(400):
        if rig.core.is_idle:
            break
        oldest = next(iter(rig.scheduler._queues))
        rig.step(timeout_s=1.0)
        assert rig.scheduler._queues.running or rig.core.is_idle
        if not rig.is_finished(oldest.request_id):
            assert oldest.row >= 0, "the oldest request lost its row"
        last_size = len(rig.scheduler._queues)
    assert last_size == 0
    entered = [new.request_id for plan in rig.plans for new in plan.new_rows]
    assert entered.count("r0") == 1
    assert [rig.result(f"r{i}") for i in range(8)] == [rig.expected(f"r{i}", i) for i in range(8)]


def test_d10_a_request_preempted_before_its_first_token_queued_only_until_its_first_start() -> None:
    config = SchedulerConfig(prefill_chunk=1, max_num_seqs=2)
    rig = CoreRig(num_blocks=8, block_size=1, max_model_len=9, eos_token_ids=(), scheduler=config)
    rig.add("old", 2, max_tokens=6)
    rig.step()
    rig.step()
    rig.add("young", 4, max_tokens=2)
    rig.clock.advance(3.0)
    for _ in range(200):
        rig.step(timeout_s=1.0)
        rig.clock.advance(1.0)
        if rig.core.is_idle:
            break
    assert rig.core.stats().scheduler.num_preemptions == 1
    entries = [new for plan in rig.plans for new in plan.new_rows if new.request_id == "young"]
    assert [len(entry.token_ids) for entry in entries] == [4, 4], "no token was out when it gave way"
    assert [update.queue_seconds for update in rig.updates["young"]] == [3.0, None]
    assert rig.result("young") == rig.expected("young", 1)


# The door


def test_a_request_id_in_use_is_refused() -> None:
    rig = CoreRig()
    rig.add("r", 3)
    with pytest.raises(InvalidRequestError, match="request id 'r' is in use"):
        rig.add("r", 3)


def test_a_full_queue_is_refused_with_429() -> None:
    rig = CoreRig(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_requests=2))
    for index in range(3):
        rig.add(f"r{index}", 3)
        rig.step()
    with pytest.raises(OverloadedError, match="2 requests wait already") as caught:
        rig.add("one too many", 3)
    assert caught.value.http_status == 429
    again = GenerationRequest(
        request_id="again", prompt_token_ids=[3], sampling=SamplingParams(max_tokens=2, ignore_eos=True)
    )
    rig.core.add_request(again, output_ids=[])
    assert rig.core.stats().scheduler.num_waiting == 3, "it was admitted by a core that is gone"


def test_r4_what_another_core_had_begun_does_not_expire_and_ends_with_those_that_run() -> None:
    rig = CoreRig(scheduler=SchedulerConfig(max_num_seqs=1, queue_timeout_s=10.0))
    rig.add("runs", 3, max_tokens=50)
    rig.step()
    begun = GenerationRequest(
        request_id="begun", prompt_token_ids=[3], sampling=SamplingParams(max_tokens=9, ignore_eos=True)
    )
    rig.core.add_request(begun, output_ids=[5, 6])
    rig.add("new", 3)
    rig.clock.advance(11.0)
    assert [update.request_id for update in rig.scheduler.expire_requests()] == ["new"]
    assert rig.scheduler.next_expiry() is None
    error = StageLostError("again").info()
    assert [update.request_id for update in rig.scheduler.fail_started(error)] == ["runs", "begun"]


def test_r10_a_burst_that_free_rows_can_take_does_not_count_as_waiting() -> None:
    rig = CoreRig(scheduler=SchedulerConfig(max_num_seqs=4, max_waiting_requests=2))
    for index in range(6):
        rig.add(f"r{index}", 3)
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        rig.add("one too many", 3)


def test_r8_a_queue_that_is_full_of_tokens_is_refused_with_429() -> None:
    rig = CoreRig(scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_tokens=20))
    rig.add("runs", 3)
    rig.step()
    rig.add("alone it may be longer than the limit", 21)
    with pytest.raises(OverloadedError, match=r"21 tokens .* with the 1 of .* limit of 20") as caught:
        rig.add("one too many", 1)
    assert caught.value.http_status == 429
    assert "--max-waiting-tokens" in caught.value.remedy


def test_r8_eight_pools_of_tokens_may_wait_where_nothing_else_is_said() -> None:
    rig = CoreRig(num_blocks=4, block_size=4, scheduler=SchedulerConfig(max_num_seqs=1))
    rig.add("runs", 3)
    rig.step()
    for index in range(8):
        rig.add(f"r{index}", 16)
    with pytest.raises(OverloadedError, match=r"128 tokens .* limit of 128"):
        rig.add("one too many", 1)


def test_a_request_that_waits_too_long_ends_with_503() -> None:
    config = SchedulerConfig(max_num_seqs=1, queue_timeout_s=10.0)
    rig = CoreRig(latency=None, scheduler=config)
    rig.add("running", 3, max_tokens=2, ignore_eos=True)
    rig.step()
    rig.add("early", 3)
    rig.clock.advance(4.0)
    rig.add("late", 3)
    rig.clock.advance(5.9)
    assert rig.step() == []
    assert rig.scheduler.next_expiry() == pytest.approx(rig.clock.now + 0.1)
    rig.clock.advance(0.2)
    (update,) = rig.step()
    assert (update.request_id, update.finish_reason) == ("early", "error")
    assert update.error is not None
    assert (update.error.kind, update.error.code) == ("UnavailableError", "queue_timeout")
    assert update.queue_seconds == pytest.approx(10.1)
    rig.run_until_idle()
    assert rig.result("running") == rig.expected("running", 0)
    assert rig.result("late") == rig.expected("late", 2)
    assert rig.scheduler.next_expiry() is None


def test_a_preempted_request_does_not_time_out() -> None:
    rig = preempt_with_results_in_flight()
    rig.clock.advance(1e6)
    rig.run_until_idle()
    for arrival in range(3):
        assert rig.result(f"r{arrival}") == rig.expected(f"r{arrival}", arrival)


def test_fail_all_ends_everybody_once() -> None:
    rig = CoreRig(num_stages=2, latency=None, scheduler=SchedulerConfig(max_num_seqs=2))
    for index in range(4):
        rig.add(f"r{index}", 3)
    rig.step()
    rig.clock.advance(1.0)
    error = StageLostError("stage 1 was lost.", stage=1).info()
    updates = rig.scheduler.fail_all(error)
    assert [update.request_id for update in updates] == ["r0", "r1", "r2", "r3"]
    assert all(update.finish_reason == "error" and update.error == error for update in updates)
    assert [update.queue_seconds for update in updates] == [0.0, 0.0, None, None]
    assert not rig.scheduler.has_requests
    assert rig.core.stats().cache.free_blocks == rig.core.stats().cache.num_blocks
    rig.scheduler.check_invariants()


# The log


def log_of(rig: CoreRig) -> list[ScheduledBatch]:
    rig.run_until_idle()
    return rig.executor.plans


def test_s3_dr8_the_same_events_give_the_same_log() -> None:
    first, second = log_of(crowd(num_stages=2)), log_of(crowd(num_stages=2))
    assert first == second
    assert len(first) > 10


def test_s3_d3_replicas_that_replay_the_log_agree_with_the_scheduler() -> None:
    rig = crowd(num_stages=3, async_depth=1)
    for _ in range(12):
        rig.step(timeout_s=1.0)
    replicas = [RankReplica(num_rows=8, num_blocks=9, block_size=2) for _ in range(3)]
    for plan in rig.executor.plans:
        sampled = [replica.run(plan) for replica in replicas]
        assert sampled[0] == sampled[1] == sampled[2]
    running = {request.row: request for request in rig.scheduler._queues.running}
    freed = set(rig.scheduler._rows._unannounced)
    for replica in replicas:
        assert set(replica.rows) - freed == set(running)
        for row, request in running.items():
            assert replica.rows[row].num_computed == request.num_scheduled
            assert replica.rows[row].blocks == rig.allocator.table(request.arrival)


def test_e4_the_mask_and_the_result_have_the_same_length() -> None:
    rig = crowd(num_stages=2)
    rig.run_until_idle()
    assert any(not any(plan.need_sampled) for plan in rig.plans) is False
    prefill_only = CoreRig(scheduler=SchedulerConfig(prefill_chunk=2))
    prefill_only.add("r", 7, max_tokens=1)
    prefill_only.run_until_idle()
    masks = [plan.need_sampled for plan in prefill_only.plans]
    assert masks == [[False], [False], [False], [True]]
    assert [plan.sampled_rows for plan in prefill_only.plans] == [[], [], [], [0]]


def test_results_out_of_order_are_our_bug() -> None:
    rig = CoreRig(num_stages=2, latency=None)
    rig.add("r", 3, max_tokens=4)
    rig.step()
    plan = rig.executor.plans[0]
    (result,) = rig.executor.poll_results(1.0)
    rig.scheduler.settle_result(plan, result)
    with pytest.raises(AssertionError, match="settled in step order"):
        rig.scheduler.settle_result(plan, result)


def test_check_invariants_sees_blocks_without_a_row() -> None:
    rig = CoreRig()
    rig.allocator.grow(99, 1)
    with pytest.raises(AssertionError, match="blocks without a row"):
        rig.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_pending", 0, "lost or doubled"),
        ("max_len", 3, "overshoots"),
        ("num_scheduled", 99, "beyond its blocks"),
        ("num_scheduled", 4, "the two clocks disagree"),
    ],
)
def test_check_invariants_sees_a_damaged_request(field: str, value: int, message: str) -> None:
    rig = CoreRig(latency=None)
    rig.add("r", 3, max_tokens=4)
    rig.step()
    setattr(rig.scheduler._queues.running[0], field, value)
    with pytest.raises(AssertionError, match=message):
        rig.scheduler.check_invariants()
