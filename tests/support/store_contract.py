"""What every KV store must do, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.kvstore.clearing import clear_records
from penstock.kvstore.found import SCAN_KEYS
from penstock.kvstore.names import namespace, record_key
from penstock.kvstore.store import KVStore

SPACE = namespace(bytes(32), dtype="bfloat16", block_size=32, kind="keys and values")
KEYS = [record_key(SPACE, n.to_bytes(32, "big"), layer, 0) for n in range(40) for layer in range(4)]
RECORDS = {key: key * 3 for key in KEYS}
FOREIGN = {b"[" * 16 + n.to_bytes(32, "big"): b"other" for n in range(400)}


def listed(store: KVStore, prefix: bytes = b"") -> dict[bytes, int]:
    """Size of each record."""
    pages = list(store.scan(prefix))
    assert all(len(page) <= 2 * SCAN_KEYS for page in pages), "some at a time"
    return {found.key: found.num_bytes for page in pages for found in page}


def behaves(store: KVStore) -> None:
    """What every store must do."""
    unknown = record_key(SPACE, b"\xff" * 32, 0, 0)
    assert store.get([]) == []
    assert listed(store) == {}
    assert store.get(KEYS) == [None] * len(KEYS)
    store.put(RECORDS)
    store.put({})
    for key, record in FOREIGN.items():
        store.put({key: record})
    assert listed(store) == {key: len(record) for key, record in (RECORDS | FOREIGN).items()}
    assert listed(store, SPACE) == {key: len(record) for key, record in RECORDS.items()}
    assert listed(store, b"?" * 16) == {}
    store.delete(list(FOREIGN))
    assert store.get([*KEYS, unknown]) == [*RECORDS.values(), None]
    store.put({KEYS[0]: b"", KEYS[1]: b"other"})
    assert store.get(KEYS[:3]) == [b"", b"other", RECORDS[KEYS[2]]]
    store.delete([*KEYS[:2], unknown])
    store.delete([])
    assert set(listed(store)) == set(KEYS[2:])
    store.put({key.replace(SPACE, b"*" * 16): b"x" for key in KEYS[:2]})
    assert clear_records(store, b"*" * 16, lambda: 0.0, 1.0) == 2
    assert set(listed(store)) == set(KEYS[2:])


def every_call(store: KVStore) -> list[Callable[[], object]]:
    """That asks the store for something."""
    return [
        lambda: store.get(KEYS),
        lambda: list(store.scan(SPACE)),
        lambda: store.put(RECORDS),
        lambda: store.delete(KEYS),
    ]
