"""Requests that end with a vector: scheduled beside others, never with what was computed before (row G3)."""

from __future__ import annotations

import random

import pytest

from fakes import CoreRig
from penstock.batch import StepResult
from penstock.config.engine import Pooling, SchedulerConfig
from penstock.errors import ErrorInfo, InvalidRequestError
from replicas import ReplicaRig

LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)
SLOW = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk=2)
CHUNKED = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk=5)


def finished(rig: CoreRig) -> bool:
    return all(map(rig.is_finished, rig.requests))


def entries(rig: CoreRig) -> list[str]:
    """Whose rows were entered, in order."""
    return [new.request_id for plan in rig.plans for new in plan.new_rows]


def check_all(rig: CoreRig) -> None:
    """Everybody has what the oracle says."""
    for arrival, (name, request) in enumerate(rig.requests.items()):
        if request.pooling is None:
            assert rig.result(name) == rig.expected(name, arrival), name
        else:
            assert rig.vector(name) == rig.expected_vector(name), name


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_g3_a_vector_beside_tokens(pooling: Pooling, num_stages: int, async_depth: int) -> None:
    rig = CoreRig(num_stages=num_stages, async_depth=async_depth, scheduler=CHUNKED)
    rig.add("before", 7, max_tokens=9, ignore_eos=True)
    rig.embed("short", 3, pooling)
    rig.embed("long", 23, pooling)
    rig.add("after", 11, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    rig.run_until_idle()
    check_all(rig)
    assert rig.allocator.num_free_blocks == 64
    assert rig.updates["short"][0].queue_seconds == 0.0
    chunks = [plan for plan in rig.plans if plan.pooled]
    assert sum(len(plan.pooled) for plan in chunks) == 2
    assert rig.core.stats().scheduler.prompt_tokens == 7 + 3 + 23 + 11
    assert rig.core.stats().scheduler.generated_tokens == 9 + 6


def test_tokens_of_others_are_those_without_it() -> None:
    def tokens(*, with_vectors: bool) -> list[tuple[list[int], str | None]]:
        rig = CoreRig(num_stages=2, scheduler=CHUNKED)
        for index in range(4):
            prompt = [(5 * index + 3 * place) % 40 for place in range(6 + 5 * index)]
            rig.add(str(index), prompt, temperature=1.0, seed=index, max_tokens=8)
            if with_vectors:
                rig.embed(f"vector {index}", prompt)
        rig.run_until_idle()
        return [rig.result(str(index)) for index in range(4)]

    assert tokens(with_vectors=True) == tokens(with_vectors=False)


def crowded(*, num_stages: int, async_depth: int, num_blocks: int) -> CoreRig:
    """Requests that grow into the last blocks while vectors of younger ones are made, slowly."""
    rig = CoreRig(
        num_stages=num_stages,
        async_depth=async_depth,
        latency=None,
        num_blocks=num_blocks,
        block_size=2,
        scheduler=SLOW,
        eviction="lru",
    )
    for index in range(3):
        rig.add(f"tokens {index}", 2 + index, max_tokens=16, ignore_eos=True)
    for index in range(2):
        rig.embed(f"vector {index}", 12 + index)
    return rig


@pytest.mark.parametrize("async_depth", [0, 1])
def test_d10_who_is_preempted_is_pooled_again_from_the_first_token(async_depth: int) -> None:
    rig = crowded(num_stages=2, async_depth=async_depth, num_blocks=20)
    rig.run_until_idle()
    check_all(rig)
    assert rig.allocator.num_free_blocks == 20
    assert sorted(name for name in entries(rig) if name.startswith("vector")) == [
        "vector 0",
        *["vector 1"] * 2,
    ]


@pytest.mark.parametrize(
    ("num_stages", "async_depth", "num_blocks"), [(2, 0, 14), (2, 1, 14), (2, 1, 22), (3, 0, 18)]
)
def test_the_result_of_a_step_in_flight_counts_though_its_request_was_preempted(
    num_stages: int, async_depth: int, num_blocks: int
) -> None:
    rig = crowded(num_stages=num_stages, async_depth=async_depth, num_blocks=num_blocks)
    while not rig.core.stats().scheduler.num_preemptions:
        rig.settle(1)
    returned = [step for event, step in rig.executor.events if event == "result"]
    on_way = [plan for plan in rig.executor.plans if plan.step_id not in returned and plan.pooled]
    assert on_way, "the youngest has been pooled, and loses its row"
    assert not finished(rig)
    rig.run_until_idle()
    check_all(rig)
    assert rig.allocator.num_free_blocks == num_blocks


@pytest.mark.parametrize("num_steps", range(14))
def test_r4_a_lost_stage_costs_no_vector(num_steps: int) -> None:
    rig = CoreRig(num_stages=3, async_depth=1, num_blocks=24, scheduler=CHUNKED, recovers=True)
    rig.embed("one", 23, "mean")
    rig.add("tokens", 5, max_tokens=9)
    rig.embed("two", 11, "last")
    for _ in range(num_steps):
        rig.step(timeout_s=1.0)
    rig.core.lose_epoch(LOST)
    rig.rejoin()
    rig.run_until_idle()
    check_all(rig)
    assert rig.allocator.num_free_blocks == 24


def test_who_is_there_at_two_losses_is_quarantined() -> None:
    rig = CoreRig(num_stages=3, latency=None, recovers=True)
    rig.embed("poison", 5)
    rig.step()
    assert rig.core.lose_epoch(LOST) == []
    rig.rejoin()
    rig.step()
    (update,) = rig.core.lose_epoch(LOST)
    assert update.error is not None
    assert (update.request_id, update.error.code) == ("poison", "quarantined")


@pytest.mark.parametrize("num_steps", range(6))
def test_d13_an_abort_at_any_step_leaves_nothing(num_steps: int) -> None:
    rig = CoreRig(num_stages=2, latency=None, scheduler=CHUNKED)
    rig.embed("vector", 12)
    for _ in range(num_steps):
        rig.settle(1)
    is_there = not rig.is_finished("vector")
    assert rig.abort("vector") == is_there
    before = len(rig.updates["vector"])
    rig.run_until_idle()
    assert len(rig.updates["vector"]) == before
    assert rig.allocator.num_free_blocks == 64


def test_h1_nothing_that_was_computed_before_is_used_and_nothing_is_kept() -> None:
    """`RankReplica` asserts that a pooled row is run from its first token on."""
    prompt = [3 * index % 40 for index in range(22)]
    rig = CoreRig(eviction="lru", scheduler=CHUNKED)
    rig.add("tokens", prompt, max_tokens=3)
    rig.run_until_idle()
    before = rig.core.stats()
    assert before.cache.cached_blocks
    rig.embed("vector", prompt)
    rig.embed("again", prompt)
    rig.embed("other", 17)
    rig.run_until_idle()
    check_all(rig)
    stats = rig.core.stats()
    assert stats.cache.cached_blocks == before.cache.cached_blocks
    assert (stats.cache.prefix_tokens, stats.cache.prefix_hit_tokens) == (
        before.cache.prefix_tokens,
        before.cache.prefix_hit_tokens,
    )


def test_a_vector_that_is_not_finite_is_that_requests_error() -> None:
    rig = CoreRig(num_stages=2)
    rig.embed("bad", 5)
    rig.embed("good", 5)
    rig.executor.fail_pooled = {0}
    rig.run_until_idle()
    (update,) = rig.updates["bad"]
    assert update.finish_reason == "error"
    assert update.error is not None
    assert "NaN or infinity in the vector of request bad" in update.error.message
    assert rig.vector("good") == rig.expected_vector("good")


def test_nothing_needs_to_follow_a_prompt() -> None:
    rig = CoreRig(max_model_len=40, num_blocks=12, block_size=4)
    rig.embed("all", 40)
    rig.run_until_idle()
    check_all(rig)
    with pytest.raises(InvalidRequestError, match=r"41 tokens; the model takes 40") as raised:
        rig.embed("more", 41)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError, match="no tokens"):
        rig.embed("none", [])
    small = CoreRig(max_model_len=40, num_blocks=6, block_size=4)
    small.embed("all", 24)
    small.run_until_idle()
    check_all(small)
    with pytest.raises(InvalidRequestError, match=r"25 tokens; the KV cache holds 24") as raised:
        small.embed("more", 25)
    assert raised.value.code == "kv_capacity_exceeded"


