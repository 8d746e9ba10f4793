"""Counts what a rank has done with its KV store since its last report.

Differences: the core, which adds them up for all ranks, need not know which has begun again from nothing.
"""

from __future__ import annotations

import msgspec

from penstock.batch import NO_STORE_USE, StoreUse
from penstock.kvstore.guard import GuardedStore


class StoreMeter:
    def __init__(self, store: GuardedStore) -> None:
        self._store = store
        self._told = NO_STORE_USE

    def read(self) -> StoreUse:
        """Return the use since the last call."""
        now, previous = self._store.use(), self._told
        self._told = now
        return now.since(previous)

    def forget_state(self) -> None:
        """Tell again whether the store is switched off and how much is in memory: the core has forgotten."""
        self._told = msgspec.structs.replace(self._told, switched_off=0, host_bytes_used=0)
