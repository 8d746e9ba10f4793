"""Which blocks host memory keeps: at most so many, the same on all ranks, never one that is being copied."""

from __future__ import annotations

import random

import pytest

from fake_catalogue import FakeCatalogue
from fakes import PLAIN_TIERS, FakeClock
from penstock.batch import ALL_BLOCKS, OrderResult
from penstock.kvcache import storage_tier
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.host_names import HostNames, OnlyHostNames
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.storage_tier import StorageTier
from penstock.kvcache.stored_names import StoredNames

NAMES = [bytes([number]) * 32 for number in range(30)]


def store(memory: HostNames, *numbers: int) -> None:
    """Blocks that all ranks have stored."""
    for number in numbers:
        assert memory.make_room(NAMES[number])
        memory.end_store(NAMES[number], "done")


def given_up(memory: HostNames) -> list[int]:
    return [NAMES.index(name) for name in memory.take_given_up()]


def test_h9_what_was_used_longest_ago_makes_room() -> None:
    memory = HostNames(3)
    store(memory, 0, 1, 2)
    assert given_up(memory) == []
    memory.use([NAMES[0], NAMES[1]])
    store(memory, 3, 4)
    assert given_up(memory) == [2, 1], "the first one of a chain stays longest"
    assert given_up(memory) == [], "each is told once"
    assert [NAMES[number] in memory for number in range(5)] == [True, False, False, True, True]


def test_h9_what_is_being_copied_is_not_given_up() -> None:
    memory = HostNames(2)
    assert memory.make_room(NAMES[0])
    memory.begin_copy(NAMES[0])
    assert memory.make_room(NAMES[1])
    assert not memory.make_room(NAMES[2]), "orders hold all of it"
    memory.end_load(NAMES[0], "done")
    assert not memory.make_room(NAMES[2]), "one order to copy it is open still"
    memory.end_store(NAMES[0], "done")
    assert memory.make_room(NAMES[2])
    assert given_up(memory) == [0]


def test_h13_a_block_that_a_rank_has_lost_is_given_up_when_it_is_not_being_copied_any_more() -> None:
    memory = HostNames(4)
    for _ in range(2):
        memory.begin_copy(NAMES[0])
        memory.begin_copy(NAMES[1])
    memory.end_load(NAMES[0], "failed")
    memory.end_load(NAMES[1], "failed")
    assert given_up(memory) == []
    memory.end_load(NAMES[0], "done")
    assert given_up(memory) == [0], "the catalogue has it no longer"
    memory.end_store(NAMES[1], "done")
    assert given_up(memory) == [], "all ranks have it anew"
    memory.begin_copy(NAMES[2])
    memory.end_load(NAMES[2], "late")
    assert given_up(memory) == [], "what the ranks have may be good"
    memory.begin_copy(NAMES[2])
    memory.end_store(NAMES[2], "late")
    memory.begin_copy(NAMES[3])
    memory.drop([NAMES[3]])
    memory.lose_all()
    assert given_up(memory) == [0, 2, 3]


def test_h9_a_load_that_is_larger_than_memory_leaves_it_full() -> None:
    memory = HostNames(2)
    for name in NAMES[:5]:
        memory.begin_copy(name)
    assert len(memory) == 5
    for name in NAMES[:5]:
        memory.end_load(name, "done")
    assert len(memory) == 2
    assert given_up(memory) == [0, 1, 2]


def test_h1_without_a_store_what_is_given_up_is_struck_and_not_loaded() -> None:
    catalogue = FakeCatalogue()
    stored = StoredNames(catalogue, 100)
    memory = OnlyHostNames(2, stored)
    for number in range(3):
        store(memory, number)
        stored.enter([NAMES[number]])
    assert catalogue.names == set(NAMES[1:3])
    assert NAMES[0] not in stored
    assert memory.count_there(NAMES[1:4]) == 2
    assert memory.count_there(NAMES[:3]) == 0, "the catalogue had answered before"
    memory.drop_all()
    assert catalogue.names == set()


def test_d6_ranks_that_may_not_have_heard_are_told_again() -> None:
    memory = HostNames(1)
    store(memory, 0, 1)
    assert given_up(memory) == [0]
    store(memory, 2)
    memory.make_room(NAMES[3])
    memory.lose_all()
    assert given_up(memory) == [0, 1, 2]
    store(memory, 4)
    assert given_up(memory) == [3], "its order was lost"


def test_h9_what_ranks_have_anew_is_not_given_up_again_after_a_loss() -> None:
    memory = HostNames(2)
    store(memory, 0, 1, 2, 3)
    assert given_up(memory) == [0, 1]
    store(memory, 0)
    memory.begin_copy(NAMES[1])
    memory.end_load(NAMES[1], "done")
    assert given_up(memory) == [2, 3]
    memory.lose_all()
    assert given_up(memory) == [2, 3], "all ranks have heard of the others, and have them anew"
    assert [NAMES[number] in memory for number in range(4)] == [True, True, False, False]


def test_h9_what_was_to_be_copied_anew_is_given_up_with_its_lost_order() -> None:
    memory = HostNames(1)
    store(memory, 0, 1)
    assert memory.make_room(NAMES[0])  # before any plan has told that it was given up
    memory.lose_all()
    assert given_up(memory) == [0, 1]
    assert len(memory) == 0


