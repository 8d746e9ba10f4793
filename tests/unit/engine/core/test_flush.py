"""Flushes of a running core: nothing old is found, nothing leaks, and running requests do not notice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fake_catalogue import FakeCatalogue
from fakes import VOCAB_SIZE, CoreRig
from penstock.batch import ALL_BLOCKS
from penstock.errors import ErrorInfo, StoreError
from penstock.kvcache.storage_tier import TierPolicy
from penstock.operations import FlushCache, Operation, OperationDone, Pause, Resume

BLOCK = 4

LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)
PROMPT = [(5 * index) % VOCAB_SIZE for index in range(3 * BLOCK + 1)]


class FlushedRig(CoreRig):
    """With a prefix cache, and with a store where a catalogue is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"eviction": "lru", "block_size": BLOCK, "recovers": True, **settings})
        self.num_asked = 0

    def operate(self, operation: Operation) -> None:
        self.num_asked += 1
        self.core.operations.accept((b"", self.num_asked), operation, self.core.steps_in_flight[1])
        self.core.check_invariants()

    def finished(self) -> list[OperationDone]:
        return [done for _, done in self.core.operations.take_done()]

    def complete(self) -> OperationDone:
        for _ in range(500):
            self.step(timeout_s=1.0)
            if found := self.finished():
                (done,) = found
                return done
        raise AssertionError("it never was complete")

    def run(self, name: str, prompt: list[int], **sampling: Any) -> int:
        """Tokens that were found for it."""
        self.add(name, prompt, **{"max_tokens": 4, "ignore_eos": True, **sampling})
        self.run_until_idle()
        return self.updates[name][0].num_cached_tokens

    def let_stores_go_out(self) -> None:
        for _ in range(8):
            self.clock.advance(1.0)
            self.step(timeout_s=1.0)

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates[name] for token in update.token_ids]

    @property
    def num_cached(self) -> int:
        return self.core.stats().cache.cached_blocks

    def assert_all_free(self) -> None:
        self.core.check_invariants()
        assert self.allocator.num_free_blocks == self.allocator.num_blocks


@pytest.mark.parametrize("num_stages", [1, 3])
def test_g4_nothing_that_was_computed_before_is_found(num_stages: int) -> None:
    rig = FlushedRig(num_stages=num_stages)
    rig.run("a", PROMPT)
    assert rig.run("b", PROMPT) == 3 * BLOCK
    first = rig.core.steps_in_flight[1]
    rig.operate(FlushCache())
    assert rig.num_cached == 0
    rig.assert_all_free()
    done = rig.complete()
    assert (done.accepted_step, done.completed_step, done.error) == (first, first, None)
    assert rig.run("c", PROMPT) == 0
    assert rig.run("d", PROMPT) == 3 * BLOCK, "what is computed from then on is found"
    assert rig.tokens("c") == rig.tokens("a")


