"""A model checker of what two stages could disagree about: a real core over ranks that go their own pace.

Every rank replays the plans on its own; plans, copies, answers and results come as late as a seed, or a test,
has it. After every step of every rank, also of ranks that share a stage, its residency digest is the core's
(rows C13, H10 to H16).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fake_catalogue import FakeCatalogue
from fakes import VOCAB_SIZE
from penstock.errors import PeerError
from penstock.kvcache.block_hash import block_hashes, root_hash
from replicas import Part, ReplicaRig

BLOCK = 4
QUIET_TURNS = 400
MAX_WAITING = 6  # requests; a core refuses more than so many tokens


def drive(seed: int, num_requests: int) -> Counter[str]:
    """One engine's life, in which everything happens; what happened, counted."""
    chance = random.Random(seed)
    catalogue = FakeCatalogue()
    num_blocks = chance.choice([11, 16, 40])
    rig = ReplicaRig(
        num_stages=chance.randint(2, 4),
        tp=chance.randint(1, 2),
        num_blocks=num_blocks,
        async_depth=chance.choice([0, 1]),
        chance=chance,
        failure_rate=chance.choice([0.0, 0.05]),
        catalogue=catalogue,
        store_when_found=chance.choice([0, 0, 1]),
        eviction=chance.choice(["lru", "lfu", "priority"]),
        max_model_len=40,
    )
    families = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    seen: Counter[str] = Counter()
    scoring = random.Random(seed)
    for number in range(num_requests):
        prompt = [*chance.choice(families)[: chance.randint(1, 24)], *[number] * chance.randint(0, 3)]
        count, scores = chance.randint(1, 10), scoring.choice([None, None, 0, 2])
        if scoring.random() < 0.1:
            count = 0
        rig.add(str(number), prompt, max_tokens=count, ignore_eos=True, prompt_logprobs=scores)
        for _ in range(chance.randint(0, 6)):
            catalogue.is_slow = chance.random() < 0.2
            rig.step(timeout_s=chance.choice([0.0, 1.0]))
            rig.clock.advance(chance.choice([0.0, 0.1, 1.0]))
        disturb(rig, chance, seen)
        while rig.core.stats().scheduler.num_waiting > MAX_WAITING:
            rig.step(timeout_s=1.0)
            rig.clock.advance(0.1)
    catalogue.is_slow = False
    for _ in range(QUIET_TURNS):
        rig.step(timeout_s=1.0)
        rig.clock.advance(0.2)
    check_end(rig, num_blocks)
    stats = rig.core.stats()
    seen["compared"] = rig.num_compared + rig.pipe.num_compared
    seen["loaded"], seen["stored"], seen["failed"] = (
        stats.store.loaded_blocks,
        stats.store.stored_blocks,
        stats.store.failed_blocks,
    )
    seen["preempted"], seen["evicted"], seen["found"] = (
        stats.scheduler.num_preemptions,
        stats.cache.evicted_blocks,
        stats.cache.prefix_hit_tokens,
    )
    return seen


def disturb(rig: ReplicaRig, chance: random.Random, seen: Counter[str]) -> None:
    """An abort, a record that is gone on one rank, the loss of a stage; each now and then."""
    if chance.random() < 0.1 and rig.abort(name := chance.choice(list(rig.requests))):
        del rig.requests[name]
        seen["aborted"] += 1
    part: Part = chance.choice(rig.pipe.parts)
    if part and chance.random() < 0.2:
        del part[chance.choice(list(part))]
        seen["missing"] += 1
    if chance.random() < 0.03 and rig.core.steps_in_flight[1]:
        rig.pipe.lose_stage(chance.choice(rig.pipe.ranks).stage)
        rig.step()
        rig.rejoin()
        seen["lost"] += 1


def check_end(rig: ReplicaRig, num_blocks: int) -> None:
    """Nothing is left, and whoever came to an end has just its tokens."""
    assert rig.core.is_idle
    assert not any(rank.copies or rank.answers for rank in rig.pipe.ranks)
    assert rig.core.stats().cache.free_blocks == num_blocks, "a block is lost"
    for name in rig.requests:
        if rig.finish_reason(name) != "error":  # lost twice with a stage
            assert rig.result(name) == rig.expected(name)
            assert rig.scores(name) == rig.expected_scores(name)


