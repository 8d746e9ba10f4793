"""The catalogue over the stores of several hosts: the least of all counts, and who is lost has nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from host_stores import AnsweringRanks, catalogue_of
from penstock.batch import EntryAnswers
from penstock.errors import ErrorInfo
from penstock.kvcache.hosts_catalogue import HostsCatalogue
from penstock.kvcache.store_sites import ONE_STORE, HostStore, StoreSites
from penstock.kvstore.layer_share import WHOLE, LayerShare
from penstock.kvstore.store import MemoryStore

NAMES = [bytes([number]) * 32 for number in range(6)]
DESK, SHELF = 2, 3  # the ranks that answer for them
OWN, AT_DESK, AT_SHELF = (LayerShare.of(layers, 4) for layers in ([0, 1], [2], [3]))
SITES = StoreSites(own=OWN, others=(HostStore("desk", DESK, AT_DESK), HostStore("shelf", SHELF, AT_SHELF)))


class Rig:
    """Three hosts, each with a store to itself."""

    def __init__(self) -> None:
        self.own, self.desk, self.shelf = MemoryStore(), MemoryStore(), MemoryStore()
        self.ranks = AnsweringRanks({DESK: self.desk, SHELF: self.shelf})
        self.catalogue = HostsCatalogue(catalogue_of(self.own))
        assert self.catalogue.meet(SITES, self.ranks)

    def ask(self, ticket: int = 5) -> list[tuple[int, int]]:
        """What is answered within two looks: the own store and then the others."""
        self.catalogue.look_up(ticket, NAMES)
        return [*self.catalogue.answers(), *self.catalogue.answers()]

    def close(self) -> None:
        self.catalogue.close()
        self.ranks.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def enter_at(store: MemoryStore, count: int, share: LayerShare) -> None:
    with closing(catalogue_of(store)) as one:
        one.enter(NAMES[:count], share)


@pytest.mark.parametrize(
    ("counts", "expected"), [((6, 6, 6), 6), ((6, 2, 4), 2), ((6, 4, 0), 0), ((1, 6, 6), 1), ((0, 6, 6), 0)]
)
def test_g1_d15_a_block_counts_that_all_hosts_have(
    rig: Rig, counts: tuple[int, int, int], expected: int
) -> None:
    stores = (rig.own, OWN), (rig.desk, AT_DESK), (rig.shelf, AT_SHELF)
    for (store, share), count in zip(stores, counts, strict=True):
        enter_at(store, count, share)
    assert rig.ask() == [(5, expected)]
    asked = [len(call.names) for _, call in rig.ranks.calls]
    assert asked == ([counts[0]] * 2 if counts[0] else []), "about no more than the head has"


def test_g1_d15_layers_that_a_host_has_of_another_layout_are_no_use_to_it(rig: Rig) -> None:
    enter_at(rig.own, 6, WHOLE)
    enter_at(rig.desk, 6, AT_SHELF)
    enter_at(rig.shelf, 6, WHOLE)
    assert rig.ask() == [(5, 0)]
    enter_at(rig.desk, 3, AT_DESK)
    assert rig.ask() == [(5, 3)]


def test_g1_what_is_entered_or_struck_is_so_on_all_hosts(rig: Rig) -> None:
    rig.catalogue.enter(NAMES[:4])
    assert rig.ask() == [(5, 4)]
    rig.catalogue.strike(NAMES[2:3])
    assert rig.ask() == [(5, 2)]
    for store, share in ((rig.own, OWN), (rig.desk, AT_DESK), (rig.shelf, AT_SHELF)):
        with closing(catalogue_of(store)) as one:
            one.look_up(1, NAMES, share)
            assert one.answers() == [(1, 2)]
            one.look_up(2, NAMES)
            assert one.answers() == [(2, 0)], "no host has all layers"


def test_one_store_for_all_hosts_is_asked_alone() -> None:
    store = MemoryStore()
    with closing(HostsCatalogue(catalogue_of(store))) as one:
        assert not one.meet(ONE_STORE, AnsweringRanks({}))
        one.enter(NAMES[:2])
        one.look_up(1, NAMES)
        assert one.answers() == [(1, 2)]
        one.look_up(2, NAMES)
        one.lose_all()
        assert not one.meet(ONE_STORE, AnsweringRanks({}))
        assert one.answers() == [(2, 2)], "the loss of ranks is nothing to it"


def test_r9_a_host_that_cannot_be_asked_has_nothing(rig: Rig) -> None:
    rig.catalogue.enter(NAMES)
    rig.ranks.deaf = {SHELF}
    assert rig.ask() == [(5, 0)]


def test_d6_what_a_lost_host_was_asked_is_answered_by_nobody_and_can_be_asked_again(rig: Rig) -> None:
    rig.catalogue.enter(NAMES[:3])
    rig.ranks.silent = {SHELF}
    assert rig.ask(7) == [], "two of three have answered"
    rig.catalogue.lose_all()
    assert rig.ask(8) == [(8, 0)], "between two epochs nobody can be asked"
    rig.catalogue.look_up(9, NAMES)
    assert rig.catalogue.meet(SITES, rig.ranks)
    rig.ranks.silent = set()
    assert rig.catalogue.answers() == [], "neither the old answers nor that of the own store count"
    assert rig.ask(10) == [(10, 3)]


def test_d6_a_layout_over_fewer_hosts_asks_for_its_own_layers(rig: Rig) -> None:
    rig.catalogue.enter(NAMES[:3])
    assert rig.catalogue.meet(ONE_STORE, rig.ranks)
    assert rig.ask() == [(5, 0)], "the head has its own layers only"
    rig.catalogue.enter(NAMES[:1])
    assert rig.ask() == [(5, 1)]
    assert rig.catalogue.meet(SITES, rig.ranks)
    assert rig.ask() == [(5, 3)], "what each host had is there still"


def test_r15_answers_that_make_no_sense_are_misses(rig: Rig) -> None:
    rig.catalogue.enter(NAMES)

    class Liar(AnsweringRanks):
        def entry_answers(self) -> list[EntryAnswers]:
            return [EntryAnswers(counts={5: -3, 77: 4}), EntryAnswers(counts={5: 1 << 40}, emptied={3: None})]

    with closing(Liar({DESK: rig.desk, SHELF: rig.shelf})) as liar:
        rig.catalogue.meet(SITES, liar)
        assert rig.ask() == [(5, 0)]


def test_h16_emptying_takes_what_all_hosts_have(rig: Rig) -> None:
    rig.catalogue.enter(NAMES)
    emptying = rig.catalogue.empty()
    while not emptying.is_done:
        rig.catalogue.answers()
    assert emptying.error is None
    assert [store.records for store in (rig.own, rig.desk, rig.shelf)] == [{}] * 3


@pytest.mark.parametrize("how", ["deaf", "lost"])
def test_h16_a_host_that_was_not_emptied_is_an_error(rig: Rig, how: str) -> None:
    if how == "deaf":
        rig.ranks.deaf = {SHELF}
    else:
        rig.ranks.silent = {SHELF}
    emptying = rig.catalogue.empty()
    if how == "lost":
        rig.catalogue.lose_all()
    while not emptying.is_done:
        rig.catalogue.answers()
    assert isinstance(emptying.error, ErrorInfo)
    assert "was not emptied: the host is lost" in emptying.error.message
