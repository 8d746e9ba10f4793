"""Requests that begin before their blocks have come from the store (row H4).

The ranks of `fakes` spoil what they compute behind blocks that are not there, and sample a wrong token then.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from fake_catalogue import FakeCatalogue
from fakes import SMALL_SCHEDULER, VOCAB_SIZE, CoreRig
from penstock.errors import ErrorInfo
from penstock.kvcache.block_hash import block_hashes, root_hash
from penstock.kvcache.prefetching import EARLY_S
from penstock.operations import FlushCache, Pause, Resume
from stored_core import BLOCK, again, rig, run, settle_store, tokens_of

LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)
LONG = [(7 * index + 3) % VOCAB_SIZE for index in range(5 * BLOCK + 3)]


def with_quick_store(**settings: Any) -> tuple[CoreRig, FakeCatalogue, list[int]]:
    """An engine beside a store that has LONG's blocks and was quick last time, and what follows LONG."""
    one, catalogue = rig()
    run(one, "long", LONG)
    run(one, "other", [9] * (BLOCK + 1))
    settle_store(one)
    other = again(one, catalogue, **settings)
    assert run(other, "first", [9] * (BLOCK + 1)) == BLOCK
    other.executor.answers_at_once = False
    return other, catalogue, tokens_of(one, "long")


def with_stored(prompts: list[list[int]]) -> tuple[CoreRig, FakeCatalogue]:
    """An engine that was asked for `cold0`, `cold1`, ..., and has stored them."""
    one, catalogue = rig()
    for number, prompt in enumerate(prompts):
        run(one, f"cold{number}", prompt)
    settle_store(one)
    return one, catalogue


def lose_and_rejoin(one: CoreRig) -> None:
    """Ranks that know nothing come to the same store, and answer when they are told to."""
    one.core.lose_epoch(LOST)
    stored = one.executor.stored
    one.rejoin()
    one.executor.stored, one.executor.answers_at_once = stored, False


def begin(one: CoreRig, name: str = "early", prompt: list[int] = LONG) -> None:
    """As far as it gets while no rank answers."""
    one.add(name, prompt, max_tokens=4, ignore_eos=True)
    for _ in range(6):
        one.step(timeout_s=1.0)


def has_begun(one: CoreRig, name: str = "early") -> bool:
    return any(new.request_id == name for plan in one.plans for new in plan.new_rows)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("prefill_chunk", [1, 2, 8])
def test_h4_it_runs_what_it_knows_and_yields_its_token_when_all_ranks_have_answered(
    num_stages: int, prefill_chunk: int
) -> None:
    small = msgspec.structs.replace(SMALL_SCHEDULER, prefill_chunk=prefill_chunk)
    one, _, expected = with_quick_store(num_stages=num_stages, scheduler=small)
    begin(one)
    early = [plan for plan in one.plans if plan.awaited]
    some = min(3, prefill_chunk * num_stages)  # of the three that are not in the store; results are held
    assert sum(plan.total_tokens for plan in early) == some
    assert one.plans[-1] is early[-1], "and no further"
    assert early[0].start_positions == [5 * BLOCK]
    assert {order for plan in early for order in plan.awaited} == set(early[0].awaited)
    assert len(early[0].awaited) == 5
    assert tokens_of(one, "early") == []
    one.executor.answer(5)
    one.run_until_idle()
    assert tokens_of(one, "early") == expected
    assert one.updates["early"][0].num_cached_tokens == 5 * BLOCK
    assert one.core.stats().scheduler.num_preemptions == 0
    assert run(one, "again", LONG) == 5 * BLOCK, "and its blocks are named"


