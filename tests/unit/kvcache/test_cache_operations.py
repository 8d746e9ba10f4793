"""Long random lives of a pool with a cache, against a model that knows what was written to each block."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from penstock.config import EvictionPolicy
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_hash
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache

BLOCK = 2
ROOT = root_hash()
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "priority")


@dataclass
class Owner:
    """A request: the names of what it writes, block by block."""

    hashes: list[bytes]
    num_written: int = 0  # whole blocks, those that it found included


@dataclass
class Life:
    """Owners over a pool, and what lies in each block."""

    chance: random.Random
    policy: EvictionPolicy
    num_blocks: int = 40
    contents: dict[int, bytes] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    num_found: int = 0
    num_started: int = 0

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.num_blocks, eviction_order(self.policy))
        self.blocks = BlockAllocator(BlockPool(self.num_blocks, self.cache), BLOCK)

    def step(self) -> None:
        act = self.chance.choices(
            (self.start, self.write, self.finish, self.distrust, self.lose_all), (40, 80, 38, 2, 0.2)
        )[0]
        act()

    def start(self) -> None:
        """Of a few families, so that beginnings are shared."""
        tokens = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 12) * BLOCK)]
        hashes = block_hashes(ROOT, tokens, BLOCK)
        found = self.blocks.find(hashes[: self.chance.randint(0, len(hashes))])
        for block, name in zip(found, hashes, strict=False):
            assert self.contents[block] == name, "a block was found that holds something else"
        if not self.blocks.has_room(len(tokens), found, 0):
            return
        owner = self.num_started
        self.num_started += 1
        self.num_found += len(found)
        self.blocks.attach(owner, found, self.chance.randrange(3))
        added = self.blocks.grow(owner, len(tokens))
        assert added is not None, "room was promised"
        self.own(added)
        self.owners[owner] = Owner(hashes, len(found))

    def own(self, blocks: list[int]) -> None:
        held = {block for owner in self.owners for block in self.blocks.table(owner)}
        assert held.isdisjoint(blocks), "a block that somebody holds was given out"
        for block in blocks:
            self.contents.pop(block, None)

    def write(self) -> None:
        """The plan that fills some blocks is issued, and with it they are named."""
        unfinished = [o for o, state in self.owners.items() if state.num_written < len(state.hashes)]
        if not unfinished:
            return
        owner = self.chance.choice(unfinished)
        state, table = self.owners[owner], self.blocks.table(owner)
        first = state.num_written
        state.num_written = self.chance.randint(first + 1, len(state.hashes))
        for place in range(first, state.num_written):
            others = [o for o in self.owners if o != owner and table[place] in self.blocks.table(o)]
            assert not others, "a shared block is written to"
            self.contents[table[place]] = state.hashes[place]
        self.blocks.name(owner, first, state.hashes[first : state.num_written], self.chance.randrange(3))

    def finish(self) -> None:
        if self.owners:
            owner = self.chance.choice(list(self.owners))
            del self.owners[owner]
            self.blocks.free(owner)

    def distrust(self) -> None:
        if self.owners:
            hashes = self.owners[self.chance.choice(list(self.owners))].hashes
            self.blocks.forget(hashes)
            assert self.blocks.find(hashes) == []

    def lose_all(self) -> None:
        self.blocks.forget_all()
        assert self.cache.num_cached == 0

    def check(self) -> None:
        self.blocks.check_invariants()
        held = {block for owner in self.owners for block in self.blocks.table(owner)}
        assert self.blocks.num_free_blocks == self.num_blocks - len(held), "a block is lost"
        for name in self.cache.names():
            (block,) = self.blocks.find([name])
            assert self.contents[block] == name


def live(seed: int, policy: EvictionPolicy, num_operations: int, check_every: int) -> Life:
    life = Life(random.Random(f"{policy} {seed}"), policy)
    for number in range(num_operations):
        life.step()
        if number % check_every == 0:
            life.check()
    while life.owners:
        life.finish()
    life.check()
    assert life.blocks.num_free_blocks == life.num_blocks
    assert life.num_found, "something was found"
    assert life.cache.num_evicted, "something was given up"
    return life


@pytest.mark.parametrize("policy", POLICIES)
def test_h9_no_block_is_lost_freed_twice_or_found_wrong(policy: EvictionPolicy) -> None:
    live(0, policy, 3000, check_every=10)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_h9_a_million_operations_lose_no_block(policy: EvictionPolicy) -> None:
    live(1, policy, 1_000_000, check_every=1000)
