"""What every KV store must do, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.kvstore.names import namespace, record_key
from penstock.kvstore.store import KVStore

SPACE = namespace(bytes(32), dtype="bfloat16", block_size=32, kind="keys and values")
KEYS = [record_key(SPACE, n.to_bytes(32, "big"), layer, 0) for n in range(40) for layer in range(4)]
RECORDS = {key: key * 3 for key in KEYS}


def behaves(store: KVStore) -> None:
    """What every store must do."""
    unknown = record_key(SPACE, b"\xff" * 32, 0, 0)
    assert store.get([]) == store.contains([]) == []
    assert store.get(KEYS) == [None] * len(KEYS)
    store.put(RECORDS)
    store.put({})
    assert store.contains([unknown, *KEYS]) == [False] + [True] * len(KEYS)
    assert store.get([*KEYS, unknown]) == [*RECORDS.values(), None]
    store.put({KEYS[0]: b"", KEYS[1]: b"other"})
    assert store.get(KEYS[:3]) == [b"", b"other", RECORDS[KEYS[2]]]
    store.delete([*KEYS[:2], unknown])
    store.delete([])
    assert store.contains(KEYS[:3]) == [False, False, True]


def every_call(store: KVStore) -> list[Callable[[], object]]:
    """That asks the store for something."""
    return [
        lambda: store.get(KEYS),
        lambda: store.contains(KEYS),
        lambda: store.put(RECORDS),
        lambda: store.delete(KEYS),
    ]
