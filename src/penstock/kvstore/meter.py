"""Counts what a rank has done with its KV store since its last report.

Ranks report differences. So the core, which adds them up for all ranks, need not know that a rank was started
again and counts from 0.
"""

from __future__ import annotations

import msgspec

from penstock.batch import NO_STORE_USE, StoreUse
from penstock.kvstore.guard import GuardedStore


class StoreMeter:
    """Counts the use of a rank's store from one `read` to the next."""

    def __init__(self, store: GuardedStore) -> None:
        self._store = store
        self._told = NO_STORE_USE

    def read(self) -> StoreUse:
        """Return the use since the last call."""
        now, previous = self._store.use(), self._told
        self._told = now
        return now.since(previous)

    def forget_state(self) -> None:
        """Report again if the store is switched off and how much is in memory: the core forgot both."""
        self._told = msgspec.structs.replace(self._told, switched_off=0, host_bytes_used=0)
