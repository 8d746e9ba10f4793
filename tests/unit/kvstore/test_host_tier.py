"""Memory in front of a store: what is in it, what goes to the store and when, and what a bad store can do."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import pytest

from penstock.errors import StoreError
from penstock.kvstore.host_tier import ENTRY_BYTES, HostTier, NoStore
from penstock.kvstore.record import unseal
from penstock.kvstore.store import MemoryStore

KEYS = [bytes([number]) * 32 for number in range(40)]
PAYLOAD = bytes(100)
SIZE = 32 + 100 + ENTRY_BYTES


def payload(number: int) -> bytes:
    return bytes([number]) * 100


def records(*numbers: int) -> dict[bytes, bytes]:
    return {KEYS[number]: payload(number) for number in numbers}


def stored(store: MemoryStore) -> set[int]:
    """Numbers of the keys whose records are whole."""
    return {KEYS.index(key) for key, record in store.records.items() if unseal(key, record) is not None}


def in_memory(tier: HostTier) -> list[int]:
    """What was used longest ago comes first."""
    return [KEYS.index(key) for key in tier._payloads]


class BrokenStore(MemoryStore):
    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        raise StoreError("no answer.")

    def put(self, records: Mapping[bytes, bytes]) -> None:
        raise StoreError("no room.")


@pytest.mark.parametrize("writes_back", [False, True])
def test_h8_a_block_goes_to_the_store_at_once_or_when_memory_needs_its_room(writes_back: bool) -> None:
    store = MemoryStore()
    tier = HostTier(store, 3 * SIZE, writes_back=writes_back)
    assert tier.put(records(0, 1, 2))
    assert stored(store) == (set() if writes_back else {0, 1, 2})
    assert tier.put(records(3))
    assert in_memory(tier) == [1, 0, 3], "of one call the first counts as used last"
    assert stored(store) == ({2} if writes_back else {0, 1, 2, 3})
    assert tier.get(KEYS[:5]) == [payload(0), payload(1), payload(2), payload(3), None]
    tier.close()
    assert stored(store) == {0, 1, 2, 3}


def test_h16_what_is_discarded_never_comes_to_the_store() -> None:
    store = MemoryStore()
    tier = HostTier(store, 3 * SIZE, writes_back=True)
    tier.put(records(0, 1))
    tier.discard_all()
    assert tier.use().host_bytes_used == 0
    assert tier.get(KEYS[:2]) == [None, None]
    tier.put(records(2))
    tier.close()
    assert stored(store) == {2}


def test_h8_what_came_from_the_store_is_not_written_back() -> None:
    store = MemoryStore()
    HostTier(store, SIZE).put(records(0, 1, 2))
    store.put = None  # type: ignore[method-assign, assignment]
    tier = HostTier(store, SIZE, writes_back=True)
    for number in (0, 1, 2):
        assert tier.get([KEYS[number]]) == [payload(number)]
    tier.close()


def test_h1_memory_is_asked_first_and_the_store_for_the_rest() -> None:
    store = MemoryStore()
    tier = HostTier(store, 2 * SIZE)
    tier.put(records(0, 1, 2, 3))
    assert in_memory(tier) == [1, 0]
    store.records.clear()
    assert tier.get([KEYS[0], KEYS[2], KEYS[1]]) == [payload(0), None, payload(1)]
    use = tier.use()
    assert (use.host_records_read, use.host_bytes_read, use.host_bytes_written) == (2, 200, 400)
    assert (use.records_read, use.bytes_read, use.bytes_written) == (0, 0, 400)


@pytest.mark.parametrize("writes_back", [False, True])
def test_h9_what_is_released_leaves_memory_and_stays_in_the_store(writes_back: bool) -> None:
    store = MemoryStore()
    tier = HostTier(store, 4 * SIZE, writes_back=writes_back)
    tier.put(records(0, 1, 2))
    tier.release([KEYS[1], KEYS[0], KEYS[9]])
    assert in_memory(tier) == [2]
    assert tier.use().host_bytes_used == SIZE
    assert stored(store) == ({0, 1} if writes_back else {0, 1, 2})
    assert tier.get([KEYS[1]]) == [payload(1)]


def test_g4_what_is_cleared_is_in_memory_no_longer() -> None:
    tier = HostTier(NoStore(), 4 * SIZE)
    tier.put(records(0, 1))
    assert tier.clear(KEYS[0][:16], 1.0) is None
    assert tier.get(KEYS[:2]) == [None, payload(1)]
    assert tier.use().host_bytes_used == SIZE


def test_h9_what_belongs_together_stays_from_its_beginning() -> None:
    tier = HostTier(NoStore(), 4 * SIZE)
    tier.put(records(0, 1, 2, 3))
    for key in KEYS[:4]:
        tier.get([key])
    tier.used(KEYS[:4])
    tier.put(records(4, 5))
    assert in_memory(tier) == [1, 0, 5, 4]


def test_r9_memory_serves_what_it_has_whatever_the_store_does() -> None:
    tier = HostTier(BrokenStore(), 4 * SIZE)
    assert not tier.put(records(0, 1)), "it is not stored"
    assert tier.get([KEYS[0], KEYS[9]]) == [payload(0), None]
    lazy = HostTier(BrokenStore(), SIZE, writes_back=True)
    assert lazy.put(records(0))
    assert not lazy.put(records(1)), "what had to go is lost"
    lazy.close()


def test_a_payload_larger_than_memory_passes_through() -> None:
    store = MemoryStore()
    for writes_back in (False, True):
        tier = HostTier(store, SIZE - 1, writes_back=writes_back)
        assert tier.put(records(7))
        assert in_memory(tier) == []
        assert tier.use().host_bytes_used == 0
        assert stored(store) == {7}
        store.records.clear()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("writes_back", [False, True])
def test_h9_memory_and_store_are_those_of_a_plain_model(seed: int, writes_back: bool) -> None:
    chance, store = random.Random(seed), MemoryStore()
    tier = HostTier(store, 5 * SIZE, writes_back=writes_back)
    memory: OrderedDict[int, bool] = OrderedDict()  # whether the store has it
    behind: set[int] = set()

    def take(number: int, is_written: bool) -> None:
        memory.pop(number, None)
        memory[number] = is_written
        if len(memory) > 5:
            oldest, was_written = memory.popitem(last=False)
            if not was_written:
                behind.add(oldest)

    for _ in range(300):
        numbers = chance.sample(range(12), chance.randint(1, 4))
        what = chance.random()
        if what < 0.4:
            tier.put(records(*numbers))
            if not writes_back:
                behind.update(numbers)
            for number in reversed(numbers):
                take(number, not writes_back)
        elif what < 0.9:
            known = [number for number in numbers if number in memory or number in behind]
            found = tier.get([KEYS[number] for number in numbers])
            assert found == [payload(n) if n in known else None for n in numbers]
            hits = [number for number in numbers if number in memory]
            for number in hits:
                memory.move_to_end(number)
            for number in reversed([number for number in known if number not in hits]):
                take(number, True)
        else:
            tier.delete([KEYS[number] for number in numbers])
            for number in numbers:
                memory.pop(number, None)
                behind.discard(number)
        assert in_memory(tier) == list(memory)
        assert tier.use().host_bytes_used == len(memory) * SIZE
        assert stored(store) == behind
    tier.close()
    assert stored(store) == behind | set(memory)
