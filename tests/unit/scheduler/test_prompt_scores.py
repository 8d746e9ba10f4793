"""Scores of prompts, and requests that want no token: each position once and in order (row G8).

The ranks of `fakes` make a score from what the KV slots hold before the token, so a score of a wrong
position, row or block is a wrong number.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakes import VOCAB_SIZE, CoreRig
from penstock.batch import ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.errors import ErrorInfo, InvalidRequestError
from penstock.request import GenerationRequest, SamplingParams

LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)
LAYOUTS = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2)]


def chunks_of(size: int, **more: Any) -> SchedulerConfig:
    return SchedulerConfig(prefill_chunk=size, max_num_batched_tokens=max(16, size), max_num_seqs=8, **more)


def scored_of(plans: list[ScheduledBatch]) -> list[tuple[int, int]]:
    """(first position, count) of all that was asked for, in the order of the steps."""
    return [(scored.first, scored.count) for plan in plans for scored in plan.scored]


def check(rig: CoreRig) -> None:
    """Everybody has its tokens, and its scores."""
    for arrival, name in enumerate(rig.requests):
        assert rig.result(name) == rig.expected(name, arrival)
        assert rig.scores(name) == rig.expected_scores(name)


@pytest.mark.parametrize(("num_stages", "async_depth"), LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 23])
def test_g8_each_position_of_a_prompt_is_scored_once_and_in_order(
    num_stages: int, async_depth: int, chunk: int, length: int
) -> None:
    rig = CoreRig(num_stages=num_stages, async_depth=async_depth, scheduler=chunks_of(chunk))
    rig.add("plain", 5, max_tokens=4)
    rig.add("r", length, prompt_logprobs=2, max_tokens=3)
    rig.add("only", length, prompt_logprobs=0, max_tokens=0)
    rig.run_until_idle()
    check(rig)
    assert len(rig.scores("r")) == length - 1
    assert all(scored.first > start for plan in rig.plans for scored, start in with_starts(plan))
    asked = sum(count for _, count in scored_of(rig.plans))
    assert asked == 2 * (length - 1), "no more than the two prompts have"
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks


def with_starts(plan: ScheduledBatch) -> list[tuple[Any, int]]:
    return [(scored, plan.start_positions[scored.place]) for scored in plan.scored]


def test_g8_a_chunk_scores_the_token_behind_it_and_the_last_token_scores_none() -> None:
    rig = CoreRig(scheduler=chunks_of(4))
    rig.add("r", 10, prompt_logprobs=1, max_tokens=2)
    rig.run_until_idle()
    assert scored_of(rig.plans) == [(1, 4), (5, 4), (9, 1)]
    assert [plan.num_tokens for plan in rig.plans] == [[4], [4], [2], [1]]


def test_g8_scores_come_chunk_by_chunk_before_the_first_token_and_say_how_long_it_queued() -> None:
    rig = CoreRig(scheduler=chunks_of(4))
    rig.add("r", 10, prompt_logprobs=1, max_tokens=2)
    rig.clock.advance(2.0)
    rig.run_until_idle()
    sizes = [(len(update.prompt_logprobs), len(update.token_ids)) for update in rig.updates["r"]]
    assert sizes == [(4, 0), (4, 0), (1, 0), (0, 1), (0, 1)]
    assert rig.updates["r"][0].queue_seconds == 2.0


@pytest.mark.parametrize(("num_stages", "async_depth"), LAYOUTS)
def test_no_token_wanted_takes_no_step_too_many_and_no_sample(num_stages: int, async_depth: int) -> None:
    rig = CoreRig(num_stages=num_stages, async_depth=async_depth, scheduler=chunks_of(4), latency=None)
    rig.add("r", 9, max_tokens=0, logprobs=1)
    rig.run_until_idle()
    assert [plan.num_tokens for plan in rig.plans] == [[4], [4]], "nothing follows from the last token"
    assert not any(any(plan.need_sampled) for plan in rig.plans)
    (update,) = rig.updates["r"]
    assert (update.token_ids, update.logprobs, update.finish_reason) == ([], [], "length")
    assert update.queue_seconds == 0.0
    stats = rig.core.stats()
    assert (stats.scheduler.prompt_tokens, stats.scheduler.generated_tokens) == (9, 0)
    assert rig.core.is_idle


def test_no_token_wanted_of_one_token_takes_one_step() -> None:
    rig = CoreRig()
    rig.add("r", 1, max_tokens=0, prompt_logprobs=3)
    rig.run_until_idle()
    assert [plan.num_tokens for plan in rig.plans] == [[1]]
    assert (rig.result("r"), rig.scores("r")) == (([], "length"), [])


def test_no_token_wanted_of_a_prompt_that_fills_the_context() -> None:
    rig = CoreRig(num_blocks=8, block_size=4, max_model_len=32)
    rig.add("r", 32, max_tokens=0, prompt_logprobs=0)
    rig.run_until_idle()
    check(rig)
    with pytest.raises(
        InvalidRequestError, match=r"33 tokens; the model takes 32 tokens in all, with at least 0"
    ):
        rig.add("longer", 33, max_tokens=0)
    with pytest.raises(InvalidRequestError, match="with at least 1 of them for the output"):
        rig.add("token", 32, max_tokens=1)


def test_no_token_wanted_of_a_prompt_that_fills_the_pool_and_one_more() -> None:
    """The last token of a prompt needs no keys and values, as the last of an output does not."""
    rig = CoreRig(num_blocks=5, block_size=2, max_model_len=64)
    rig.add("r", 11, max_tokens=0, prompt_logprobs=0)
    rig.run_until_idle()
    check(rig)
    with pytest.raises(InvalidRequestError, match="the KV cache holds 10"):
        rig.add("longer", 12, max_tokens=0)


@pytest.mark.parametrize(("length", "found"), [(8, 4), (9, 4), (10, 8)])
def test_no_token_wanted_finds_its_prompt_in_the_cache_and_still_takes_a_step(
    length: int, found: int
) -> None:
    rig = CoreRig(eviction="lru")
    prompt = list(range(12))
    rig.add("first", prompt, max_tokens=1)
    rig.run_until_idle()
    rig.add("again", prompt[:length], max_tokens=0)
    rig.run_until_idle()
    assert rig.result("again") == ([], "length")
    assert rig.updates["again"][-1].num_cached_tokens == found


def test_g8_a_scored_prompt_is_computed_whole_whatever_is_cached_and_is_found_by_others() -> None:
    rig = CoreRig(eviction="lru")
    prompt = [(7 * index) % VOCAB_SIZE for index in range(18)]
    rig.add("first", prompt, max_tokens=1)
    rig.run_until_idle()
    rig.add("scored", prompt, max_tokens=2, prompt_logprobs=1)
    rig.run_until_idle()
    assert rig.scores("scored") == rig.expected_scores("scored")
    assert {update.num_cached_tokens for update in rig.updates["scored"]} == {0}
    rig.scheduler.prefixes.flush(with_store=False)
    rig.add("scored too", prompt, max_tokens=0, prompt_logprobs=1)
    rig.run_until_idle()
    rig.add("last", prompt, max_tokens=1)
    rig.run_until_idle()
    assert rig.updates["last"][0].num_cached_tokens == 16, "its blocks have names as all others"


def crowded(num_stages: int, async_depth: int, **more: Any) -> CoreRig:
    """Prompts whose chunks are short and which together outgrow the pool: some give way within theirs."""
    rig = CoreRig(
        num_stages=num_stages,
        async_depth=async_depth,
        num_blocks=12,
        block_size=2,
        max_model_len=24,
        eos_token_ids=(),
        scheduler=chunks_of(2),
        **more,
    )
    rig.add("old", 3, max_tokens=14)
    rig.add("older", 2, max_tokens=12, prompt_logprobs=0)
    rig.add("scored", 9, max_tokens=8, prompt_logprobs=1)
    rig.add("only", 8, max_tokens=0, prompt_logprobs=2)
    return rig


@pytest.mark.parametrize(("num_stages", "async_depth"), LAYOUTS)
@pytest.mark.parametrize("latency", [None, 0])
def test_g8_d10_who_gives_way_sends_no_score_twice(
    num_stages: int, async_depth: int, latency: int | None
) -> None:
    rig = crowded(num_stages, async_depth, latency=latency)
    rig.run_until_idle()
    assert rig.core.stats().scheduler.num_preemptions > 0
    check(rig)
    scored = [request for request in rig.requests.values() if request.sampling.prompt_logprobs is not None]
    asked = sum(count for _, count in scored_of(rig.plans))
    assert asked == sum(len(request.prompt_token_ids) - 1 for request in scored), "none is asked for twice"


@pytest.mark.parametrize("seed", range(24))
def test_g8_d10_who_gives_way_at_any_moment_sends_each_score_once(seed: int) -> None:
    """The youngest loses its row between any two steps, within its prompt and after it."""
    chance = random.Random(seed)
    rig = crowded(chance.randint(1, 3), chance.randint(0, 2), latency=chance.choice([None, 0, 1]))
    gave_way = 0
    for _ in range(400):
        if rig.core.is_idle:
            break
        rig.step(timeout_s=chance.choice([0.0, 1.0]))
        running = rig.scheduler._queues.running
        if running and not running[-1].num_unproven and chance.random() < 0.2 and gave_way < 12:
            rig.scheduler._placement._preempt_youngest()
            gave_way += 1
            rig.core.check_invariants()
    assert gave_way
    check(rig)


@pytest.mark.parametrize("num_steps", range(14))
@pytest.mark.parametrize(("num_stages", "async_depth"), [(2, 0), (3, 1)])
def test_g8_r4_a_lost_stage_loses_and_doubles_no_score(
    num_stages: int, async_depth: int, num_steps: int
) -> None:
    rig = CoreRig(
        num_stages=num_stages, async_depth=async_depth, recovers=True, scheduler=chunks_of(3), latency=None
    )
    rig.add("scored", 17, max_tokens=3, prompt_logprobs=1)
    rig.add("only", 14, max_tokens=0, prompt_logprobs=0)
    for _ in range(num_steps):
        rig.step(timeout_s=1.0)
    rig.core.lose_epoch(LOST)
    rig.rejoin()
    rig.run_until_idle()
    check(rig)


def test_g8_scores_that_come_are_progress_that_keeps_a_request_from_quarantine() -> None:
    rig = CoreRig(num_stages=2, recovers=True, scheduler=chunks_of(2), latency=None)
    rig.add("scored", 30, max_tokens=1, prompt_logprobs=1)
    for _ in range(5):
        before = len(rig.scores("scored"))
        while len(rig.scores("scored")) == before:
            rig.step(timeout_s=1.0)
        rig.core.lose_epoch(LOST)
        rig.rejoin()
    rig.run_until_idle()
    check(rig)


@pytest.mark.parametrize("num_scores", [0, 1, 5, 11, 16])
def test_g8_another_core_goes_on_behind_the_scores_that_the_client_has(num_scores: int) -> None:
    rig = CoreRig(scheduler=chunks_of(4))
    prompt = [(5 * index) % VOCAB_SIZE for index in range(17)]
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    request = GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling)
    rig.core.add_request(request, [], num_scores)
    rig.requests["r"], rig.updates["r"] = request, []
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert rig.scores("r") == rig.expected_scores("r")[num_scores:]


def test_g8_logits_that_are_not_finite_end_their_own_request_and_nobody_finds_its_blocks() -> None:
    rig = CoreRig(scheduler=chunks_of(4), eviction="lru")
    prompt = list(range(11))
    rig.executor.fail_scores = {1: [0]}  # step 0 is the first chunk
    rig.add("bad", prompt, max_tokens=2, prompt_logprobs=1)
    rig.run_until_idle()
    last = rig.updates["bad"][-1]
    assert last.error is not None
    assert last.error.kind == "NumericalError"
    assert "at token 5 of the prompt of request bad (step 1)" in last.error.message
    rig.add("next", prompt, max_tokens=2)
    rig.run_until_idle()
    assert rig.result("next") == rig.expected("next", 1)
    assert rig.updates["next"][0].num_cached_tokens == 0


def test_g8_abort_within_the_prompt_drops_the_scores_in_flight() -> None:
    rig = CoreRig(num_stages=3, scheduler=chunks_of(2), latency=None)
    rig.add("r", 20, max_tokens=0, prompt_logprobs=1)
    rig.step()
    assert rig.core.num_inflight == 3
    assert rig.abort("r")
    rig.run_until_idle()
    assert rig.updates["r"] == []
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks


@pytest.mark.parametrize("change", ["fewer", "more", "none"])
def test_scores_that_nobody_asked_for_or_that_are_missing_are_refused(change: str) -> None:
    rig = CoreRig(scheduler=chunks_of(8), recovers=True)
    rig.add("r", 6, max_tokens=1, prompt_logprobs=1)
    run = rig.executor.replica.run

    def changed(plan: ScheduledBatch) -> list[list[int]]:
        sampled, replica = run(plan), rig.executor.replica
        if plan.scored:
            (scores,) = replica.scores
            replica.scores = {"fewer": [scores[1:]], "more": [scores, scores], "none": []}[change]
        return sampled

    rig.executor.replica.run = changed  # type: ignore[method-assign]
    for _ in range(3):
        rig.step(timeout_s=1.0)
    assert rig.core.loss is not None
    assert "expected scores of [5] tokens, found" in rig.core.loss.message
