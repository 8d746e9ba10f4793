"""What the core wants of the catalogue of another host's store, carried out there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.batch import EntryAnswers, EntryCall
from penstock.errors import ProtocolError
from penstock.kvstore.catalogue import StoreCatalogue
from penstock.kvstore.entry_calls import NO_ENTRY_CALLS, EntryCalls
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.layer_share import LayerShare
from penstock.kvstore.names import record_key
from penstock.kvstore.store import MemoryStore

NAMES = [bytes([number]) * 32 for number in range(5)]
BACK = LayerShare.of([2, 3], 4).encoded()


class Rig:
    """A rank that answers for its host.

    Attributes:
        num_opened: how often the catalogue was opened.
    """

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.num_opened = 0
        self.calls = EntryCalls(self._open)

    def _open(self) -> StoreCatalogue:
        self.num_opened += 1
        return StoreCatalogue(GuardedStore(self.store), bytes(16))

    def answered(self) -> EntryAnswers:
        while (answers := self.calls.collect()) is None:
            assert self.calls.is_busy
        return answers


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.calls.close()


def test_g1_d15_a_rank_enters_counts_and_strikes_for_its_host(rig: Rig) -> None:
    rig.calls.carry_out(EntryCall(number=0, what="enter", names=NAMES[:3], share=BACK))
    assert not rig.calls.is_busy, "nobody waits for that"
    rig.calls.carry_out(EntryCall(number=7, what="count", names=NAMES, share=BACK))
    assert rig.answered() == EntryAnswers(counts={7: 3})
    rig.calls.carry_out(EntryCall(number=8, what="count", names=NAMES))
    assert rig.answered() == EntryAnswers(counts={8: 0}), "of all layers nothing is there"
    rig.calls.carry_out(EntryCall(number=0, what="strike", names=NAMES[1:2]))
    rig.calls.carry_out(EntryCall(number=9, what="count", names=NAMES, share=BACK))
    assert rig.answered() == EntryAnswers(counts={9: 1})
    assert (rig.calls.is_busy, rig.calls.collect()) == (False, None)
    assert rig.num_opened == 1


def test_h16_a_rank_empties_the_store_of_its_host(rig: Rig) -> None:
    rig.store.put({record_key(bytes(16), NAMES[0], 2, 0): b"part", b"y" * 40: b"another model's"})
    rig.calls.carry_out(EntryCall(number=4, what="empty"))
    assert rig.answered() == EntryAnswers(emptied={4: None})
    assert list(rig.store.records) == [b"y" * 40]
    assert not rig.calls.is_busy


def test_d6_answers_of_an_epoch_that_is_over_go_nowhere(rig: Rig) -> None:
    rig.calls.carry_out(EntryCall(number=7, what="count", names=NAMES, share=BACK))
    rig.calls.carry_out(EntryCall(number=8, what="empty"))
    rig.calls.reset()
    assert not rig.calls.is_busy
    rig.calls.carry_out(EntryCall(number=7, what="enter", names=NAMES[:2], share=BACK))
    rig.calls.carry_out(EntryCall(number=7, what="count", names=NAMES, share=BACK))
    assert rig.answered() == EntryAnswers(counts={7: 2}), "the number is another core's now"


def test_a_rank_that_is_not_asked_opens_nothing(rig: Rig) -> None:
    rig.calls.reset()
    rig.calls.close()
    assert (rig.calls.collect(), rig.num_opened) == (None, 0)


def test_a_rank_whose_store_is_the_cores_is_not_asked() -> None:
    assert (NO_ENTRY_CALLS.is_busy, NO_ENTRY_CALLS.collect()) == (False, None)
    with pytest.raises(ProtocolError, match="a store that this host does not have"):
        NO_ENTRY_CALLS.carry_out(EntryCall(number=1, what="count"))