@pytest.mark.parametrize("num_steps", range(0, 16, 3))
@pytest.mark.parametrize(("num_stages", "async_depth"), [(1, 0), (3, 2)])
def test_g4_who_runs_goes_on_and_lends_nothing_to_who_comes(
    num_stages: int, async_depth: int, num_steps: int
) -> None:
    rig = FlushedRig(num_stages=num_stages, async_depth=async_depth)
    rig.add("running", PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(num_steps):
        rig.step(timeout_s=1.0)
    was_started = bool(rig.executor.plans)
    rig.operate(FlushCache())
    rig.add("late", PROMPT, max_tokens=20, ignore_eos=True)
    rig.run_until_idle()
    for arrival, name in enumerate(rig.requests):
        assert rig.result(name) == rig.expected(name, arrival)
    assert rig.updates["late"][0].num_cached_tokens == 0 or not was_started
    rig.assert_all_free()


def test_g4_what_hangs_on_a_flushed_block_gets_no_name() -> None:
    """Else it could be found once somebody has computed what comes before it anew."""
    rig = FlushedRig()
    rig.add("running", PROMPT, max_tokens=30, ignore_eos=True)
    while len(rig.tokens("running")) < 8:
        rig.step(timeout_s=1.0)
    rig.operate(FlushCache())
    rig.run_until_idle()
    assert rig.num_cached == 0
    whole = PROMPT + rig.tokens("running")
    assert rig.run("short", PROMPT, max_tokens=1) == 0
    assert rig.run("all", whole) == 3 * BLOCK, "as many as the short one has computed"


def test_g4_who_starts_again_after_a_flush_is_found_again() -> None:
    rig = FlushedRig(num_stages=2)
    rig.add("r", PROMPT, max_tokens=12, ignore_eos=True)
    while len(rig.tokens("r")) < 3:
        rig.step(timeout_s=1.0)
    rig.operate(FlushCache())
    rig.core.lose_epoch(LOST)
    rig.rejoin()
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r", 0)
    assert rig.num_cached > 3


def test_h16_a_flush_waits_for_copies_to_the_store() -> None:
    rig = FlushedRig(catalogue=FakeCatalogue())
    rig.executor.answers_at_once = False
    rig.run("a", PROMPT, max_tokens=1)
    rig.let_stores_go_out()
    rig.operate(FlushCache())
    assert rig.num_cached == 0
    for num_held in (3, 2, 1):
        rig.let_stores_go_out()
        assert rig.finished() == []
        assert rig.allocator.num_blocks - rig.allocator.num_free_blocks == num_held, "copied, so held"
        rig.executor.answer(1)
    assert rig.complete().error is None
    rig.assert_all_free()
    assert len(rig.executor.stored) == 3
    rig.executor.answers_at_once = True
    assert rig.run("b", PROMPT) == 3 * BLOCK, "the store keeps what it has"


def test_h16_what_was_on_its_way_from_the_store_is_not_found() -> None:
    one = FlushedRig(catalogue=FakeCatalogue())
    one.run("a", PROMPT)
    one.let_stores_go_out()
    rig = FlushedRig(catalogue=one.tier and FakeCatalogue(names=set(one.executor.stored)), num_stages=2)
    rig.executor.stored = one.executor.stored
    rig.executor.answers_at_once = False
    rig.add("b", PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        rig.step(timeout_s=1.0)
    assert rig.core.stats().scheduler.num_running == 0, "it waits for its blocks"
    rig.operate(FlushCache())
    rig.run_until_idle()
    assert rig.updates["b"][0].num_cached_tokens == 0, "and does not any more"
    assert rig.finished() == []
    cached = rig.num_cached
    rig.executor.answer(3)
    assert rig.complete().error is None
    assert rig.num_cached == cached
    assert rig.core.stats().store.loaded_blocks == 3
    assert rig.tokens("b") == one.tokens("a")
    rig.executor.answer(10)
    rig.let_stores_go_out()
    rig.assert_all_free()


def test_h16_a_store_that_is_slow_to_answer_a_flushed_load_is_not_called_slow() -> None:
    one = FlushedRig(catalogue=FakeCatalogue())
    one.run("a", PROMPT)
    one.let_stores_go_out()
    rig = FlushedRig(catalogue=FakeCatalogue(names=set(one.executor.stored)))
    rig.executor.stored, rig.executor.answers_at_once = one.executor.stored, False
    rig.add("b", PROMPT, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.operate(FlushCache())
    rig.clock.advance(60.0)
    rig.run_until_idle()
    rig.executor.answers_at_once = True
    rig.executor.answer(10)
    rig.operate(FlushCache())
    rig.step()
    assert rig.run("c", PROMPT) == 3 * BLOCK, "it is waited for"


def test_h16_with_the_store_nothing_is_left_anywhere() -> None:
    catalogue = FakeCatalogue()
    rig = FlushedRig(catalogue=catalogue)
    rig.run("a", PROMPT)
    rig.executor.answers_at_once = False
    rig.run("b", PROMPT + PROMPT)
    rig.step(timeout_s=1.0)
    rig.operate(FlushCache(store=True))
    rig.let_stores_go_out()
    assert catalogue.emptyings == [], "not before what is on its way there has come"
    assert rig.run("c", PROMPT) == 0, "what is to go is not found any more"
    rig.executor.answers_at_once = True
    rig.executor.answer(10)
    assert rig.complete().error is None
    assert len(catalogue.emptyings) == 1
    assert catalogue.names == set()
    rig.run("d", [3] * 9)
    rig.let_stores_go_out()
    assert len(catalogue.names) == 3, "the next ones are stored"
    rig.assert_all_free()


def test_h16_with_the_store_ranks_drop_what_host_memory_has_and_write_none_of_it_back() -> None:
    rig = FlushedRig(catalogue=FakeCatalogue(), tier_policy=TierPolicy(host_blocks=8))
    rig.run("a", PROMPT)
    rig.let_stores_go_out()
    rig.operate(FlushCache(store=True))
    done = rig.complete()
    told = {plan.step_id: plan.given_up for plan in rig.executor.plans if plan.given_up}
    assert told == {done.completed_step: [ALL_BLOCKS]}


def test_h16_what_is_computed_while_the_store_is_emptied_is_not_stored_in_part() -> None:
    catalogue = FakeCatalogue()
    rig = FlushedRig(catalogue=catalogue)
    catalogue.is_slow = True
    rig.operate(FlushCache(store=True))
    rig.run("a", PROMPT)
    rig.let_stores_go_out()
    assert rig.finished() == []
    assert rig.executor.stored == {}
    catalogue.emptyings[0].is_done, catalogue.is_slow = True, False
    assert rig.complete().error is None
    assert rig.run("b", PROMPT) == 3 * BLOCK
    rig.run("c", [3] * 9)
    rig.let_stores_go_out()
    assert len(rig.executor.stored) >= 2


def test_h16_a_store_that_fails_ends_the_flush_with_its_error() -> None:
    catalogue = FakeCatalogue()
    rig = FlushedRig(catalogue=catalogue)
    rig.run("a", PROMPT)
    catalogue.is_slow = True
    rig.operate(FlushCache(store=True))
    rig.let_stores_go_out()
    (emptying,) = catalogue.emptyings
    emptying.error, emptying.is_done = StoreError("KV store /x: gone.").info(), True
    done = rig.complete()
    assert done.error is not None
    assert done.error.kind == "StoreError"
    assert rig.num_cached == 0


def test_h16_a_stage_that_is_lost_takes_its_copies_with_it() -> None:
    rig = FlushedRig(catalogue=FakeCatalogue(), num_stages=2)
    rig.executor.answers_at_once = False
    rig.run("a", PROMPT)
    rig.let_stores_go_out()
    rig.operate(FlushCache())
    rig.core.lose_epoch(LOST)
    rig.step()
    assert rig.finished() == []
    lost = rig.core.steps_in_flight[1]
    rig.rejoin()
    assert (rig.complete().completed_step or 0) >= lost
    rig.assert_all_free()


def test_g4_a_paused_engine_can_be_flushed() -> None:
    rig = FlushedRig(num_stages=2, catalogue=FakeCatalogue())
    rig.run("a", PROMPT)
    rig.operate(Pause("keep"))
    rig.complete()
    rig.operate(FlushCache(store=True))
    assert rig.complete().error is None
    assert rig.core.stats().scheduler.paused
    rig.operate(Resume())
    rig.complete()
    assert rig.run("b", PROMPT) == 0


@pytest.mark.parametrize("seed", range(30))
def test_h16_flushes_at_any_moment_leak_nothing_and_change_no_token(seed: int) -> None:
    chance = random.Random(seed)
    catalogue = FakeCatalogue()
    rig = FlushedRig(
        num_stages=chance.choice([1, 2, 3]),
        async_depth=chance.choice([0, 1, 2]),
        num_blocks=chance.choice([14, 64]),
        catalogue=chance.choice([None, catalogue]),
        store_when_found=chance.choice([0, 1]),
    )
    stored = rig.executor.stored
    for number in range(80):
        rig.step(timeout_s=chance.choice([0.0, 1.0]))
        rig.clock.advance(chance.choice([0.0, 0.5]))
        catalogue.is_slow = chance.random() < 0.3
        rig.executor.answers_at_once = chance.random() < 0.5
        rig.executor.answer(chance.randrange(4))
        what = chance.random()
        if what < 0.2:
            rig.operate(FlushCache(store=chance.random() < 0.5))
        elif what < 0.25:
            rig.core.lose_epoch(LOST)
            rig.rejoin()
            rig.executor.stored = stored
        elif what < 0.6:
            prompt = PROMPT[: chance.randrange(4, len(PROMPT))]
            rig.add(f"r{number}", prompt, max_tokens=chance.randrange(1, 9), ignore_eos=True)
        elif what < 0.65 and rig.requests:
            rig.abort(chance.choice(list(rig.requests)))
        for emptying in catalogue.emptyings:
            emptying.is_done |= chance.random() < 0.5
    catalogue.is_slow, rig.executor.answers_at_once = False, True
    for emptying in catalogue.emptyings:
        emptying.is_done = True
    rig.executor.answer(1000)
    rig.run_until_idle()
    rig.let_stores_go_out()
    rig.assert_all_free()
    assert not rig.core.operations.wants_plan, "every flush is complete"
    for arrival, name in enumerate(rig.requests):
        if rig.is_finished(name):
            assert rig.result(name) == rig.expected(name, arrival)
