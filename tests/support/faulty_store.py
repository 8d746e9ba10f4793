"""A KV store in memory that fails as a disk or a network does, for whole engines (row R9).

`behind_engines` puts it where engines of this process open theirs, so that all their ranks and cores share it
and what one engine has stored is there for the next. Time stands still for those who decide when a store is
left alone, until a test moves it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from penstock.errors import StoreError
from penstock.kvstore import opening
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.names import KEY_BYTES, is_entry
from penstock.kvstore.store import MemoryStore

Fails = Callable[[str, Sequence[bytes]], bool]  # of a method and its keys


def never(method: str, keys: Sequence[bytes]) -> bool:
    return False


def is_part(key: bytes) -> bool:
    """Whether it is of a record of a block, and no entry or description."""
    return len(key) == KEY_BYTES and not is_entry(key)


class FaultyStore(MemoryStore):
    """Attributes:
    fails: whether a call fails.
    failure: what it raises then; None: it gives half an answer, or puts half of what it should and raises.
    num_failed: calls that did.
    stands_still: whether a call waits until it may go on.
    may_go_on: set by the test.
    is_asked: set when a call waits.
    now: seconds, of the clock by which the store is left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails: Fails = never
        self.failure: Exception | None = None
        self.num_failed = 0
        self.stands_still: Fails = never
        self.may_go_on, self.is_asked = threading.Event(), threading.Event()
        self.now = 0.0
        self._lock = threading.Lock()  # of the count: ranks ask at once

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        answers = super().get(keys)
        return answers[: len(answers) // 2] if self._is_bad("get", keys) else answers

    def used(self, keys: Sequence[bytes]) -> None:
        self._is_bad("used", keys)

    def put(self, records: Mapping[bytes, bytes]) -> None:
        keys = list(records)
        if self._is_bad("put", keys):
            super().put({key: records[key] for key in keys[: len(keys) // 2]})
            raise StoreError("the answer ends half-way.")
        super().put(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        if not self._is_bad("delete", keys):
            super().delete(keys)

    def parts(self, of: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the records of blocks, in order: all, or of blocks of these names."""
        keys = [key for key in self.records if is_part(key)]
        return sorted(key for key in keys if not of or any(name in key for name in of))

    def _is_bad(self, method: str, keys: Sequence[bytes]) -> bool:
        if self.stands_still(method, keys):
            self.is_asked.set()
            assert self.may_go_on.wait(120)
        if not self.fails(method, keys):
            return False
        with self._lock:
            self.num_failed += 1
        if self.failure is not None:
            raise self.failure
        return True


def behind_engines(monkeypatch: pytest.MonkeyPatch) -> tuple[FaultyStore, dict[str, Any]]:
    """A store, and the settings of an engine that has it."""
    store = FaultyStore()
    monkeypatch.setattr(opening, "open_store", lambda url, quota_bytes: store)
    monkeypatch.setattr(opening, "GuardedStore", lambda inner: GuardedStore(inner, lambda: store.now))
    return store, {"kv_store": "memory:"}