EVERYTHING = {
    "compared",
    "loaded",
    "stored",
    "failed",
    "preempted",
    "evicted",
    "found",
    "aborted",
    "missing",
    "lost",
}


def test_c13_h12_ranks_at_their_own_pace_have_the_cores_table_after_every_step() -> None:
    seen: Counter[str] = Counter()
    for seed in range(24):
        seen += drive(seed, num_requests=16)
    assert {what for what, count in seen.items() if count > 2} == EVERYTHING, seen
    assert seen["compared"] > 5_000


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_h12_ranks_at_their_own_pace_for_long(first: int) -> None:
    for seed in range(first, first + 100):
        assert drive(10_000 + seed, num_requests=60)["compared"]


def stored_chain(rig: ReplicaRig, name: str, prompt: list[int]) -> None:
    """Compute a prompt and let all ranks store its blocks."""
    rig.add(name, prompt, max_tokens=1, ignore_eos=True)
    for _ in range(12):
        rig.clock.advance(1.0)
        rig.turn(*range(len(rig.pipe.ranks)))


def run(rig: ReplicaRig, name: str, prompt: list[int], *answering: int) -> int:
    """Tokens that were found for a request; its tokens are the right ones."""
    rig.add(name, prompt, max_tokens=2, ignore_eos=True)
    for _ in range(40):
        rig.turn(*answering)
        if rig.is_finished(name):
            break
        rig.clock.advance(0.01)
    assert rig.result(name) == rig.expected(name)
    return rig.updates[name][0].num_cached_tokens


def test_h12_the_documents_six_steps_end_with_equal_tables() -> None:
    """Two stages and a block X. In the document the second stage is slow to notice that X was copied, so the
    two give up different nodes, find different prefixes, and crash. Here the core alone decides, when all
    ranks have answered."""
    catalogue = FakeCatalogue()
    rig = ReplicaRig(num_stages=2, num_blocks=4, catalogue=catalogue, store_when_found=1, max_model_len=16)
    x = [3] * BLOCK
    pool = rig.allocator.pool

    # 1. Document: both trees hold node X in the memory of the device.
    #    Here: the index of the core does, once for both.
    assert run(rig, "a", [*x, 1]) == 0
    (block,) = rig.allocator.find(names_of(x))

    # 2. Document: X was hit often enough; both stages begin to copy it to the host, and lock it.
    #    Here: the core orders both ranks to store it, and pins it.
    assert run(rig, "b", [*x, 2]) == BLOCK
    rig.clock.advance(1.0)
    rig.turn()
    assert [len(rank.copies) for rank in rig.pipe.ranks] == [1, 1]

    # 3. Document: the copy is over on stage 0 and not on stage 1. Stage 0 unlocks X, stage 1 does not.
    #    Here: stage 0 has answered and stage 1 has not. X is pinned, for both.
    rig.turn(0)
    assert [len(rank.copies) for rank in rig.pipe.ranks] == [0, 1]
    assert not pool.cache.is_idle(block)
    assert not catalogue.names

    # 4. Document: memory is short. Stage 0 gives up X, stage 1 another node, Y.
    #    Here: three of four blocks are wanted. Both keep X, and both give up the same others.
    assert run(rig, "c", [7] * (2 * BLOCK + 1)) == 0
    assert rig.allocator.find(names_of(x)) == [block]

    # 5. Document: the host is full too. Stage 0 deletes X from its tree for good; stage 1 has it still.
    #    Here: stage 1 answers, X is let go, and given up because of what comes next; by both, in one plan.
    rig.turn(1)
    assert pool.cache.is_idle(block)
    assert len(catalogue.names) == 1
    assert run(rig, "d", [8] * (3 * BLOCK + 1), 0, 1) == 0
    assert not rig.allocator.find(names_of(x))

    # 6. Document: a request begins with X. Stage 0 finds nothing, stage 1 finds X: two lengths, crash.
    #    Here: X comes back from the store, for both; or is gone in one part of it, for both.
    assert run(rig, "e", [*x, 5], 0, 1) == BLOCK
    assert run(rig, "f", [9] * (3 * BLOCK + 1), 0, 1) == 0
    rig.pipe.parts[1].clear()
    assert run(rig, "g", [*x, 6], 0, 1) == 0
    tables = {rank.replica.residency.digest for rank in rig.pipe.ranks}
    assert tables == {rig.pipe.core_digests[rig.pipe.plans[-1].step_id]}
    rig.check_no_leak(4)


