"""Long random lives of a pool with a cache, against a model that knows what was written to each block.

Requests come, write, share and go; blocks are copied out to a store and loaded from it meanwhile. The driver
of `live` draws from a seed, as long as one likes; hypothesis drives the same life as a state machine, and
finds short ones.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock.config.engine import EvictionPolicy
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_hash
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache

BLOCK = 2
BLOCK_BYTES = 4096
ROOT = root_hash()
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "priority")


@dataclass
class Owner:
    """A request: the names of what it writes, block by block."""

    hashes: list[bytes]
    num_written: int = 0  # whole blocks, those that it found included


@dataclass
class Load:
    """Blocks that are being filled from the store, of a chain from its `first` on."""

    blocks: list[int]
    first: int
    names: list[bytes]


@dataclass
class Life:
    """Owners over a pool, what lies in each block, and a store beside it.

    Attributes:
        bytes_out, bytes_in: copied from the pool to the store, and back.
    """

    chance: random.Random
    policy: EvictionPolicy
    num_blocks: int = 40
    longest: int = 12  # chain, in blocks
    contents: dict[int, bytes] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    stored: dict[bytes, int] = field(default_factory=dict)  # bytes of each block in the store, by name
    chains: deque[list[bytes]] = field(default_factory=lambda: deque(maxlen=20))  # of the newest owners
    saves: list[tuple[list[int], list[bytes]]] = field(default_factory=list)  # under way
    loads: list[Load] = field(default_factory=list)
    bytes_out: int = 0
    bytes_in: int = 0
    num_found: int = 0
    num_started: int = 0

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.num_blocks, eviction_order(self.policy))
        self.blocks = BlockAllocator(BlockPool(self.num_blocks, self.cache), BLOCK)

    def step(self) -> None:
        acts = (self.start, self.write, self.finish, self.distrust, self.lose_all)
        copies = (self.save, self.end_save, self.load, self.end_load)
        self.chance.choices((*acts, *copies), (40, 80, 38, 2, 0.2, 10, 10, 10, 10))[0]()

    def chain(self) -> list[bytes]:
        """Of a few families, so that beginnings are shared."""
        tokens = [self.chance.randrange(2) for _ in range(self.chance.randint(1, self.longest) * BLOCK)]
        return block_hashes(ROOT, tokens, BLOCK)

    def start(self) -> None:
        hashes = self.chain()
        self.chains.append(hashes)
        found = self.blocks.find(hashes[: self.chance.randint(0, len(hashes))])
        for block, name in zip(found, hashes, strict=False):
            assert self.contents[block] == name, "a block was found that holds something else"
        if not self.blocks.has_room(len(hashes) * BLOCK, found, 0):
            return
        owner = self.num_started
        self.num_started += 1
        self.num_found += len(found)
        self.blocks.attach(owner, found, self.chance.randrange(3))
        added = self.blocks.grow(owner, len(hashes) * BLOCK)
        assert added is not None, "room was promised"
        self.own(added)
        self.owners[owner] = Owner(hashes, len(found))

    def own(self, blocks: list[int]) -> None:
        assert self.held().isdisjoint(blocks), "a block that somebody holds was given out"
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

    def save(self) -> None:
        """What is there of a chain is copied out; nobody else may get these blocks meanwhile."""
        hashes = self.chance.choice(self.chains) if self.chains else []
        if blocks := self.blocks.find(hashes):
            self.blocks.pin(blocks)
            self.saves.append((blocks, hashes))

    def end_save(self) -> None:
        if self.saves:
            blocks, hashes = self.saves.pop(self.chance.randrange(len(self.saves)))
            for block, name in zip(blocks, hashes, strict=False):
                assert self.contents[block] == name, "a block that is being copied was written to"
                self.stored[name] = BLOCK_BYTES
                self.bytes_out += BLOCK_BYTES
            self.blocks.unpin(blocks)

    def load(self) -> None:
        """What the pool has not of a chain comes from the store, as far as there is room."""
        hashes = self.chance.choice(self.chains) if self.chains else []
        first = len(self.blocks.find(hashes))
        wanted = list(itertools.takewhile(self.stored.__contains__, hashes[first:]))
        count = min(len(wanted), self.blocks.num_free_blocks)
        if count:
            blocks = self.blocks.reserve(count)
            self.own(blocks)
            self.loads.append(Load(blocks, first, wanted[:count]))

    def end_load(self) -> None:
        """As many of the first as have come count, and may be released before the rest has been answered."""
        if self.loads:
            load = self.loads.pop(self.chance.randrange(len(self.loads)))
            come, cut = (self.chance.randint(0, len(load.blocks)) for _ in range(2))
            for block, name in zip(load.blocks[:come], load.names, strict=False):
                self.contents[block] = name
                self.bytes_in += self.stored[name]
            early = min(come, cut)
            self.blocks.release_reserved(load.blocks[:early], load.first, load.names[:early])
            rest = load.names[early:come]
            self.blocks.release_reserved(load.blocks[early:], load.first + early, rest)

    def held(self) -> set[int]:
        """Blocks that a request has, or that are being copied."""
        copied = {block for blocks, _ in self.saves for block in blocks} | {
            block for load in self.loads for block in load.blocks
        }
        return copied | {block for owner in self.owners for block in self.blocks.table(owner)}

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
        held, idle = self.held(), set(self.cache.idle_blocks())
        num_free = self.blocks.num_free_blocks - len(idle)  # hold nothing
        assert held.isdisjoint(idle)
        in_use = BLOCK_BYTES * (len(held) + len(idle))
        assert in_use + BLOCK_BYTES * num_free == BLOCK_BYTES * self.num_blocks, "bytes of the pool are lost"
        assert sum(self.stored.values()) <= self.bytes_out, "what is stored was copied"
        for name in self.cache.names():
            (block,) = self.blocks.find([name])
            assert self.contents[block] == name

    def end(self) -> None:
        """Everybody goes, and nothing is held any more."""
        while self.saves:
            self.end_save()
        while self.loads:
            self.end_load()
        while self.owners:
            self.finish()
        self.check()
        assert self.held() == set()
        assert self.blocks.num_free_blocks == self.num_blocks


def live(seed: int, policy: EvictionPolicy, num_operations: int, check_every: int) -> Life:
    life = Life(random.Random(f"{policy} {seed}"), policy)
    for number in range(num_operations):
        life.step()
        if number % check_every == 0:
            life.check()
    life.end()
    assert life.num_found, "something was found"
    assert life.cache.num_evicted, "something was given up"
    assert life.bytes_in, "something came from the store"
    return life


@pytest.mark.parametrize("policy", POLICIES)
def test_h9_no_block_is_lost_freed_twice_or_found_wrong(policy: EvictionPolicy) -> None:
    live(0, policy, 3000, check_every=10)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_h9_a_million_operations_lose_no_block(policy: EvictionPolicy) -> None:
    live(1, policy, 1_000_000, check_every=1000)


class Machine(RuleBasedStateMachine):
    """A life of which hypothesis chooses each act, and a seed for what is drawn in it."""

    num_found = num_evicted = bytes_in = 0  # in all lives

    @initialize(chance=st.randoms(use_true_random=True), policy=st.sampled_from(POLICIES))
    def begin(self, chance: random.Random, policy: EvictionPolicy) -> None:
        self.life = Life(chance, policy, num_blocks=4, longest=3)

    @rule()
    def start(self) -> None:
        self.life.start()

    @rule()
    def write(self) -> None:
        self.life.write()

    @rule()
    def come_and_go(self) -> None:
        """One request, from start to end."""
        if not self.life.owners:
            self.life.start()
            self.life.write()
            self.life.finish()

    @rule()
    def finish(self) -> None:
        self.life.finish()

    @rule()
    def distrust(self) -> None:
        self.life.distrust()

    @rule()
    def lose_all(self) -> None:
        self.life.lose_all()

    @rule()
    def save(self) -> None:
        self.life.save()

    @rule()
    def save_whole(self) -> None:
        self.life.save()
        self.life.end_save()

    @rule()
    def end_save(self) -> None:
        self.life.end_save()

    @rule()
    def load(self) -> None:
        self.life.load()

    @rule()
    def end_load(self) -> None:
        self.life.end_load()

    @invariant()
    def holds(self) -> None:
        self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()
            Machine.num_found += self.life.num_found
            Machine.num_evicted += self.life.cache.num_evicted
            Machine.bytes_in += self.life.bytes_in


def test_h9_no_short_life_loses_a_block() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=40, stateful_step_count=40, derandomize=True, deadline=None)
    )
    assert min(Machine.num_found, Machine.num_evicted, Machine.bytes_in) > 0, "all of it took place"
