"""The records in an LMDB directory on this machine: which are kept, and what follows when LMDB fails.

Several processes may have the directory open at once, reading and writing; one process opens it once.

**Quota.** The data file does not grow beyond the quota; one that is larger already may grow a little
(`LmdbTables`). Four fifths of the quota may be in use; the rest is for copies of pages, since LMDB copies a
page before it changes it. If a write would exceed the four fifths, the records used longest ago are given up
first. A `put` counts as use, and so does being found by `get`; a `scan` does not. Uses by `get` are kept in
memory, so that reading writes nothing. They are written with the next `put`, with `close`, or when there are
many. A process that is killed forgets its last uses, so the order is approximate. Of one call the first key
counts as used last: it begins a chain of blocks, and without it nothing of the chain can be found. If
processes have different quotas for one directory, each follows its own, so the smallest has effect.

**Failure.** If the map or the disk is full, records are given up and the write is tried again, a few times. A
directory that has vanished or been replaced is made again at the next call. All else is a `StoreError`, and
the directory is opened again at the next call. While a process stands still in the middle of a read, LMDB
cannot use the pages of records that are given up: a full store stays full until that process continues or
ends. While a process stands still in the middle of a write, all others wait. A file that is cut short while
it is open ends the process (SIGBUS). Nothing guards against that, since no other user may write to the
directory (security rule 9).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from penstock.errors import StoreError, UsageError
from penstock.kvstore.failures import reported
from penstock.kvstore.found import SCAN_KEYS, Found, in_pages
from penstock.kvstore.lmdb_tables import LmdbTables
from penstock.kvstore.names import MAX_KEY_BYTES, MIN_KEY_BYTES

MIN_QUOTA_BYTES = 1 << 20
MAX_TOUCHED = 4096  # most keys whose last use is in memory only
_NO_QUOTA_BYTES = 1 << 40  # of addresses; it takes no space on the disk
_MAX_BATCH_BYTES = 64 << 20
_MAX_TRIES = 8
_FULL = (lmdb.MapFullError, lmdb.DiskError)
_REMEDY = (
    "Check that the disk has space and the directory is writable; if the file is damaged, stop the "
    "programs that use it and delete the directory."
)


class LmdbStore:
    """A `KVStore` in an LMDB directory.

    Args:
        directory: made with mode 0700 where it is missing. One that others can write to is refused.
        quota_bytes: largest size of the data file, at least 1 MiB; None for as much as the disk holds.

    Raises:
        UsageError: the quota is too small.
        StoreError: the directory cannot be used.
    """

    def __init__(self, directory: Path, *, quota_bytes: int | None = None) -> None:
        if quota_bytes is not None and quota_bytes < MIN_QUOTA_BYTES:
            raise UsageError(
                f"the quota of the KV store is {quota_bytes:,} bytes.",
                remedy=f"Give at least {MIN_QUOTA_BYTES:,}.",
            )
        self._directory = directory
        self._max_bytes = quota_bytes or _NO_QUOTA_BYTES
        self._max_live_bytes = self._max_bytes * 4 // 5
        self._batch_bytes = min(_MAX_BATCH_BYTES, self._max_bytes // 16)
        self._lock = threading.Lock()
        self._touched: dict[bytes, None] = {}  # keys whose uses are not written yet, in order of use
        self._tables: LmdbTables | None = None
        self._is_closed = False
        with self._opened():
            pass

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        _check(keys)
        with self._opened() as tables:
            records = tables.get(keys)
            self._touch([key for key, record in zip(keys, records, strict=True) if record is not None])
            if len(self._touched) >= MAX_TOUCHED:
                self._flush(tables)
            return records

    def used(self, keys: Sequence[bytes]) -> None:
        _check(keys)
        with self._opened():
            self._touch(keys)

    def put(self, records: Mapping[bytes, bytes]) -> None:
        """Keep records as `KVStore.put` does, in batches; each batch is stored as a whole or not at all."""
        _check(list(records))
        with self._opened() as tables:
            for batch in self._batches(records):
                self._write(tables, batch)

    def delete(self, keys: Sequence[bytes]) -> None:
        _check(keys)
        with self._opened() as tables:
            tables.delete(keys)

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        """Yield records as `KVStore.scan` does, in order of keys. Nothing is held open between two steps."""

        def page(after: bytes) -> list[Found]:
            with self._opened() as tables:
                return tables.page(prefix, after, SCAN_KEYS)

        return in_pages(page)

    def close(self) -> None:
        with self._lock:
            tables, self._tables, self._is_closed = self._tables, None, True
            if tables is None:
                return
            try:
                with reported(str(self._directory), _REMEDY, (lmdb.Error, OSError)):
                    self._flush(tables)
            finally:
                tables.close()

    @contextmanager
    def _opened(self) -> Iterator[LmdbTables]:
        """Yield the tables, for one call; an error closes them."""
        with self._lock, reported(str(self._directory), _REMEDY, (lmdb.Error, OSError)):
            if self._is_closed:
                raise StoreError(f"KV store {self._directory} is closed.", remedy="Open it again.")
            if self._tables is not None and not self._tables.is_on_disk():
                self._drop()
            if self._tables is None:
                self._tables = LmdbTables(self._directory, self._max_bytes)
            try:
                yield self._tables
            except (lmdb.Error, OSError):
                self._drop()
                raise

    def _drop(self) -> None:
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.close()

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._touched.pop(key, None)
            self._touched[key] = None

    def _flush(self, tables: LmdbTables) -> None:
        """Write the uses that are kept in memory; if the store is full they are lost, which does no harm."""
        touched, self._touched = self._touched, {}
        if touched:
            try:
                tables.write({}, touched)
            except _FULL:
                return

    def _batches(self, records: Mapping[bytes, bytes]) -> Iterator[dict[bytes, bytes]]:
        """Yield batches of records for one transaction each, last keys first, so that the first is newest."""
        batch: dict[bytes, bytes] = {}
        num_bytes = 0
        for key in reversed(list(records)):
            record = records[key]
            if batch and num_bytes + len(record) > self._batch_bytes:
                yield batch
                batch, num_bytes = {}, 0
            batch[key] = record
            num_bytes += len(record)
        if batch:
            yield batch

    def _write(self, tables: LmdbTables, batch: Mapping[bytes, bytes]) -> None:
        room = tables.room_for(batch)
        if room > self._max_live_bytes:
            raise StoreError(
                f"KV store {self._directory}: a record of {room:,} bytes exceeds the "
                f"quota of {self._max_bytes:,}.",
                remedy="Give the store a larger quota.",
            )
        if tables.live_bytes() + room > self._max_live_bytes:
            self._flush(tables)  # so that records just read do not count as used longest ago
            tables.evict(self._max_live_bytes - room)
        for _ in range(_MAX_TRIES):
            try:
                tables.write(batch, self._touched)
            except _FULL:
                self._give_way(tables, room)
            else:
                self._touched.clear()
                return
        tables.write(batch, ())

    def _give_way(self, tables: LmdbTables, room: int) -> None:
        """Give up records, since the map or the disk is full although the quota is not.

        That happens if too few free pages lie side by side, a reader keeps them, or the disk has no space.
        """
        step = max(2 * room, tables.live_bytes() // 8)
        tables.evict(max(0, tables.live_bytes() - step))
        tables.settle()


def _check(keys: Sequence[bytes]) -> None:
    assert all(MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES for key in keys), "a key of 32 to 64 bytes"
