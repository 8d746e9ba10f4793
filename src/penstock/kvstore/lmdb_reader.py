"""A view of an LMDB directory that changes nothing, also while others use it.

Reading here does not count as use, so it does not change which records are given up next. If the directory
has a `lock.mdb`, this reader must be able to write to that file, in which LMDB lists all readers. A copy
without that file needs no right to write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from penstock.errors import StoreError
from penstock.kvstore.failures import reported
from penstock.kvstore.found import SCAN_KEYS, Found, in_pages
from penstock.kvstore.lmdb_tables import DATA_FILE, page_of

_ADDRESSES = 1 << 40
_REMEDY = (
    "Check the path, and that you may read its data.mdb and write to its lock.mdb; if the file is damaged, "
    "stop the programs that use it and delete the directory."
)
_NOT_OURS = "Give the directory of --kv-store, which holds data.mdb."


class LmdbReader:
    """An LMDB directory that is only read; a process may open a directory once at a time.

    Raises:
        StoreError: there is no such directory, it is not a store of KV blocks, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not (directory / DATA_FILE).is_file():
            what = "does not hold a KV store" if directory.is_dir() else "is not a directory"
            raise StoreError(f"{directory} {what}.", remedy=_NOT_OURS)
        with reported(str(directory), _REMEDY, (lmdb.Error, OSError)):
            self._environment = lmdb.open(
                str(directory),
                map_size=_ADDRESSES,
                max_dbs=3,
                readonly=True,
                create=False,
                lock=(directory / "lock.mdb").exists(),
            )
        try:
            self._refuse_cut_file()
            self._records = self._table()
        except BaseException:
            self._environment.close()
            raise

    def _refuse_cut_file(self) -> None:
        """Raise `StoreError` if the data file is cut short.

        Touching a missing page would end the process (SIGBUS).
        """
        needed = (self._environment.info()["last_pgno"] + 1) * self._environment.stat()["psize"]
        size = os.path.getsize(self._directory / DATA_FILE)
        if size < needed:
            raise StoreError(
                f"KV store {self._directory}: {DATA_FILE} has {size:,} bytes of {needed:,}.", remedy=_REMEDY
            )

    def _table(self) -> Any:
        with reported(str(self._directory), _NOT_OURS, (lmdb.Error, OSError)):
            for name in (b"used", b"order"):
                self._environment.open_db(name, create=False)
            return self._environment.open_db(b"records", create=False)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with (
            reported(str(self._directory), _REMEDY, (lmdb.Error, OSError)),
            self._environment.begin() as transaction,
        ):
            return [transaction.get(key, db=self._records) for key in keys]

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        """Yield records as `KVStore.scan` does, in order of keys. Nothing is held open between two steps."""

        def page(after: bytes) -> list[Found]:
            with (
                reported(str(self._directory), _REMEDY, (lmdb.Error, OSError)),
                self._environment.begin(buffers=True) as transaction,
            ):
                return page_of(transaction, self._records, prefix, after, SCAN_KEYS)

        return in_pages(page)

    def close(self) -> None:
        self._environment.close()