def test_h16_ranks_are_told_to_drop_all_until_they_have_heard_it() -> None:
    memory = HostNames(2)
    store(memory, 0, 1, 2)
    memory.drop_all()
    assert memory.take_given_up() == [ALL_BLOCKS], "and to store nothing of it"
    assert len(memory) == 0
    assert memory.make_room(NAMES[3])
    memory.lose_all()
    assert memory.take_given_up()[0] == ALL_BLOCKS, "the plan may be lost"
    assert len(memory) == 0, "and the ranks drop what they have had an order for, too"
    store(memory, 4)
    memory.lose_all()
    assert ALL_BLOCKS not in memory.take_given_up(), "all have answered an order behind it"
    assert NAMES[4] in memory


def test_r6_a_core_keeps_so_many_names_of_a_store_and_the_newest_ones() -> None:
    catalogue = FakeCatalogue()
    stored = StoredNames(catalogue, 4)
    stored.enter(NAMES[:3])
    stored.learn(NAMES[5:7], gone=NAMES[8:])
    stored.enter(NAMES[1:2])
    assert [number for number in range(30) if NAMES[number] in stored] == [1, 2, 5, 6]
    stored.learn(NAMES[9:12], gone=NAMES[2:3])
    assert [number for number in range(30) if NAMES[number] in stored] == [1, 9, 10, 11]
    assert catalogue.names == set(NAMES[:3]), "the store has them all the same"


@pytest.mark.parametrize(("num_blocks", "most"), [(1, 4), (2, 4), (3, 6)])
def test_r6_a_core_keeps_names_of_twice_its_pool_if_that_is_more(
    num_blocks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_tier, "MOST_NAMES", 4)
    blocks = BlockAllocator(BlockPool(num_blocks, PrefixCache(num_blocks, eviction_order("lru"))), 1)
    tier = StorageTier(blocks, FakeCatalogue(), FakeClock(), PLAIN_TIERS)

    def is_stored_anew(name: bytes) -> bool:
        blocks.attach(0, [])
        block = blocks.grow(0, 1)
        assert block is not None
        blocks.name(0, 0, [name])
        tier.store_named(block, [name])
        orders = tier.take_orders()
        tier.settle_orders([OrderResult(order.order, "done") for order in orders])
        blocks.free(0)
        blocks.forget([name])
        return len(orders) == 1

    assert all(is_stored_anew(name) for name in NAMES[:most])
    assert not any(is_stored_anew(name) for name in NAMES[:most])
    assert is_stored_anew(NAMES[most])
    assert [is_stored_anew(name) for name in NAMES[:2]] == [True, True], "the oldest is forgotten each time"


class Ranks:
    """Host memory of ranks that take plans at their own pace, as `runner.kv_transfer` does."""

    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        self.catalogue = FakeCatalogue()
        self.stored = StoredNames(self.catalogue, 100)
        self.memory = OnlyHostNames(num_blocks, self.stored)
        self.parts: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self.plans: list[tuple[list[bytes], list[bytes]]] = []  # of this epoch: given up, and ordered
        self.heard = [0] * num_ranks
        self.answered = 0  # plans whose orders all ranks have answered
        self.orders: list[bytes] = []  # for the next plan

    def order(self, name: bytes) -> None:
        if self.memory.make_room(name):
            self.orders.append(name)

    def plan(self) -> None:
        self.plans.append((self.memory.take_given_up(), self.orders))
        self.orders = []

    def hear(self, rank: int) -> None:
        """One rank takes its next plan."""
        if self.heard[rank] < len(self.plans):
            given_up, ordered = self.plans[self.heard[rank]]
            self.parts[rank].difference_update(given_up)
            self.parts[rank].update(ordered)
            self.heard[rank] += 1

    def answer(self) -> None:
        while self.answered < min(self.heard):
            for name in self.plans[self.answered][1]:
                self.memory.end_store(name, "done")
                self.stored.enter([name])
            self.answered += 1

    def lose(self) -> None:
        """The pipe breaks; the memory of the ranks stays."""
        self.memory.lose_all()
        self.plans, self.orders, self.answered = [], [], 0
        self.heard = [0] * len(self.heard)


@pytest.mark.parametrize("seed", range(20))
def test_h9_ranks_that_outlive_losses_have_what_the_core_counts_as_stored(seed: int) -> None:
    chance = random.Random(seed)
    ranks = Ranks(num_blocks=4, num_ranks=3)
    for _ in range(600):
        what = chance.random()
        if what < 0.4:
            ranks.order(chance.choice(NAMES[:9]))
        elif what < 0.55:
            ranks.plan()
        elif what < 0.9:
            ranks.hear(chance.randrange(3))
        elif what < 0.97:
            ranks.answer()
        else:
            ranks.lose()
    ranks.plan()
    for rank in range(3):
        while ranks.heard[rank] < len(ranks.plans):
            ranks.hear(rank)
    ranks.answer()
    kept = {name for name in NAMES if name in ranks.memory}
    for part in ranks.parts:
        assert ranks.catalogue.names <= part <= kept


def test_h9_names_are_bounded_whatever_happens() -> None:
    chance, memory = random.Random(7), HostNames(5)
    open_copies: list[bytes] = []
    there: set[bytes] = set()
    for _ in range(2_000):
        name = chance.choice(NAMES)
        what = chance.random()
        if what < 0.5 and memory.make_room(name):
            open_copies.append(name)
            there.add(name)
        elif what < 0.9 and open_copies:
            ended = open_copies.pop(chance.randrange(len(open_copies)))
            chance.choice([memory.end_store, memory.end_load])(ended, chance.choice(["done", "failed"]))
        elif what < 0.95:
            memory.drop([name])
        else:
            memory.use(chance.sample(NAMES, 4))
        there.difference_update(memory.take_given_up())
        assert there == {name for name in NAMES if name in memory}
        assert len(memory) <= 5
        assert set(open_copies) <= there
