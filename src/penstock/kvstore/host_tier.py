"""The host tier (L2) of one rank: the newest payloads of a store in its memory, up to a number of bytes.

    computed ──put──▶ memory ──write-through: at once; write-back: on leaving memory, or at the end──▶ store
    wanted   ◀─get─── memory ◀──what memory lacks───────────────────────────────────────────────────── store

A host tier is a guarded store with memory in front, and is used as one. Each rank has a host tier, for its
own parts of blocks. The core chooses which blocks leave memory (`kvcache.host_names`), and every rank then
calls `release` for them, so a block is in memory on all ranks or on none. A rank gives up payloads by itself
only where it would need more than its bytes: after a loss, or for a load that is larger than memory. A host
tier is of use where the KV cache is in the memory of a GPU. If the KV cache is in the host's memory, a larger
cache is the better use of that memory (docs/perf-log.md has the figures).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock.batch import StoreUse
from penstock.errors import ErrorInfo
from penstock.kvstore.found import Found
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.names import KEY_BYTES
from penstock.kvstore.store import KVStore

ENTRY_BYTES = 200  # memory that Python needs for each payload, besides the payload and its key


def block_bytes(num_records: int, record_bytes: int) -> int:
    """Return the bytes that the records of a block take in memory."""
    return num_records * (KEY_BYTES + record_bytes + ENTRY_BYTES)


class NoStore:
    """A `KVStore` that keeps nothing: behind a host tier that has no store."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None] * len(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        pass

    def put(self, records: Mapping[bytes, bytes]) -> None:
        pass

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        return iter(())

    def close(self) -> None:
        pass


class HostTier(GuardedStore):
    """The host tier: a guarded store with payloads in memory in front of it.

    Args:
        store: keeps what memory has no room for; closed with this one.
        max_bytes: most bytes of memory, for payloads, their keys and what Python needs for them.
        writes_back: a payload goes to the store when it leaves memory, or at the end; else at once.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        store: KVStore,
        max_bytes: int,
        *,
        writes_back: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, clock)
        self._max_bytes, self._writes_back = max_bytes, writes_back
        # Guards the fields below; never held while the store is called.
        self._memory_lock = threading.Lock()
        self._payloads: OrderedDict[bytes, bytes] = OrderedDict()  # what was used longest ago comes first
        self._unwritten: set[bytes] = set()  # the payloads that the store does not have
        self._num_bytes = self._num_bytes_hit = self._num_hits = self._num_bytes_kept = 0

    def use(self) -> StoreUse:
        return msgspec.structs.replace(
            super().use(),
            host_bytes_read=self._num_bytes_hit,
            host_records_read=self._num_hits,
            host_bytes_written=self._num_bytes_kept,
            host_bytes_used=self._num_bytes,
        )

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._memory_lock:
            hits = {key: self._payloads[key] for key in keys if key in self._payloads}
            self._num_bytes_hit += sum(map(len, hits.values()))
            self._num_hits += len(hits)
            self._touch(hits)
        missing = [key for key in keys if key not in hits]
        fetched = zip(missing, super().get(missing), strict=True) if missing else ()
        got = {key: payload for key, payload in fetched if payload is not None}
        self._write(self._keep(got, are_written=True))
        return [hits.get(key, got.get(key)) for key in keys]

    def used(self, keys: Sequence[bytes]) -> None:
        with self._memory_lock:
            self._touch(reversed(keys))
        super().used(keys)

    def put(self, records: Mapping[bytes, bytes]) -> bool:
        gone = self._keep(records, are_written=not self._writes_back)
        return self._write(gone) if self._writes_back else super().put(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._memory_lock:
            for key in keys:
                self._drop(key)
        super().delete(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Drop these payloads from memory; those that the store does not have are written to it."""
        with self._memory_lock:
            unwritten = {key: self._payloads[key] for key in keys if key in self._unwritten}
            for key in keys:
                self._drop(key)
        self._write(unwritten)

    def discard_all(self) -> None:
        """Drop all payloads from memory; those that the store does not have are not written to it."""
        with self._memory_lock:
            self._payloads.clear()
            self._unwritten.clear()
            self._num_bytes = 0

    def clear(self, prefix: bytes, seconds: float) -> ErrorInfo | None:
        with self._memory_lock:
            for key in [key for key in self._payloads if key.startswith(prefix)]:
                self._drop(key)
        return super().clear(prefix, seconds)

    def close(self) -> None:
        """Write the payloads that the store does not have to it, and close it; no other call may run."""
        with self._memory_lock:
            unwritten = {key: self._payloads[key] for key in self._payloads if key in self._unwritten}
        self.discard_all()
        self._write(unwritten)
        super().close()

    def _write(self, payloads: Mapping[bytes, bytes]) -> bool:
        return super().put(payloads) if payloads else True

    def _touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._payloads:
                self._payloads.move_to_end(key)

    def _keep(self, records: Mapping[bytes, bytes], *, are_written: bool) -> dict[bytes, bytes]:
        """Put payloads into memory, the first as used last; return those that left it and are not stored."""
        gone: dict[bytes, bytes] = {}
        with self._memory_lock:
            for key in reversed(list(records)):
                self._drop(key)
                self._payloads[key] = records[key]
                self._num_bytes += _size(key, records[key])
                self._num_bytes_kept += len(records[key])
                if not are_written:
                    self._unwritten.add(key)
                while self._num_bytes > self._max_bytes:
                    oldest = next(iter(self._payloads))
                    if oldest in self._unwritten:
                        gone[oldest] = self._payloads[oldest]
                    self._drop(oldest)
        return gone

    def _drop(self, key: bytes) -> None:
        payload = self._payloads.pop(key, None)
        if payload is not None:
            self._num_bytes -= _size(key, payload)
            self._unwritten.discard(key)


def _size(key: bytes, payload: bytes) -> int:
    return len(key) + len(payload) + ENTRY_BYTES
