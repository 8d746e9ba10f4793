"""A real core over ranks at their own pace, host memory alone behind the pool: which blocks are in it."""

from __future__ import annotations

import random

import pytest

from depth import sampled
from fake_catalogue import FakeCatalogue, names_in_memory
from fakes import VOCAB_SIZE
from penstock.kvcache.storage_tier import TierPolicy
from replicas import ReplicaRig

QUIET_TURNS = 400


def rig_of(
    chance: random.Random, catalogue: FakeCatalogue, max_blocks: int, *, has_store: bool
) -> ReplicaRig:
    return ReplicaRig(
        num_stages=chance.randint(1, 3),
        tp=chance.randint(1, 2),
        num_blocks=chance.choice([11, 16]),
        chance=chance,
        failure_rate=chance.choice([0.0, 0.05]),
        catalogue=catalogue,
        tier_policy=TierPolicy(host_blocks=max_blocks, has_store=has_store),
        max_model_len=40,
    )


def check_memory(rig: ReplicaRig, max_blocks: int) -> None:
    """No rank has more blocks than it has room for."""
    for part in rig.pipe.parts:
        assert len(part) <= max_blocks


def run_requests(rig: ReplicaRig, chance: random.Random, max_blocks: int, *, loses: bool) -> None:
    """Prompts that begin alike, and now and then the loss of a stage, whose memory is empty then."""
    families = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    for number in range(16):
        prompt = [*chance.choice(families)[: chance.randint(1, 24)], *[number] * chance.randint(0, 3)]
        rig.add(str(number), prompt, max_tokens=chance.randint(1, 10), ignore_eos=True)
        for _ in range(chance.randint(0, 6)):
            rig.step(timeout_s=chance.choice([0.0, 1.0]))
            check_memory(rig, max_blocks)
            rig.clock.advance(chance.choice([0.0, 0.1]))
        if loses and chance.random() < 0.2 and rig.core.steps_in_flight[1]:
            stage = chance.choice(rig.pipe.ranks).stage
            rig.pipe.lose_stage(stage)
            for rank in rig.pipe.ranks:
                if rank.stage == stage:
                    rank.part.clear()
            rig.step()
            rig.rejoin()
        while rig.core.stats().scheduler.num_waiting > 4:
            rig.step(timeout_s=1.0)
            rig.clock.advance(0.1)
    for _ in range(QUIET_TURNS):
        rig.step(timeout_s=1.0)
        check_memory(rig, max_blocks)
        rig.clock.advance(0.2)
    for name in rig.requests:
        if rig.finish_reason(name) != "error":  # lost twice with a stage
            assert rig.result(name) == rig.expected(name)


@pytest.mark.parametrize("seed", sampled(range(100), 5))
def test_h9_what_falls_out_of_one_ranks_memory_falls_out_of_all(seed: int) -> None:
    """Issue 25, point 7: all ranks have the same blocks, which are those of the catalogue."""
    chance, catalogue = random.Random(seed), FakeCatalogue()
    max_blocks = chance.choice([1, 3, 7, 20])
    rig = rig_of(chance, catalogue, max_blocks, has_store=False)
    run_requests(rig, chance, max_blocks, loses=False)
    assert rig.core.stats().store.stored_blocks
    for part in rig.pipe.parts:
        assert set(part) == catalogue.names


@pytest.mark.parametrize("seed", sampled(range(100), 5))
def test_h9_memory_that_outlives_a_loss_keeps_no_block_that_nobody_finds(seed: int) -> None:
    """Issue 25, point 7: ranks that live on have only what the core knows of."""
    chance, catalogue = random.Random(seed), FakeCatalogue()
    max_blocks = chance.choice([2, 5, 20])
    rig = rig_of(chance, catalogue, max_blocks, has_store=False)
    run_requests(rig, chance, max_blocks, loses=True)
    assert rig.tier is not None
    known = names_in_memory(rig.tier)
    assert catalogue.names <= known
    for part in rig.pipe.parts:
        assert set(part) <= known


def test_h13_a_part_that_one_rank_has_lost_is_given_up_by_all() -> None:
    """Issue 25, point 7."""
    catalogue = FakeCatalogue()
    rig = ReplicaRig(
        num_stages=2,
        num_blocks=4,
        catalogue=catalogue,
        max_model_len=16,
        tier_policy=TierPolicy(host_blocks=8, has_store=False),
    )
    ranks = range(2)

    def serve(name: str, prompt: list[int]) -> int:
        rig.add(name, prompt, max_tokens=1, ignore_eos=True)
        for _ in range(12):
            rig.clock.advance(0.1)
            rig.turn(*ranks)
        assert rig.result(name) == rig.expected(name)
        return rig.updates[name][0].num_cached_tokens

    serve("a", [1] * 9)
    serve("b", [2] * 13)
    serve("c", [3] * 13)
    first, second = list(rig.pipe.parts[0])[:2]
    del rig.pipe.parts[1][first]
    assert serve("d", [1] * 8) == 0
    given_up = [name for plan in rig.pipe.plans for name in plan.given_up]
    assert given_up == [first]
    assert second in rig.pipe.parts[0]
    assert all((first in part) == (first in catalogue.names) for part in rig.pipe.parts)
