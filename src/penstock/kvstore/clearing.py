"""The deletion of all records of a model (a namespace) or of a whole store, in bounded memory and time."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import StoreError
from penstock.kvstore.store import KVStore


def clear_records(store: KVStore, prefix: bytes, clock: Callable[[], float], deadline: float) -> int:
    """Delete every record that `store.scan(prefix)` yields, page by page, so that other work can go on.

    Args:
        prefix: a namespace; empty for all records.
        deadline: time of `clock` after which no further page is deleted.

    Returns:
        The number of deleted records.

    Raises:
        StoreError: the store fails, or the deadline has passed. Records deleted by then stay deleted.
    """
    count = 0
    for some in store.scan(prefix):
        if clock() > deadline:
            raise StoreError(
                f"not all records could be deleted in time; {count:,} were deleted.",
                remedy="Repeat the request to delete the others.",
            )
        store.delete([record.key for record in some])
        count += len(some)
    return count