@pytest.mark.parametrize("num_missing", range(1, 6))
@pytest.mark.parametrize("num_stages", [1, 3])
def test_h4_behind_blocks_that_do_not_come_it_begins_again(num_stages: int, num_missing: int) -> None:
    one, _, expected = with_quick_store(num_stages=num_stages)
    del one.executor.stored[block_hashes(root_hash(), LONG, BLOCK)[5 - num_missing]]
    begin(one)
    assert has_begun(one)
    one.executor.answer(5)
    one.run_until_idle()
    assert tokens_of(one, "early") == expected
    assert one.updates["early"][0].num_cached_tokens == (5 - num_missing) * BLOCK
    entered = [plan for plan in one.plans if any(new.request_id == "early" for new in plan.new_rows)]
    assert [plan.start_positions[0] for plan in entered] == [5 * BLOCK, (5 - num_missing) * BLOCK]
    begin(one, "next", [*LONG[:-1], 1])
    assert has_begun(one, "next"), "found in the pool"


def test_h4_nobody_begins_early_beside_others() -> None:
    """They would wait with it."""
    one, _, expected = with_quick_store()
    one.add("busy", [3] * 3, max_tokens=30, ignore_eos=True)
    one.step(timeout_s=1.0)
    begin(one)
    assert not has_begun(one)
    one.executor.answers_at_once = True
    one.executor.answer(50)
    one.run_until_idle()
    assert tokens_of(one, "early") == expected


def test_h4_nobody_begins_early_behind_a_store_that_was_not_quick_or_has_failed() -> None:
    one, _, expected = with_quick_store()
    begin(one)
    one.clock.advance(EARLY_S + 0.1)
    one.executor.answer(5)
    one.run_until_idle()
    assert tokens_of(one, "early") == expected
    other = again(one, FakeCatalogue(set(one.executor.stored)))
    other.executor.answers_at_once = False
    begin(other)
    assert not has_begun(other), "nothing is known of the store yet"
    for name in list(other.executor.stored):
        del other.executor.stored[name]
    other.executor.answer(5)
    other.run_until_idle()
    assert tokens_of(other, "early") == expected
    begin(other, "more", [8] * 9)
    assert has_begun(other, "more"), "there is nothing to wait for"


def test_h4_who_comes_while_one_has_begun_early_waits_for_his_own_blocks_and_nothing_else() -> None:
    """And begins again with him, if his have not come."""
    one, _, expected = with_quick_store(num_stages=3)
    del one.executor.stored[block_hashes(root_hash(), LONG, BLOCK)[2]]
    begin(one)
    begin(one, "other", [6] * 3)
    assert has_begun(one, "other")
    assert tokens_of(one, "other") == [], "results come in order"
    one.executor.answers_at_once = True
    one.executor.answer(50)
    one.run_until_idle()
    assert tokens_of(one, "early") == expected
    assert one.result("other") == one.expected("other", 2)


@pytest.mark.parametrize("what", ["abort", "lose", "abort and answer"])
def test_h16_whoever_goes_before_his_blocks_come_leaves_nothing_behind(what: str) -> None:
    one, _, expected = with_quick_store(num_stages=2, recovers=True)
    begin(one)
    assert has_begun(one)
    if what == "lose":
        one.executor.lose_stage(1, "killed")
        one.step()
        stored = one.executor.stored
        one.rejoin()
        one.executor.stored = stored
        one.run_until_idle()
        assert tokens_of(one, "early") == expected
    else:
        one.abort("early")
        if what == "abort and answer":
            one.executor.answer(5)
    settle_store(one)
    one.executor.answer(50)
    settle_store(one)
    assert one.allocator.num_free_blocks == one.allocator.num_blocks
    one.executor.answers_at_once = True
    run(one, "again", LONG)
    assert tokens_of(one, "again") == expected


