"""The tables of an open LMDB directory: records, and when each was last used.

    records   key     ─▶ record
    used      key     ─▶ count at its last use              the key's entry in `order`
    order     count   ─▶ key                                ascending: what was used longest ago comes first

The count stands in place of a clock: it grows with every use by any process. Every change is one transaction:
after kill -9 or a power cut the tables agree with each other, and are as before the change or as after it.
Errors are LMDB's own or `OSError`, and `StoreError` for a directory that cannot be used. Decides nothing:
`lmdb_store` does. Not thread-safe.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from penstock.errors import StoreError
from penstock.kvstore.found import Found

DATA_FILE = "data.mdb"
_MAX_READERS = 1024  # reading transactions at once, of all processes
_COUNT_BYTES = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_RECORD_TREE_PAGES = 8  # pages of the tables' trees that a put may copy besides the pages of records


class LmdbTables:
    """The tables of one LMDB directory.

    Args:
        directory: made with mode 0700 where it is missing; its files have 0600.
        max_bytes: largest size of the data file. A file that is larger already stays so, and may grow by an
            eighth of this: LMDB's files never shrink.

    Raises:
        lmdb.Error, OSError: the directory cannot be opened.
        StoreError: the path is not a directory, or others can write to it.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        make_private(directory)
        self._file = directory / DATA_FILE
        self._environment = lmdb.open(
            str(directory),
            map_size=max_bytes,
            max_dbs=3,
            max_readers=_MAX_READERS,
            mode=0o600,
            metasync=False,  # a power cut may cost the last change, never the tables
        )
        try:
            self._fill_up_file(max_bytes)
            self._environment.reader_check()
            self._records, self._used, self._order = map(
                self._environment.open_db, (b"records", b"used", b"order")
            )
            self._identity = self._identity_on_disk()
        except BaseException:
            self._environment.close()
            raise

    def _fill_up_file(self, max_bytes: int) -> None:
        """Fill up a data file that was cut short with zeros, and let one that is too large grow a little.

        Reading a missing page would end the process (SIGBUS); zeros are found to be bad. A file that is
        larger than its limit needs room too, because giving up records copies pages.
        """
        page_bytes = self._environment.stat()["psize"]
        needed = (self._environment.info()["last_pgno"] + 1) * page_bytes
        if os.path.getsize(self._file) < needed:
            with self._file.open("r+b") as file:
                os.posix_fallocate(file.fileno(), needed - 1, 1)  # never cuts what another process just added
        if needed > max_bytes:
            self._environment.set_mapsize(needed + (max_bytes // 8 // page_bytes + 1) * page_bytes)

    def _identity_on_disk(self) -> tuple[int, int]:
        status = self._file.stat()
        return status.st_dev, status.st_ino

    def is_on_disk(self) -> bool:
        """Return whether the data file is there; if it was deleted or replaced, writes to it are lost."""
        try:
            return self._identity_on_disk() == self._identity
        except OSError:
            return False

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Any]:
        try:
            transaction = self._environment.begin(write=write, buffers=True)
        except lmdb.MapResizedError:  # another process has a larger limit, and let the file grow beyond ours
            self._environment.set_mapsize(0)
            transaction = self._environment.begin(write=write, buffers=True)
        with transaction:
            yield transaction

    def page(self, prefix: bytes, after: bytes, most: int) -> list[Found]:
        """Return the first records behind the key `after` whose keys begin with `prefix`, in key order."""
        with self._transaction(write=False) as transaction:
            return page_of(transaction, self._records, prefix, after, most)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._transaction(write=False) as transaction:
            views = (transaction.get(key, db=self._records) for key in keys)
            return [None if view is None else bytes(view) for view in views]

    def write(self, records: Mapping[bytes, bytes], touched: Iterable[bytes]) -> None:
        """Keep records and note uses, in one transaction.

        The uses of `touched` are noted first, in order, then those of `records`. Keys whose records have been
        given up since are passed over.
        """
        with self._transaction(write=True) as transaction:
            for key, record in records.items():
                if transaction.get(key, db=self._records) != record:
                    transaction.put(key, record, db=self._records)
            count = self._last_count(transaction)
            for key in touched:
                if key not in records and transaction.get(key, db=self._used) is not None:
                    count += 1
                    self._note_use(transaction, key, count)
            for key in records:
                count += 1
                self._note_use(transaction, key, count)

    def _last_count(self, transaction: Any) -> int:
        with transaction.cursor(db=self._order) as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else 0

    def _note_use(self, transaction: Any, key: bytes, count: int) -> None:
        before = transaction.get(key, db=self._used)
        if before is not None:
            transaction.delete(bytes(before), db=self._order)
        stamp = count.to_bytes(_COUNT_BYTES, "big")
        transaction.put(key, stamp, db=self._used)
        transaction.put(stamp, key, db=self._order)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._transaction(write=True) as transaction:
            for key in keys:
                stamp = transaction.get(key, db=self._used)
                if stamp is not None:
                    self._remove(transaction, key, bytes(stamp))

    def _remove(self, transaction: Any, key: bytes, stamp: bytes) -> None:
        transaction.delete(key, db=self._records)
        transaction.delete(key, db=self._used)
        transaction.delete(stamp, db=self._order)

    def evict(self, max_live_bytes: int) -> int:
        """Give up records used longest ago until the rest takes at most `max_live_bytes`; return how many."""
        # Forget readers that have died: for them LMDB would keep the pages of all records given up here.
        self._environment.reader_check()
        num_evicted = 0
        with self._transaction(write=True) as transaction:
            while self._live_bytes(transaction) > max_live_bytes:
                with transaction.cursor(db=self._order) as cursor:
                    if not cursor.first():
                        break
                    stamp, key = bytes(cursor.key()), bytes(cursor.value())
                self._remove(transaction, key, stamp)
                num_evicted += 1
        return num_evicted

    def settle(self) -> None:
        """Make a small transaction, so that pages freed before can be used by the next one.

        LMDB gives freed pages out again only to the next transaction but one, and not while a reader uses
        them.
        """
        with self._transaction(write=True) as transaction:
            transaction.put(b"settled", os.urandom(_COUNT_BYTES))

    def live_bytes(self) -> int:
        """Return the bytes that records and their order take in the file, in whole pages."""
        with self._transaction(write=False) as transaction:
            return self._live_bytes(transaction)

    def _live_bytes(self, transaction: Any) -> int:
        live = 0
        for table in (self._records, self._used, self._order):
            stats = transaction.stat(table)
            live += stats["psize"] * (stats["branch_pages"] + stats["leaf_pages"] + stats["overflow_pages"])
        return live

    def room_for(self, records: Mapping[bytes, bytes]) -> int:
        """Return the most bytes that these records may add to the file."""
        page = self._environment.stat()["psize"]
        return page * sum(len(record) // page + 2 for record in records.values()) + page * _RECORD_TREE_PAGES

    def close(self) -> None:
        self._environment.close()


def page_of(transaction: Any, records: Any, prefix: bytes, after: bytes, most: int) -> list[Found]:
    """Return the page that `LmdbTables.page` describes, in a transaction with buffers."""
    page: list[Found] = []
    with transaction.cursor(db=records) as cursor:
        there = cursor.set_range(max(prefix, after)) if prefix or after else cursor.first()
        if there and after and bytes(cursor.key()) == after:
            there = cursor.next()
        while there and len(page) < most:
            key = bytes(cursor.key())
            if not key.startswith(prefix):
                break
            page.append(Found(key, len(cursor.value())))
            there = cursor.next()
    return page


def make_private(directory: Path) -> None:
    """Create the directory with mode 0700, or check that only this user can write to an existing one.

    Raises `OSError`; `StoreError` if the path is not a directory, or if others can write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise StoreError(
            f"KV store {directory}: it or its parent is a file.",
            remedy="Give a directory, or a path that does not exist yet.",
        ) from error
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise StoreError(
            f"KV store {directory}: others can write to it (mode {stat.S_IMODE(status.st_mode):04o}, owner "
            f"{status.st_uid}), and could forge KV blocks.",
            remedy="If only this user has written there, remove the others' access (chmod 700, and chown "
            "if another user owns it); else give another directory.",
        )
