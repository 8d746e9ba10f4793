"""What a rank has done with its store since it was asked last.

Differences: who adds them up for all ranks need not know which of them has begun again from nothing.
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
        """The difference to the last call."""
        now, told = self._store.use(), self._told
        self._told = now
        return StoreUse(
            bytes_read=now.bytes_read - told.bytes_read,
            bytes_written=now.bytes_written - told.bytes_written,
            records_read=now.records_read - told.records_read,
            verify_failures=now.verify_failures - told.verify_failures,
            call_failures=now.call_failures - told.call_failures,
            host_bytes_read=now.host_bytes_read - told.host_bytes_read,
            host_records_read=now.host_records_read - told.host_records_read,
            host_bytes_written=now.host_bytes_written - told.host_bytes_written,
            host_bytes_used=now.host_bytes_used - told.host_bytes_used,
            switched_off=now.switched_off - told.switched_off,
            failure=now.failure if now.call_failures > told.call_failures else "",
        )

    def forget_state(self) -> None:
        """Whoever sums up has forgotten who is switched off and how much is in memory, and is told again."""
        self._told = msgspec.structs.replace(self._told, switched_off=0, host_bytes_used=0)
