"""A whole core over hosts with a store each, and ranks that hold tokens where keys and values would be.

Here the parts of blocks lie in one place; what each host has of them is what its catalogue says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from fakes import VOCAB_SIZE, CoreRig
from host_stores import AnsweringRanks, HostsExecutor, catalogue_of
from penstock.batch import RankLoaded
from penstock.errors import ErrorInfo
from penstock.kvcache.hosts_catalogue import HostsCatalogue
from penstock.kvcache.store_sites import store_sites
from penstock.kvstore.store import MemoryStore
from stand_in_hosts import LOADED
from stored_core import BLOCK, run, settle_store, tokens_of

PROMPT = [(5 * index) % VOCAB_SIZE for index in range(3 * BLOCK + 1)]
NUM_FOUND = 3 * BLOCK
LOST = ErrorInfo(kind="StageLostError", message="the host desk is lost.")


def ranks(*store_hosts: str) -> list[RankLoaded]:
    """One stage of two layers for each."""
    return [
        msgspec.structs.replace(LOADED, stage=stage, end_layer=2 * stage + 2, store_host=host)
        for stage, host in enumerate(store_hosts)
    ]


class Pipe:
    """An engine of two stages.

    Args:
        head, desk: the stores of the two hosts; None: both stages run on the head.
        parts: of all blocks, as `FakeExecutor.stored`.
    """

    def __init__(self, head: MemoryStore, desk: MemoryStore | None, parts: dict[bytes, Any]) -> None:
        self.answering = AnsweringRanks({} if desk is None else {1: desk})
        self.ranks = ranks("", "" if desk is None else "desk")
        self.catalogue = HostsCatalogue(catalogue_of(head))
        self.rig = CoreRig(
            num_stages=2,
            block_size=BLOCK,
            eviction="lru",
            recovers=True,
            catalogue=self.catalogue,
            executor_class=partial(HostsExecutor, ranks=self.answering),
        )
        self.rig.executor.stored = parts
        self.rig.scheduler.prefixes.meet_stores(store_sites(self.ranks), self.rig.executor)

    def rejoin(self, given: list[RankLoaded] | None = None) -> None:
        parts = self.rig.executor.stored
        self.rig.rejoin(given or self.ranks)
        self.rig.executor.stored = parts

    def close(self) -> None:
        self.rig.core.close()
        self.answering.close()


class Hosts:
    """What outlives engines: the stores of two hosts, and the parts of blocks."""

    def __init__(self) -> None:
        self.head, self.desk = MemoryStore(), MemoryStore()
        self.parts: dict[bytes, Any] = {}
        self._pipes: list[Pipe] = []

    def pipe(self, num_hosts: int) -> Pipe:
        self._pipes.append(Pipe(self.head, self.desk if num_hosts == 2 else None, self.parts))
        return self._pipes[-1]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()


def cold(pipe: Pipe) -> list[int]:
    assert run(pipe.rig, "cold", PROMPT) == 0
    settle_store(pipe.rig)
    return tokens_of(pipe.rig, "cold")


def test_g1_d15_what_two_hosts_have_stored_two_hosts_find(hosts: Hosts) -> None:
    tokens = cold(hosts.pipe(2))
    again = hosts.pipe(2)
    assert run(again.rig, "warm", PROMPT) == NUM_FOUND
    assert tokens_of(again.rig, "warm") == tokens
    assert again.rig.core.stats().store.loaded_blocks == 3


def test_g1_d15_what_is_on_the_other_hosts_disk_only_is_a_miss(hosts: Hosts) -> None:
    """Not a hit that fails: no rank is told to load anything."""
    tokens = cold(hosts.pipe(2))
    alone = hosts.pipe(1)
    assert run(alone.rig, "warm", PROMPT) == 0
    assert tokens_of(alone.rig, "warm") == tokens
    assert alone.rig.core.stats().store.failed_blocks == 0
    settle_store(alone.rig)
    assert run(hosts.pipe(1).rig, "warm", PROMPT) == NUM_FOUND, "the head has all layers now"
    assert run(hosts.pipe(2).rig, "warm", PROMPT) == NUM_FOUND, "and two hosts what they had"


def test_g1_d15_what_one_host_has_stored_two_find_if_both_have_it(hosts: Hosts) -> None:
    tokens = cold(hosts.pipe(1))
    assert run(hosts.pipe(2).rig, "warm", PROMPT) == 0, "nothing is on the desk"
    hosts.desk.records = copy.copy(hosts.head.records)
    both = hosts.pipe(2)
    assert run(both.rig, "warm", PROMPT) == NUM_FOUND
    assert tokens_of(both.rig, "warm") == tokens


def test_r9_a_host_that_never_answers_costs_the_patience_and_no_token(hosts: Hosts) -> None:
    tokens = cold(hosts.pipe(2))
    again = hosts.pipe(2)
    again.answering.silent = {1}
    again.rig.add("waits", PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(5):
        again.rig.step(timeout_s=1.0)
    assert not again.rig.updates["waits"], "it waits"
    again.rig.clock.advance(2.5)
    again.rig.run_until_idle()
    assert tokens_of(again.rig, "waits") == tokens
    assert again.rig.updates["waits"][0].num_cached_tokens == 0


def test_d6_g1_a_host_lost_in_the_middle_of_a_question_is_asked_again_when_it_is_back(hosts: Hosts) -> None:
    tokens = cold(hosts.pipe(2))
    again = hosts.pipe(2)
    again.answering.silent = {1}
    again.rig.add("waits", PROMPT, max_tokens=4, ignore_eos=True)
    again.rig.step(timeout_s=1.0)
    again.rig.core.lose_epoch(LOST)
    again.rig.clock.advance(20.0)  # more than its patience: it counts from when somebody can be asked
    again.answering.silent = set()
    again.rejoin()
    again.rig.run_until_idle()
    assert tokens_of(again.rig, "waits") == tokens
    assert again.rig.updates["waits"][0].num_cached_tokens == NUM_FOUND


def test_d6_g1_a_layout_over_the_hosts_that_are_left_finds_and_stores_its_own(hosts: Hosts) -> None:
    one = hosts.pipe(2)
    tokens = cold(one)
    for turn, num_found in enumerate([0, NUM_FOUND]):
        one.rig.core.lose_epoch(LOST)
        one.rejoin(ranks("", ""))
        assert run(one.rig, f"warm{turn}", PROMPT) == num_found, "what is stored anew is found"
        assert tokens_of(one.rig, f"warm{turn}") == tokens
        settle_store(one.rig)


def test_h5_what_the_store_loses_is_struck_on_both_hosts(hosts: Hosts) -> None:
    tokens = cold(hosts.pipe(2))
    gone = next(iter(hosts.parts))
    del hosts.parts[gone]
    again = hosts.pipe(2)
    assert run(again.rig, "warm", PROMPT) == 0
    assert tokens_of(again.rig, "warm") == tokens
    struck = [call.names for _, call in again.answering.calls if call.what == "strike"]
    assert [gone] in struck