@pytest.mark.parametrize("seed", range(40))
def test_h4_tokens_do_not_depend_on_when_blocks_come(seed: int) -> None:
    """One request after the other, most of whose beginnings are in the store; some have gone there."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(2, 40))] for _ in range(6)]
    one, catalogue = with_stored(prompts)
    other = again(
        one,
        catalogue,
        num_stages=chance.choice([1, 2, 3]),
        async_depth=chance.choice([0, 2]),
        recovers=True,
    )
    other.executor.answers_at_once = False
    for name in chance.sample(sorted(other.executor.stored), 3):
        del other.executor.stored[name]
    for number in [0, 1, 2, 3, 4, 5, 2, 4]:
        name = f"warm{number}-{len(other.requests)}"
        other.add(name, prompts[number], max_tokens=4, ignore_eos=True)
        may_be_lost = True
        while not other.core.is_idle:
            other.executor.answer(chance.choice([0, 0, 1, 3]))
            other.clock.advance(0.01)
            other.step(timeout_s=chance.choice([0.0, 1.0]))
            if may_be_lost and chance.random() < 0.02:
                may_be_lost = False  # at the second loss it would be given up
                lose_and_rejoin(other)
        assert tokens_of(other, name) == tokens_of(one, f"cold{number}")


def with_all_at_once(seed: int) -> tuple[CoreRig, set[str]]:
    """An engine to which everything has happened, and what was aborted."""
    chance = random.Random(seed)
    base = [chance.randrange(VOCAB_SIZE) for _ in range(30)]
    prompts = [
        [
            *base[: chance.randint(0, 26)],
            *(chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 12))),
        ]
        for _ in range(5)
    ]
    before, catalogue = with_stored(prompts)
    one = again(
        before,
        catalogue,
        num_stages=chance.choice([1, 2, 3]),
        async_depth=chance.choice([0, 1, 2]),
        num_blocks=chance.choice([14, 20, 40]),
        max_model_len=48,
        scheduler=msgspec.structs.replace(SMALL_SCHEDULER, prefill_chunk=chance.choice([2, 5, 8])),
        recovers=True,
    )
    run(one, "teaches how quick it is", prompts[0], max_tokens=1)
    one.executor.answers_at_once = False
    gone = chance.sample(sorted(one.executor.stored), min(len(one.executor.stored), chance.choice([0, 1, 2])))
    aborted: set[str] = set()
    may_be_lost = True
    for turn in range(200):
        what = chance.random()
        if what < 0.1 and len(one.requests) < 10:
            one.add(f"r{turn}", chance.choice(prompts), max_tokens=chance.randint(1, 8), ignore_eos=True)
        elif what < 0.13 and not all(map(one.is_finished, one.requests)):
            name = chance.choice([name for name in one.requests if not one.is_finished(name)])
            one.abort(name)
            aborted.add(name)
        elif what < 0.16:
            wanted = chance.choice([FlushCache(), Pause("keep"), Pause("wait"), Resume(), Resume()])
            one.core.operations.accept((b"", turn), wanted, one.core.steps_in_flight[1])
        elif what < 0.17 and may_be_lost:
            may_be_lost = False
            lose_and_rejoin(one)
        elif what < 0.2 and gone:
            one.executor.stored.pop(gone.pop(), None)
        one.executor.answer(chance.choice([0, 0, 0, 1, 2, 5]))
        one.clock.advance(chance.choice([0.0, 0.01, 0.1]))
        one.step(timeout_s=chance.choice([0.0, 1.0]))
    return one, aborted


@pytest.mark.parametrize("seed", range(25))
def test_h4_h16_whatever_happens_at_once_changes_no_token_and_leaves_nothing(seed: int) -> None:
    """Early starts, aborts, flushes, pauses, a loss, records that go."""
    one, aborted = with_all_at_once(seed)
    one.core.operations.accept((b"", -1), Resume(), one.core.steps_in_flight[1])
    for _ in range(600):
        one.executor.answer(50)
        one.clock.advance(0.01)
        one.step(timeout_s=1.0)
    assert one.core.is_idle
    assert one.allocator.num_free_blocks == one.allocator.num_blocks
    for arrival, name in enumerate(one.requests):
        if name not in aborted:
            assert one.result(name) == one.expected(name, arrival), name
