"""Names of blocks, what is found, and what is given up first; against plain models of each policy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.engine import EvictionPolicy
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_hash, root_in_class
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvstore.names import BLOCK_HASH_BYTES

BLOCK = 4
ROOT = root_hash()
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "priority")


def allocator(num_blocks: int, policy: EvictionPolicy = "lru") -> BlockAllocator:
    return BlockAllocator(BlockPool(num_blocks, PrefixCache(num_blocks, eviction_order(policy))), BLOCK)


# --- names ------------------------------------------------------------------------------------------


def test_d15_a_name_says_what_a_block_holds_and_all_before_it() -> None:
    tokens = list(range(11))
    first, second = block_hashes(ROOT, tokens, BLOCK)
    assert block_hashes(first, tokens[4:], BLOCK) == [second]
    assert block_hashes(ROOT, tokens[4:], BLOCK)[0] != second
    assert block_hashes(root_hash("salt"), tokens, BLOCK)[0] != first
    assert {len(first), len(second)} == {BLOCK_HASH_BYTES}


def test_d15_names_are_the_same_on_every_machine() -> None:
    """They go into stores that other machines read."""
    (name,) = block_hashes(ROOT, [1, 2, 3, 1 << 31], BLOCK)
    assert name.hex() == "6f4de810ddbf4c0aa68ab4838dda084369804594aa0efe7a1c3a07fd91ee7e67"


def test_d15_a_name_says_in_which_class_a_block_was_computed() -> None:
    roots = [root_in_class(ROOT, name) for name in ("", "avx2 1", "avx2 2")]
    assert roots[0] == ROOT
    assert len({*roots, root_in_class(root_hash("salt"), "avx2 1")}) == 4


# --- what is found ----------------------------------------------------------------------------------


def hold(blocks: BlockAllocator, owner: int, tokens: list[int], priority: int = 0) -> int:
    """As the scheduler does: begin with what is found, compute the rest, make all findable."""
    hashes = block_hashes(ROOT, tokens, BLOCK)
    found = blocks.find(hashes)
    assert blocks.has_room(len(tokens), found, 0)
    blocks.attach(owner, found, priority)
    assert blocks.grow(owner, len(tokens)) is not None
    blocks.name(owner, len(found), hashes[len(found) :], priority)
    blocks.check_invariants()
    return len(found)


def test_blocks_are_shared_and_outlive_who_computed_them() -> None:
    blocks = allocator(8)
    assert hold(blocks, 1, [7] * 12) == 0
    assert hold(blocks, 2, [7] * 8 + [1] * 4) == 2
    assert blocks.table(1)[:2] == blocks.table(2)[:2]
    assert blocks.num_free_blocks == 4
    blocks.free(1)
    assert blocks.num_free_blocks == 5, "the one that only the first held"
    blocks.free(2)
    assert blocks.num_free_blocks == 8
    assert hold(blocks, 3, [7] * 12) == 3


def test_what_is_computed_twice_at_once_is_named_once() -> None:
    blocks = allocator(8)
    hashes = block_hashes(ROOT, [7] * 8, BLOCK)
    for owner in (1, 2):
        blocks.attach(owner, [])
        blocks.grow(owner, 8)
    for owner in (1, 2):
        blocks.name(owner, 0, hashes)
    assert blocks.find(hashes) == blocks.table(1)
    blocks.free(1)
    blocks.free(2)
    blocks.check_invariants()
    assert blocks.num_free_blocks == 8


def test_a_block_that_is_computed_again_takes_the_name_of_an_idle_one() -> None:
    """As the last block of a prompt that is there as a whole: its logits are wanted."""
    blocks = allocator(3)
    hashes = block_hashes(ROOT, [7] * 8, BLOCK)
    hold(blocks, 1, [7] * 8)
    blocks.free(1)
    (first, last) = blocks.find(hashes)
    blocks.attach(2, [first])
    blocks.grow(2, 8)
    blocks.name(2, 1, hashes[1:])
    blocks.check_invariants()
    assert blocks.find(hashes) == blocks.table(2) != [first, last]
    assert blocks.num_free_blocks == 1
    blocks.free(2)
    assert blocks.num_free_blocks == 3


def test_forgotten_blocks_are_found_no_more_and_lost_never() -> None:
    blocks = allocator(8)
    hold(blocks, 1, [7] * 8)
    hold(blocks, 2, [8] * 8)
    blocks.free(2)
    blocks.forget_all()
    assert blocks.find(block_hashes(ROOT, [7] * 8, BLOCK)) == []
    assert blocks.num_free_blocks == 6
    blocks.free(1)
    blocks.check_invariants()
    assert blocks.num_free_blocks == 8


# --- what is given up -------------------------------------------------------------------------------


def test_the_deepest_block_of_a_chain_goes_first() -> None:
    """Nothing behind a missing block can be found."""
    blocks = allocator(4)
    hold(blocks, 1, [7] * 12)
    blocks.free(1)
    hold(blocks, 2, [8] * 8)
    assert len(blocks.find(block_hashes(ROOT, [7] * 12, BLOCK))) == 2


def survivors(policy: EvictionPolicy) -> list[bool]:
    """Three chains of one block in three: a is used most, b matters most, c was used last. One must go."""
    blocks = allocator(3, policy)
    for owner, (token, priority) in enumerate([(1, 0), (1, 0), (1, 0), (2, 5), (3, 0), (3, 0)]):
        hold(blocks, owner, [token] * BLOCK, priority)
        blocks.free(owner)
    hold(blocks, 9, [4] * BLOCK)
    return [bool(blocks.find(block_hashes(ROOT, [token] * BLOCK, BLOCK))) for token in (1, 2, 3)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [False, True, True]), ("lfu", [True, False, True]), ("priority", [False, True, True])],
)
def test_h9_each_policy_gives_up_its_own(policy: EvictionPolicy, expected: list[bool]) -> None:
    assert survivors(policy) == expected


@pytest.mark.parametrize("policy", ["lfu", "priority"])
def test_h10_equal_blocks_go_by_their_hash_however_they_came(policy: EvictionPolicy) -> None:
    """By `lru` no two are equal: those of one event are of one chain (next test)."""
    orders = []
    for seed in range(4):
        cache = PrefixCache(6, eviction_order(policy))
        names = [bytes([number] * BLOCK_HASH_BYTES) for number in range(6)]
        random.Random(seed).shuffle(names)
        for block, name in enumerate(names):
            cache.name(block, 0, name)
        for block in range(6):  # all at one event
            cache.let_go(block)
        orders.append([names[cache.evict()] for _ in range(6)])
    assert all(order == sorted(order) for order in orders)


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_h10_blocks_that_were_let_go_together_go_the_deepest_first(policy: EvictionPolicy) -> None:
    """Of each chain, and all of the one that was let go first before any of the other."""
    blocks = allocator(6, policy)
    chains = [block_hashes(ROOT, [token] * 3 * BLOCK, BLOCK) for token in (2, 1)]
    for owner in (0, 1):
        blocks.grow(owner, 3 * BLOCK)
        blocks.name(owner, 0, chains[owner])
    for owner in (0, 1):
        blocks.free(owner)
    left = []
    for number in range(6):
        blocks.grow(2 + number, BLOCK)
        left.append(tuple(len(blocks.find(chain)) for chain in chains))
    assert left == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


# --- against a plain model --------------------------------------------------------------------------


@dataclass
class Plain:
    """A cache of names, as the definition of its policy says it, with lists that are searched."""

    num_blocks: int
    policy: EvictionPolicy
    held: dict[int, list[bytes]] = field(default_factory=dict)
    known: dict[bytes, list[int]] = field(default_factory=dict)  # uses, priority, freed at, depth
    now: int = 0

    def hold(self, owner: int, names: list[bytes], priority: int) -> int:
        found = 0
        while found < len(names) and names[found] in self.known:
            found += 1
        self.held[owner] = names
        for depth, name in enumerate(names):
            if depth < found:
                self.known[name][0] += 1
                self.known[name][1] = max(self.known[name][1], priority)
                continue
            while self._num_held() + self._num_idle() > self.num_blocks:
                self._evict()
        for depth, name in enumerate(names[found:], found):
            self.known.setdefault(name, [0, priority, -1, depth])
        return found

    def free(self, owner: int) -> None:
        self.now += 1
        for name in self.held.pop(owner):
            if not self._is_held(name):
                self.known[name][2] = self.now

    def _is_held(self, name: bytes) -> bool:
        return any(name in names for names in self.held.values())

    def _num_held(self) -> int:
        return len({name for names in self.held.values() for name in names})

    def _num_idle(self) -> int:
        return sum(not self._is_held(name) for name in self.known)

    def _evict(self) -> None:
        def worth(name: bytes) -> tuple[int, int, int, bytes]:
            uses, priority, freed_at, depth = self.known[name]
            rank = {"lru": 0, "lfu": uses, "priority": priority}[self.policy]
            return rank, freed_at, -depth, name

        del self.known[min((name for name in self.known if not self._is_held(name)), key=worth)]


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS)
def test_h10_what_is_found_is_what_the_policy_says(
    policy: EvictionPolicy, requests: list[tuple[int, int, int, int, bool]]
) -> None:
    blocks, plain = allocator(9, policy), Plain(9, policy)
    alive: list[int] = []
    for owner, (family, length, branch, priority, stays) in enumerate(requests):
        tokens = [family] * (BLOCK * length) + [10 + branch] * BLOCK
        names = block_hashes(ROOT, tokens, BLOCK)
        while alive and not blocks.has_room(len(tokens), blocks.find(names), 0):
            gone = alive.pop(0)
            blocks.free(gone)
            plain.free(gone)
        assert hold(blocks, owner, tokens, priority) == plain.hold(owner, names, priority)
        if stays:
            alive.append(owner)
        else:
            blocks.free(owner)
            plain.free(owner)
        assert set(plain.known) == set(blocks.pool.cache.names())