def test_it_waits_in_line_and_no_longer_than_others() -> None:
    one_row = SchedulerConfig(max_num_seqs=1, queue_timeout_s=5.0)
    rig = CoreRig(latency=None, scheduler=one_row)
    rig.add("first", 4, max_tokens=3)
    rig.embed("late", 4)
    rig.step()
    rig.clock.advance(6.0)
    (update,) = rig.step()
    assert update.error is not None
    assert (update.request_id, update.error.code) == ("late", "queue_timeout")


def test_dr1_a_result_without_its_vectors_is_not_ours() -> None:
    rig = CoreRig(latency=None)
    rig.embed("vector", 4)
    rig.step()
    (plan,) = [plan for plan in rig.executor.plans if plan.pooled]
    result = StepResult(step_id=plan.step_id, digest=plan.digest)
    rig.executor.poll_results = lambda timeout_s: [result]  # type: ignore[method-assign]
    (update,) = rig.step()
    assert update.error is not None
    assert update.error.kind == "ProtocolError"
    assert "has 0 vectors, but the plan pools 1 rows. Requests of the step: vector" in update.error.message


@pytest.mark.parametrize("seed", range(12))
def test_ranks_at_their_own_pace_preemptions_and_losses_change_no_vector(seed: int) -> None:
    chance = random.Random(seed)
    rig = ReplicaRig(
        num_stages=chance.randint(1, 3),
        tp=chance.randint(1, 2),
        num_blocks=chance.choice([9, 12, 30]),
        async_depth=chance.choice([0, 1]),
        chance=chance,
        scheduler=CHUNKED,
    )
    for number in range(14):
        if chance.random() < 0.5:
            rig.embed(str(number), chance.randint(1, 24), chance.choice(["last", "mean", "cls"]))
        else:
            rig.add(str(number), chance.randint(1, 20), max_tokens=chance.randint(1, 9))
        for _ in range(chance.randint(0, 5)):
            rig.step(timeout_s=chance.choice([0.0, 1.0]))
        if number == 7:
            rig.core.lose_epoch(LOST)
            rig.rejoin()
    for _ in range(600):
        if finished(rig):
            break
        rig.step(timeout_s=1.0)
    check_all(rig)