def names_of(tokens: list[int]) -> list[bytes]:
    """Names of the whole blocks of these tokens."""
    return block_hashes(root_hash(), tokens, BLOCK)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_h11_no_stage_is_ahead_of_another_whoever_answers_first(order: tuple[int, ...]) -> None:
    """What counts as stored is what the slowest has stored: no budget that goes downstream is needed."""
    catalogue = FakeCatalogue()
    rig = ReplicaRig(num_stages=3, num_blocks=16, catalogue=catalogue, max_model_len=40)
    rig.add("a", [1] * 9, max_tokens=1)
    for _ in range(4):
        rig.clock.advance(1.0)
        rig.turn()
    assert [len(rank.copies) for rank in rig.pipe.ranks] == [2, 2, 2]
    for rank in order[:2]:
        rig.turn(rank)
        assert not catalogue.names
        assert rig.core.stats().cache.free_blocks == 14
    rig.turn(order[2])
    assert len(catalogue.names) == 2
    assert rig.core.stats().cache.free_blocks == 16


@pytest.mark.parametrize("kept", [(3, 1, 2), (0, 3, 3), (3, 3, 2), (3, 3, 3)])
def test_h13_stages_with_different_stores_agree_on_the_shortest_beginning(kept: tuple[int, ...]) -> None:
    catalogue = FakeCatalogue()
    rig = ReplicaRig(num_stages=3, num_blocks=16, catalogue=catalogue, max_model_len=40)
    stored_chain(rig, "a", [1] * (3 * BLOCK + 1))
    other = ReplicaRig(
        num_stages=3, num_blocks=16, catalogue=catalogue, max_model_len=40, parts=rig.pipe.parts
    )
    for part, count in zip(other.pipe.parts, kept, strict=True):
        for name in list(part)[count:]:
            del part[name]
    assert run(other, "b", [1] * (3 * BLOCK + 1), 0, 1, 2) == min(kept) * BLOCK
    starts = {plan.start_positions[0] for plan in other.pipe.plans if plan.new_rows}
    assert starts == {min(kept) * BLOCK}, "in the plan, for all"
    other.check_no_leak(16)


def test_h14_a_prefetch_that_finds_nothing_gives_its_blocks_back_once_when_all_have_answered() -> None:
    catalogue = FakeCatalogue()
    rig = ReplicaRig(num_stages=3, num_blocks=16, catalogue=catalogue, max_model_len=40)
    stored_chain(rig, "a", [1] * (2 * BLOCK + 1))
    other = ReplicaRig(num_stages=3, num_blocks=16, catalogue=catalogue, max_model_len=40)
    other.add("b", [1] * (2 * BLOCK + 1), max_tokens=1)
    other.turn()
    assert not other.pipe.plans[-1].rows
    for answering, free in ((0, 14), (2, 14), (1, 16)):
        assert other.core.stats().cache.free_blocks == 14, "reserved until the last has answered"
        other.pipe.answer(answering)
        other.core.step()
        held = len(other.allocator.owners()) * 3  # by then the request has started
        assert other.core.stats().cache.free_blocks == free - held
    for _ in range(3):
        other.turn(0, 1, 2)
    assert other.finish_reason("b") == "length"
    other.check_no_leak(16)


def test_h15_a_rank_that_believes_something_else_says_so_before_it_computes() -> None:
    rig = ReplicaRig(num_stages=2, num_blocks=16, max_model_len=40)
    rig.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    rig.turn()
    (resident,) = rig.pipe.ranks[1].replica.residency.rows.values()
    resident.length -= BLOCK
    with pytest.raises(PeerError, match=r"request 'a' starts at a wrong position: the core .* 9 .* has 5"):
        rig.turn()


def test_h15_a_core_whose_tables_change_behind_its_plans_is_found_out() -> None:
    rig = ReplicaRig(num_stages=2, num_blocks=16, max_model_len=40)
    rig.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    rig.turn()
    (owner,) = rig.allocator.owners()
    assert rig.allocator.grow(owner, 4 * BLOCK)  # which no plan will say
    says = r"differs from the core.* a 1\d\. Residency of the core 0x"
    with pytest.raises(PeerError, match=says) as caught:
        rig.turn_often(3)
    assert caught.value.code == "residency_mismatch"
