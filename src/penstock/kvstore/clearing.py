"""Deleting all records of a namespace, or of a whole store, with bounded memory and in bounded time."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import StoreError
from penstock.kvstore.store import KVStore


def clear_records(store: KVStore, prefix: bytes, clock: Callable[[], float], deadline: float) -> int:
    """Delete what `store.scan(prefix)` finds, a few records at a time, so that others can go on meanwhile.

    Args:
        deadline: of the clock; looked at between two of these times.

    Returns:
        How many records are gone.

    Raises:
        StoreError: the store fails, or it is too late. What was deleted by then is gone.
    """
    count = 0
    for some in store.scan(prefix):
        if clock() > deadline:
            raise StoreError(
                f"not all records could be deleted in time; {count:,} are gone.",
                remedy="Ask for it once more: it goes on with the others.",
            )
        store.delete([found.key for found in some])
        count += len(some)
    return count
