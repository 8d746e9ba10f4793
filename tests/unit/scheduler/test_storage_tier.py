"""A whole core with a store, over ranks that hold tokens where keys and values would be.

The ranks of `fakes` carry orders out for real: a block that was loaded wrong, or too early, or into a block
that somebody uses, shows in what is sampled.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from depth import sampled
from fake_catalogue import FakeCatalogue, names_in_memory
from fakes import SMALL_SCHEDULER, VOCAB_SIZE, CoreRig
from penstock.batch import StoreUse
from penstock.config.engine import PrefetchPolicy, SchedulerConfig
from penstock.errors import ErrorInfo
from penstock.kvcache.prefetching import ANSWER_S, prefetch_patience
from penstock.kvcache.storage_tier import TierPolicy
from penstock.process.rhythm import next_beat
from stand_in_hosts import LOADED
from stored_core import BLOCK, again, rig, run, settle_store, tokens_of


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_h1_what_one_engine_has_stored_another_finds(num_stages: int, length: int) -> None:
    prompt = [(5 * index) % VOCAB_SIZE for index in range(length)]
    one, catalogue = rig()
    assert run(one, "cold", prompt) == 0
    settle_store(one)
    other = again(one, catalogue, num_stages=num_stages)
    assert run(other, "warm", prompt) == (length - 1) // BLOCK * BLOCK
    assert tokens_of(other, "warm") == tokens_of(one, "cold")
    assert other.core.stats().store.loaded_blocks == (length - 1) // BLOCK


def test_h5_a_block_counts_as_stored_when_all_ranks_have_answered_and_is_held_until_then() -> None:
    one, catalogue = rig(num_blocks=8, max_model_len=16)
    one.executor.answers_at_once = False
    run(one, "a", [1] * 9)
    settle_store(one)
    assert catalogue.names == set()
    assert one.core.stats().cache.free_blocks == 6, "two blocks, a quarter of the pool, are being copied"
    one.executor.answer(2)
    settle_store(one)
    assert len(catalogue.names) == 2
    assert one.core.stats().cache.free_blocks == 7, "and now the third"
    one.executor.answer(1)
    one.step()
    assert len(catalogue.names) == 3
    assert one.core.stats().cache.free_blocks == 8


def test_g1_h17_ranks_that_come_back_in_another_class_find_nothing_of_before() -> None:
    """Neither in the store, nor in the names that a request has asked for while the pipe was lost."""
    prompt = [(5 * index) % VOCAB_SIZE for index in range(3 * BLOCK + 1)]
    one, catalogue = rig(recovers=True)
    run(one, "cold", prompt)
    settle_store(one)
    found = []
    for number, name in enumerate(["avx2 1", "avx2 1", "", "avx2 1"]):
        one.core.lose_epoch(ErrorInfo(kind="StageLostError", message="stage 1 was killed."))
        one.add(f"waits{number}", prompt, max_tokens=4, ignore_eos=True)
        stored = one.executor.stored
        one.rejoin([msgspec.structs.replace(LOADED, numeric_class=name)])
        one.executor.stored = stored
        one.run_until_idle()
        settle_store(one)
        assert tokens_of(one, f"waits{number}") == tokens_of(one, "cold")
        found.append(one.updates[f"waits{number}"][0].num_cached_tokens)
        assert one.core.numeric_classes == [name]
    assert found == [0, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK]
    assert len(catalogue.names) >= 2 * 3


def test_h3_a_request_waits_for_its_blocks_and_only_so_long() -> None:
    one, catalogue = rig()
    run(one, "a", [1] * 13)
    settle_store(one)
    other = again(one, catalogue)
    other.executor.answers_at_once = False
    other.add("b", [1] * 13, max_tokens=4, ignore_eos=True)
    for _ in range(5):
        other.step(timeout_s=1.0)
    assert not [new for plan in other.executor.plans for new in plan.new_rows], "it waits"
    other.clock.advance(2.5)
    other.run_until_idle()
    assert other.updates["b"][0].num_cached_tokens == 0
    assert tokens_of(other, "b") == tokens_of(one, "a")
    other.executor.answer(10)
    other.step()
    assert run(other, "c", [1] * 13) == 12, "what came too late is there for the next"


@pytest.mark.parametrize(("num_come", "is_first_lost"), [(1, False), (2, False), (2, True)])
def test_h3_a_request_that_waits_no_longer_begins_with_what_has_come(
    num_come: int, is_first_lost: bool
) -> None:
    """Of three blocks, as far as none is missing; the rest comes later, and no block is lost."""
    one, catalogue = rig()
    prompt = list(range(2, 15))
    run(one, "a", prompt)
    settle_store(one)
    other = again(one, catalogue, num_blocks=16, max_model_len=32)
    other.executor.answers_at_once = False
    if is_first_lost:
        del other.executor.stored[next(iter(other.executor.stored))]
    other.add("b", prompt, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        other.step(timeout_s=1.0)
    other.executor.answer(num_come)
    other.step(timeout_s=1.0)
    assert not other.updates["b"], "it waits for the rest"
    other.clock.advance(2.5)
    other.run_until_idle()
    assert other.updates["b"][0].num_cached_tokens == (0 if is_first_lost else num_come * BLOCK)
    assert tokens_of(other, "b") == tokens_of(one, "a")
    other.executor.answer(3)
    other.step(timeout_s=1.0)
    assert other.core.stats().cache.free_blocks == 16
    assert run(other, "c", prompt) == 12
    assert tokens_of(other, "c") == tokens_of(one, "a")


@pytest.mark.parametrize(
    ("policy", "wait_s", "num_found"),
    [("timeout", 0.0, None), ("timeout", 2.5, 4), ("best-effort", 0.0, 4), ("wait-all", 3 * ANSWER_S, None)],
)
def test_h3_a_policy_says_how_long_a_request_waits(
    policy: PrefetchPolicy, wait_s: float, num_found: int | None
) -> None:
    """Issue 25, point 8. One of three blocks has come when a request's turn comes, behind another one."""
    one, catalogue = rig()
    prompt = list(range(2, 15))
    run(one, "a", prompt)
    settle_store(one)
    limits = TierPolicy(patience=prefetch_patience(policy, 2.0))
    other = again(one, catalogue, scheduler=SchedulerConfig(max_num_seqs=1), tier_policy=limits)
    other.executor.answers_at_once = False
    other.add("before", [30], max_tokens=6, ignore_eos=True)
    other.add("b", prompt, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        other.step(timeout_s=1.0)
    other.executor.answer(1)
    other.clock.advance(wait_s)
    for _ in range(12):
        other.step(timeout_s=1.0)
    started = [update.num_cached_tokens for update in other.updates["b"][:1]]
    assert started == ([] if num_found is None else [num_found])
    other.executor.answer(4)
    other.run_until_idle()
    assert other.updates["b"][0].num_cached_tokens == (12 if num_found is None else num_found)
    assert tokens_of(other, "b") == tokens_of(one, "a")
    other.executor.answer(9)
    settle_store(other)
    assert other.core.stats().cache.free_blocks == 64


@pytest.mark.parametrize(
    ("policy", "answer_s"), [("timeout", 2.0), ("best-effort", 0.0), ("wait-all", ANSWER_S)]
)
def test_h3_no_policy_waits_for_ever_for_a_store_that_does_not_answer(
    policy: PrefetchPolicy, answer_s: float
) -> None:
    """Issue 25, point 8."""
    one, catalogue = rig(tier_policy=TierPolicy(patience=prefetch_patience(policy, 2.0)))
    catalogue.is_slow = True
    one.add("a", [1] * 13, max_tokens=1)
    if answer_s:
        one.clock.advance(answer_s - 0.1)
        one.step()
        assert not one.executor.plans[-1:] or not one.executor.plans[-1].rows, "it waits"
        assert one.core.next_wakeup() <= one.clock() + 0.2
        one.clock.advance(0.2)
    one.run_until_idle()
    assert one.updates["a"]


@pytest.mark.parametrize("policy", ["timeout", "wait-all"])
def test_h3_a_block_that_fails_ends_the_wait_for_it(policy: PrefetchPolicy) -> None:
    """Issue 25, point 8."""
    one, catalogue = rig()
    run(one, "a", [1] * 13)
    settle_store(one)
    other = again(one, catalogue, tier_policy=TierPolicy(patience=prefetch_patience(policy, 2.0)))
    del other.executor.stored[list(other.executor.stored)[1]]
    assert run(other, "b", [1] * 13) == BLOCK
    assert tokens_of(other, "b") == tokens_of(one, "a")


@pytest.mark.parametrize("policy", ["timeout", "wait-all"])
def test_h3_d2_requests_wait_for_the_store_from_the_new_epoch_on(policy: PrefetchPolicy) -> None:
    """Between two epochs no rank can load anything, however long ranks take to load their weights."""
    one, _ = rig(recovers=True, tier_policy=TierPolicy(patience=prefetch_patience(policy, 2.0)))
    run(one, "cold", list(range(2, 15)))
    one.add("runs", list(range(20, 33)), max_tokens=30, ignore_eos=True)
    while len(tokens_of(one, "runs")) < 16:
        one.clock.advance(1.0)
        one.step(timeout_s=1.0)
    one.core.lose_epoch(ErrorInfo(kind="StageLostError", message="stage 1 was killed."))
    one.add("waits", list(range(2, 15)), max_tokens=4, ignore_eos=True)
    one.clock.advance(30.0)
    stored, found = one.executor.stored, one.core.stats().cache.prefix_hit_tokens
    one.rejoin()
    one.executor.stored = stored
    one.run_until_idle()
    assert one.updates["waits"][0].num_cached_tokens == 12
    assert one.core.stats().cache.prefix_hit_tokens - found >= 12 + 20, "its answer is found too"
    for arrival, name in enumerate(one.requests):
        assert one.result(name) == one.expected(name, arrival)


def test_nobody_wakes_up_for_a_request_that_waits_no_longer() -> None:
    """A store that does not answer must not keep the core busy."""
    one, catalogue = rig()
    run(one, "a", [1] * 13)
    settle_store(one)
    for is_slow in (True, False):
        other = again(one, catalogue)
        catalogue.is_slow, other.executor.answers_at_once = is_slow, False
        other.add("b", [1] * 13, max_tokens=1)
        other.step()
        assert other.clock() < other.core.next_wakeup() < other.clock() + 2.1
        other.clock.advance(2.5)
        other.run_until_idle()
        assert other.core.next_wakeup() == next_beat(other.clock()), "the next probe"


def test_r9_one_request_waits_in_vain_for_a_store_that_does_not_answer_and_not_each() -> None:
    one, catalogue = rig()
    run(one, "a", [1] * 13)
    settle_store(one)
    other = again(one, catalogue)
    catalogue.is_slow = True
    other.add("b", [1] * 13, max_tokens=1)
    other.step()
    other.clock.advance(2.5)
    other.run_until_idle()
    started = other.clock()
    other.add("c", [2] * 13, max_tokens=1)
    other.run_until_idle()
    assert other.clock() == started, "it did not wait"
    catalogue.is_slow = False
    other.add("d", [3] * 13, max_tokens=1)
    other.run_until_idle()
    assert run(other, "e", [1] * 13 + [2]) == 12, "the store answers again"


def test_what_the_store_has_given_up_is_stored_again() -> None:
    one, catalogue = rig(num_blocks=8, max_model_len=24)
    run(one, "a", [1] * 9)
    settle_store(one)
    catalogue.names.clear()
    run(one, "b", [2] * 20)
    run(one, "c", [3] * 20)
    assert run(one, "d", [1] * 9) == 0
    settle_store(one)
    assert run(again(one, catalogue), "e", [1] * 9) == 8


@pytest.mark.parametrize("num_stages", [1, 2])
def test_h2_the_first_token_comes_sooner_from_the_store_than_by_computing_the_prompt_again(
    num_stages: int,
) -> None:
    """Of a slow model: in the time of a step, which computes one block, the store brings four."""
    prompt = [(5 * index) % VOCAB_SIZE for index in range(8 * BLOCK + 1)]
    slow: dict[str, Any] = {"scheduler": SchedulerConfig(prefill_chunk=BLOCK), "num_stages": num_stages}
    slow["latency"] = None
    one, catalogue = rig(**slow)
    cold = steps_to_first_token(one, "cold", prompt)
    one.executor.answers_at_once = True
    one.executor.answer(100)
    settle_store(one)
    other = again(one, catalogue, **slow)
    warm = steps_to_first_token(other, "warm", prompt)
    assert other.updates["warm"][0].num_cached_tokens == 8 * BLOCK
    assert tokens_of(other, "warm") == tokens_of(one, "cold")
    assert cold >= 9, "steps, one for each chunk"
    assert warm <= cold / 2


def steps_to_first_token(one: CoreRig, name: str, prompt: list[int]) -> int:
    """How long it is until a request has its first token, in the time of a step."""
    one.executor.answers_at_once = False
    one.add(name, prompt, max_tokens=1)
    for count in range(50):
        one.step()
        if tokens_of(one, name):
            return count
        one.executor.answer(4)
        if one.executor.num_inflight:
            one.executor.release(1)
    raise AssertionError("no token has come")


def test_h2_blocks_come_while_others_run() -> None:
    """Whoever waits behind others has its blocks when its turn comes."""
    one, catalogue = rig()
    run(one, "a", [1] * 13)
    settle_store(one)
    other = again(one, catalogue, scheduler=SMALL_SCHEDULER)
    for number in range(SMALL_SCHEDULER.max_num_seqs):
        other.add(f"busy{number}", [2 + number] * 5, max_tokens=6, ignore_eos=True)
    other.add("late", [1] * 13, max_tokens=4, ignore_eos=True)
    other.run_until_idle()
    assert other.updates["late"][0].num_cached_tokens == 12
    assert tokens_of(other, "late") == tokens_of(one, "a")


def test_h13_a_chain_is_as_long_as_its_first_block_that_fails_on_any_rank() -> None:
    one, catalogue = rig()
    run(one, "a", [1] * 13)
    settle_store(one)
    other = again(one, catalogue)
    names = list(one.executor.stored)
    del other.executor.stored[names[1]]
    assert run(other, "b", [1] * 13) == BLOCK
    assert tokens_of(other, "b") == tokens_of(one, "a")
    assert other.core.stats().store.failed_blocks == 1
    assert names[1] not in catalogue.names or other.executor.stored.get(names[1]), (
        "it is struck, or stored anew"
    )


def test_h14_h16_nothing_found_or_nobody_left_holds_nothing() -> None:
    one, catalogue = rig(num_blocks=6, max_model_len=24)
    catalogue.is_slow = True
    one.add("gone", [1] * 9)
    one.step()
    one.abort("gone")
    catalogue.is_slow = False
    one.run_until_idle()
    assert one.core.stats().cache.free_blocks == 6
    run(one, "a", [1] * 9)
    settle_store(one)
    other = again(one, catalogue, num_blocks=6, max_model_len=24)
    other.executor.answers_at_once = False
    other.add("gone", [1] * 9)
    other.step()
    other.step()
    assert other.core.stats().cache.free_blocks == 4, "two blocks are reserved"
    other.abort("gone")
    other.executor.answer(2)
    other.step()
    assert other.core.stats().cache.free_blocks == 6
    assert other.core.stats().cache.cached_blocks == 2


def test_h1_h9_what_is_loaded_takes_nothing_that_it_is_found_behind() -> None:
    """Of a chain two blocks are in the pool, and used longest ago; the rest comes from the store."""
    prompt = list(range(2, 27))
    one, catalogue = rig()
    run(one, "a", prompt)
    settle_store(one)
    other = again(one, catalogue, num_blocks=8, max_model_len=32)
    run(other, "head", prompt[:9], max_tokens=1)
    run(other, "else", [1] * 21)
    assert other.core.stats().cache.cached_blocks == 8
    assert run(other, "b", prompt) == 24
    assert tokens_of(other, "b") == tokens_of(one, "a")
    assert other.core.stats().cache.free_blocks == 8


def test_h8_blocks_may_be_stored_only_when_they_are_found() -> None:
    one, catalogue = rig(store_when_found=2)
    for number in range(3):
        run(one, str(number), [1] * 9)
        settle_store(one)
        assert len(catalogue.names) == (2 if number == 2 else 0), number


@pytest.mark.parametrize("host_blocks", [0, 20])
@pytest.mark.parametrize("answers_at_once", [True, False])
def test_r7_numbers_that_are_no_good_leave_the_store(answers_at_once: bool, host_blocks: int) -> None:
    """Also where ranks answer, when they are known to be no good, that they have stored them."""
    one, catalogue = rig(tier_policy=TierPolicy(host_blocks=host_blocks))
    one.executor.answers_at_once = answers_at_once
    one.executor.fail_rows[2] = [0]
    run_failed = [1] * 9
    one.add("a", run_failed, max_tokens=8, ignore_eos=True)
    one.run_until_idle()
    assert one.updates["a"][-1].finish_reason == "error"
    one.executor.answer(9)
    settle_store(one)
    assert catalogue.names == set()
    assert one.tier is not None
    assert names_in_memory(one.tier) == set()
    other = again(one, catalogue)
    assert run(other, "b", run_failed) == 0


def test_d2_after_a_loss_requests_begin_with_what_the_store_has() -> None:
    one, catalogue = rig(num_stages=2, recovers=True)
    one.add("a", [1] * 13, max_tokens=12, ignore_eos=True)
    for _ in range(6):
        one.step(timeout_s=1.0)
    stored = one.executor.stored
    assert catalogue.names
    one.executor.lose_stage(1, "killed")
    one.step()
    one.rejoin()
    one.executor.stored = stored
    one.run_until_idle()
    starts = [plan.start_positions[0] for plan in one.executor.plans if plan.new_rows]
    assert starts[0] >= 12
    alone = CoreRig(block_size=BLOCK)
    alone.add("a", [1] * 13, max_tokens=12, ignore_eos=True)
    alone.run_until_idle()
    assert tokens_of(one, "a") == tokens_of(alone, "a")


@pytest.mark.parametrize("seed", sampled(range(60), 15))
def test_r9_tokens_do_not_depend_on_the_store(seed: int) -> None:
    """Several engines after another over one store, with late answers, lost parts, aborts, losses."""
    chance = random.Random(seed)
    catalogue, stored = FakeCatalogue(), dict[bytes, list[tuple[int, int]]]()
    families = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    hits = 0
    for life in range(3):
        settings: dict[str, Any] = {
            "num_stages": chance.choice([1, 2, 3]),
            "async_depth": chance.choice([0, 1]),
            "num_blocks": chance.choice([16, 40]),
            "max_model_len": 40,
            "recovers": True,
        }
        one, _ = rig(catalogue=catalogue, store_when_found=chance.choice([0, 1]), **settings)
        one.executor.stored = stored
        one.executor.answers_at_once = chance.random() < 0.3
        aborted: set[str] = set()
        for number in range(25):
            name = f"{life} {number}"
            prompt = [*chance.choice(families)[: chance.randint(1, 24)], *[number] * chance.randint(0, 3)]
            one.add(name, prompt, max_tokens=chance.randint(1, 8), ignore_eos=True)
            for _ in range(chance.randint(0, 5)):
                one.executor.answer(chance.randint(0, 3))
                catalogue.is_slow = chance.random() < 0.3
                one.step(timeout_s=chance.choice([0.0, 1.0]))
                one.clock.advance(chance.choice([0.0, 0.1, 1.0]))
            if chance.random() < 0.1 and one.abort(name):
                aborted.add(name)
            if stored and chance.random() < 0.2:
                del stored[chance.choice(list(stored))]
            if chance.random() < 0.04:
                answers_at_once = one.executor.answers_at_once
                one.executor.lose_stage(0, "killed")
                one.step()
                one.rejoin()
                one.executor.stored, one.executor.answers_at_once = stored, answers_at_once
        catalogue.is_slow = False
        for _ in range(400):
            one.executor.answer(8)
            one.step(timeout_s=1.0)
            one.clock.advance(0.5)
        assert one.core.is_idle
        hits += one.core.stats().store.loaded_blocks
        assert one.core.stats().cache.free_blocks == settings["num_blocks"], "a block is lost"
        for name, request in one.requests.items():
            if name not in aborted and one.updates[name][-1].finish_reason != "error":
                alone = CoreRig(block_size=BLOCK, num_blocks=64, max_model_len=40)
                alone.add(
                    name, request.prompt_token_ids, max_tokens=request.sampling.max_tokens, ignore_eos=True
                )
                alone.run_until_idle()
                assert tokens_of(one, name) == tokens_of(alone, name), name
    assert hits


def test_what_ranks_and_core_have_done_with_the_store_never_falls() -> None:
    one, catalogue = rig(recovers=True, num_stages=2)
    catalogue.own_use = StoreUse(bytes_read=100, call_failures=2)
    one.executor.told_use = StoreUse(
        bytes_read=5, bytes_written=7, verify_failures=1, switched_off=2, failure="full"
    )
    one.step()
    stats = one.core.stats()
    assert (stats.store.use.bytes_read, stats.store.use.bytes_written) == (105, 7)
    assert (stats.store.use.verify_failures, stats.store.use.call_failures, stats.store.use.switched_off) == (
        1,
        2,
        2,
    )
    assert stats.store.use.failure == "full"
    one.core.lose_epoch(ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1))
    one.rejoin()
    assert one.core.stats().store.use.switched_off == 0, "who still leaves it alone says so in the new epoch"
    one.executor.told_use = StoreUse(bytes_read=1, switched_off=1)
    one.step()
    stats = one.core.stats()
    assert (stats.store.use.bytes_read, stats.store.use.bytes_written, stats.store.use.switched_off) == (
        106,
        7,
        1,
    )


def test_without_a_store_there_is_nothing_to_tell() -> None:
    one = CoreRig(eviction="lru")
    one.step()
    assert one.core.stats().store.use.bytes_read == 0
