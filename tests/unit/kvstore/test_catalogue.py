"""The catalogue: asked beside, answered later, empty when the store does not work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.kvstore.catalogue import AT_ONCE, StoreCatalogue, StoreEmptying
from penstock.kvstore.found import Found
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.layer_share import WHOLE, LayerShare
from penstock.kvstore.lmdb_store import MIN_QUOTA_BYTES, LmdbStore
from penstock.kvstore.names import record_key
from penstock.kvstore.store import KVStore, MemoryStore

NAMES = [number.to_bytes(32, "big") for number in range(2 * AT_ONCE + 3)]


class BrokenStore(MemoryStore):
    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        raise StoreError("gone.")

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        raise StoreError("gone.")


@contextmanager
def catalogue(store: KVStore, namespace: bytes = bytes(16)) -> Iterator[StoreCatalogue]:
    with closing(StoreCatalogue(GuardedStore(store), namespace)) as made:
        yield made


def count(one: StoreCatalogue, names: Sequence[bytes], share: LayerShare = WHOLE) -> int:
    one.look_up(7, names, share)
    while not (found := one.answers()):
        pass
    ((ticket, number),) = found
    assert ticket == 7
    return number


@pytest.mark.parametrize("num_there", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, len(NAMES)])
def test_h13_the_longest_beginning_that_is_there(num_there: int) -> None:
    with catalogue(MemoryStore()) as one:
        one.enter(NAMES[:num_there])
        assert count(one, NAMES) == num_there


def test_what_was_struck_is_not_there_and_other_models_see_nothing() -> None:
    store = MemoryStore()
    with catalogue(store) as one:
        one.enter(NAMES[:3])
        one.strike(NAMES[1:2])
        assert count(one, NAMES) == 1
    with catalogue(store, namespace=b"x" * 16) as other:
        assert count(other, NAMES) == 0


FRONT, BACK, NOTHING = (LayerShare.of(layers, 3) for layers in ([0, 1], [2], []))


def test_d15_a_block_is_there_for_layers_that_were_stored_here_and_for_no_others() -> None:
    with catalogue(MemoryStore()) as one:
        one.enter(NAMES[:3], FRONT)
        one.enter(NAMES[:2], BACK)
        one.enter(NAMES[:1], FRONT)  # once more: nothing is lost by it
        assert count(one, NAMES[:4], FRONT) == 3
        assert count(one, NAMES[:4], BACK) == 2
        assert count(one, NAMES[:4]) == 2, "of these two all layers are there"
        assert count(one, NAMES[:4], LayerShare.of([0], 3)) == 3


def test_d15_what_all_layers_were_stored_of_is_there_for_each() -> None:
    with catalogue(MemoryStore()) as one:
        one.enter(NAMES[:2])
        one.enter(NAMES[:2], BACK)
        assert [count(one, NAMES, share) for share in (FRONT, BACK, WHOLE)] == [2, 2, 2]
        one.enter(NAMES[:3], BACK)
        assert [count(one, NAMES, share) for share in (FRONT, BACK, WHOLE)] == [2, 3, 2]


def test_a_host_without_layers_needs_nothing_and_has_nothing() -> None:
    store = MemoryStore()
    with catalogue(store) as one:
        one.enter(NAMES[:2], NOTHING)
        assert count(one, NAMES, NOTHING) == len(NAMES)
    assert store.records == {}


def test_r9_a_store_that_does_not_work_has_no_entries() -> None:
    with catalogue(BrokenStore()) as one:
        one.enter(NAMES)
        assert count(one, NAMES) == 0


def emptied(one: StoreCatalogue) -> StoreEmptying:
    emptying = one.empty()
    count(one, NAMES)  # it is asked in turn, so the emptying is over
    assert emptying.is_done
    return emptying


def test_h16_emptying_takes_all_of_this_model_and_nothing_else() -> None:
    store = MemoryStore()
    store.records[b"y" * 40] = b"another model's"
    with catalogue(store) as one:
        one.enter(NAMES)
        store.put({record_key(bytes(16), NAMES[0], 3, 1): b"part"})
        assert emptied(one).error is None
        assert list(store.records) == [b"y" * 40]
        one.enter(NAMES[:2])
        assert count(one, NAMES) == 2


def test_h16_a_store_that_cannot_be_emptied_says_why() -> None:
    with catalogue(BrokenStore()) as one:
        error = emptied(one).error
        assert error is not None
        assert (error.kind, error.message) == ("StoreError", "gone.")


def test_an_entry_that_is_asked_for_stays_in_a_store_that_must_give_up_others(tmp_path: Path) -> None:
    """Asking is a use: else the entries of what is found most would be the oldest ones."""
    store = LmdbStore(tmp_path, quota_bytes=MIN_QUOTA_BYTES)
    with catalogue(store) as one:
        one.enter(NAMES[:1])
        for number in range(12):
            assert count(one, NAMES[:1]) == 1, number
            store.put({bytes([number]) * 40: bytes(MIN_QUOTA_BYTES // 6)})
        found = {found.key for page in store.scan() for found in page}
        assert len(found & {bytes([number]) * 40 for number in range(12)}) < 12
