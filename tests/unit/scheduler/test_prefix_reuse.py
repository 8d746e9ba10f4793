"""A whole core with a prefix cache, over ranks that hold tokens where keys and values would be.

The ranks of `fakes` read what they sample from out of the slots that the plans name, and refuse a write to a
block that somebody else holds too. So a block that is found, and holds anything but what is wanted, shows.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakes import SMALL_SCHEDULER, VOCAB_SIZE, CoreRig
from penstock.config.engine import EvictionPolicy, SchedulerConfig

BLOCK = 4
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "priority")


def rig(**settings: Any) -> CoreRig:
    return CoreRig(**{"eviction": "lru", "block_size": BLOCK, **settings})


def run(one: CoreRig, name: str, prompt: list[int], **sampling: Any) -> int:
    """Tokens that were found for it."""
    one.add(name, prompt, **{"max_tokens": 4, "ignore_eos": True, **sampling})
    one.run_until_idle()
    return one.updates[name][0].num_cached_tokens


def tokens_of(one: CoreRig, name: str) -> list[int]:
    return [token for update in one.updates[name] for token in update.token_ids]


@pytest.mark.parametrize("length", range(1, 4 * BLOCK + 2))
def test_a_prompt_seen_before_is_found_but_for_its_last_token(length: int) -> None:
    prompt = [(5 * index) % VOCAB_SIZE for index in range(length)]
    one = rig()
    assert run(one, "cold", prompt) == 0
    assert run(one, "warm", prompt) == (length - 1) // BLOCK * BLOCK
    assert tokens_of(one, "warm") == tokens_of(one, "cold")


def test_what_was_generated_is_found_as_well() -> None:
    """The next turn of a conversation begins with the answer of the one before."""
    one = rig()
    prompt = list(range(6))
    run(one, "first", prompt, max_tokens=7)
    answer = tokens_of(one, "first")
    # The last token that was sampled was never run.
    assert run(one, "second", [*prompt, *answer, 9, 9]) == (len(prompt) + len(answer) - 1) // BLOCK * BLOCK


def test_only_what_begins_the_same_is_found() -> None:
    one = rig()
    run(one, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(one, "same block, other place", [5, 6, 7, 8, 9]) == 0
    assert run(one, "first block", [1, 2, 3, 4, 9, 9, 9, 9, 9]) == BLOCK
    assert run(one, "other salt", [1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="b") == 0
    assert run(one, "same salt", [1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="b") == 2 * BLOCK


def test_a_block_is_found_as_soon_as_its_plan_is_issued() -> None:
    """Ranks run plans in order: who comes a plan later may read what is being computed."""
    one = rig(num_stages=3, latency=None)
    prompt = [3] * (2 * BLOCK + 1)
    one.add("a", prompt, max_tokens=2)
    one.step()
    one.add("b", prompt, max_tokens=2)
    one.step()
    assert one.executor.plans[1].start_positions == [2 * BLOCK]
    assert one.executor.plans[1].new_blocks[0][:2] == one.executor.plans[0].new_blocks[0][:2]
    one.run_until_idle()
    assert tokens_of(one, "a") == tokens_of(one, "b")


def test_two_that_compute_the_same_in_one_plan_keep_their_own_blocks() -> None:
    one = rig(scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=64))
    for name in "ab":
        one.add(name, [3] * 9, max_tokens=2)
    one.run_until_idle()
    assert one.executor.plans[0].start_positions == [0, 0]
    assert one.core.stats().cache.cached_blocks == 2, "only one of each is found"
    assert run(one, "c", [3] * 9) == 8


def test_d10_a_preempted_request_comes_back_from_the_cache() -> None:
    """Its blocks are given up last to first, so its beginning lives longest."""
    prompts = {"a": [1] * 9, "b": [2] * 9}
    one, alone = rig(num_blocks=8, max_model_len=32), rig(num_blocks=64, max_model_len=32)
    for name, prompt in prompts.items():
        one.add(name, prompt, max_tokens=12, ignore_eos=True)
        alone.add(name, prompt, max_tokens=12, ignore_eos=True)
    one.run_until_idle()
    alone.run_until_idle()
    stats = one.core.stats()
    assert stats.scheduler.num_preemptions
    assert stats.cache.prefix_hit_tokens
    for name in prompts:
        assert tokens_of(one, name) == tokens_of(alone, name)


def test_cached_blocks_make_room_for_whoever_needs_them() -> None:
    one = rig(num_blocks=6, max_model_len=24)
    run(one, "a", [1] * 13)
    assert one.core.stats().cache.free_blocks == 6, "what nobody holds can be had"
    assert run(one, "b", [2] * 20) == 0
    stats = one.core.stats()
    assert stats.cache.evicted_blocks
    assert run(one, "c", [2] * 20) == 16
    assert stats.scheduler.num_preemptions == 0


def test_found_blocks_do_not_count_as_room_for_the_rest() -> None:
    """A request that finds idle blocks takes them from those that could be given up."""
    one = rig(num_blocks=6, max_model_len=24, latency=None)
    one.add("a", [1] * 16, max_tokens=1)
    one.run_until_idle()
    one.add("b", [2] * 8, max_tokens=8, ignore_eos=True)
    one.step()
    one.add("c", [1] * 20, max_tokens=1)  # five blocks, three of them found: b has two of six
    one.step()
    assert [new.request_id for plan in one.executor.plans for new in plan.new_rows] == ["a", "b"]
    one.run_until_idle()
    assert one.is_finished("c")


def test_r7_numbers_that_are_no_good_are_not_found_again() -> None:
    one = rig()
    one.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    one.executor.fail_rows[2] = [0]
    one.run_until_idle()
    assert one.updates["a"][-1].finish_reason == "error"
    assert one.core.stats().cache.cached_blocks == 0
    assert run(one, "b", [1] * 9) == 0


def test_numbers_that_only_no_constraint_liked_are_found_again() -> None:
    one = rig()
    one.add("a", [1] * 9, max_tokens=8, ignore_eos=True)
    one.executor.fail_rows[2] = [0]
    one.executor.unmet = "its constraints allow no token"
    one.run_until_idle()
    assert one.updates["a"][-1].finish_reason == "error"
    assert run(one, "b", [1] * 9) == 8


def test_r4_nothing_is_found_that_a_lost_stage_had() -> None:
    one = rig(num_stages=2, recovers=True)
    run(one, "a", [1] * 9)
    one.executor.lose_stage(1, "killed")
    one.step()
    assert one.core.stats().cache.cached_blocks == 0
    one.rejoin()
    assert run(one, "b", [1] * 9) == 0
    assert tokens_of(one, "b") == tokens_of(one, "a")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_tokens_do_not_depend_on_the_cache(policy: EvictionPolicy, seed: int) -> None:
    """Requests of a few families over a small pool, with aborts, preemptions and evictions."""
    chance = random.Random(f"{policy} {seed}")
    settings: dict[str, Any] = {
        "num_stages": chance.choice([1, 2, 3]),
        "async_depth": chance.choice([0, 1]),
        "num_blocks": chance.choice([12, 20, 40]),
        "max_model_len": 40,
        "scheduler": SMALL_SCHEDULER,
    }
    one = rig(**settings, eviction=policy)
    families = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    prompts, aborted = {}, set()
    for number in range(60):
        family = chance.choice(families)
        prompt = [*family[: chance.randint(1, 24)], *([number % VOCAB_SIZE] * chance.randint(0, 4))]
        name = f"r{number}"
        prompts[name] = prompt
        one.add(name, prompt, max_tokens=chance.randint(1, 8), ignore_eos=True, priority=number % 3)
        for _ in range(chance.randint(0, 4)):
            one.step(timeout_s=chance.choice([0.0, 1.0]))
        if chance.random() < 0.15:
            victim = chance.choice(list(prompts))
            if one.abort(victim):
                aborted.add(victim)
    one.run_until_idle()
    assert one.core.stats().cache.prefix_hit_tokens, "the cache was used"
    for name, prompt in prompts.items():
        if name in aborted:
            continue
        alone = CoreRig(**settings | {"num_blocks": 64}, block_size=BLOCK)
        wanted = one.requests[name].sampling.max_tokens
        alone.add(name, prompt, max_tokens=wanted, ignore_eos=True)
        alone.run_until_idle()
        assert tokens_of(one, name) == tokens_of(alone, name), name
