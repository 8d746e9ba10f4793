"""A store that is opened at its first use; if the opening fails, it is tried again at a later use [R9].

Core and ranks must work without their store, also while they start. So a store is opened behind the guard,
where a failure to open it is a miss like any other. If core and ranks are threads of one process they share
the store, since a process may open an LMDB directory only once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from penstock.kvstore.found import Found
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.host_tier import HostTier, NoStore
from penstock.kvstore.store import KVStore, open_store


class OpenedLater:
    """A `KVStore` that the first call opens; so every method may raise the errors of `open_store`."""

    def __init__(self, url: str, quota_bytes: int | None) -> None:
        self._url, self._quota_bytes = url, quota_bytes
        self._lock = threading.Lock()
        self._store: KVStore | None = None

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._opened().get(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        self._opened().used(keys)

    def put(self, records: Mapping[bytes, bytes]) -> None:
        self._opened().put(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._opened().delete(keys)

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        return self._opened().scan(prefix)

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                _shared.give_back(self._url)
                self._store = None

    def _opened(self) -> KVStore:
        with self._lock:
            if self._store is None:
                self._store = _shared.take(self._url, self._quota_bytes)
            return self._store


class _SharedStores:
    """The stores that this process has open, by address, each with the number of its users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[KVStore, int]] = {}

    def take(self, url: str, quota_bytes: int | None) -> KVStore:
        with self._lock:
            store, count = self._open.get(url) or (open_store(url, quota_bytes=quota_bytes), 0)
            self._open[url] = store, count + 1
            return store

    def give_back(self, url: str) -> None:
        with self._lock:
            store, count = self._open.pop(url)
            if count > 1:
                self._open[url] = store, count - 1
            else:
                store.close()


_shared = _SharedStores()


def open_guarded(
    url: str | None, *, quota_bytes: int | None = None, host_bytes: int = 0, writes_back: bool = False
) -> GuardedStore:
    """Return the store at this address behind a guard, so that its failures are misses.

    Args:
        url: the address; None: there is no store behind the memory.
        quota_bytes: as for `open_store`.
        host_bytes: bytes of this process's memory in front of the store; 0: none.
        writes_back: see `HostTier`.
    """
    store: KVStore = NoStore() if url is None else OpenedLater(url, quota_bytes)
    if not host_bytes:
        return GuardedStore(store)
    return HostTier(store, host_bytes, writes_back=writes_back)
