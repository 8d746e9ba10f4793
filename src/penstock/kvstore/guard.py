"""A guard around a store: whatever fails there, callers only see that a block is not found [R9].

The guard stands around any `KVStore`. It seals what goes in and verifies what comes out, so that a wrong byte
is never believed, and turns every exception into "not there". A store that keeps failing is switched off for
a while:

                    5 failures within 60 s
      ┌──▶ closed ──────────────────────────▶ open: everything misses, the store is not called
      │                                         │ ▲
      │ the call succeeds            after 60 s │ │ the call fails
      └──────────────────────────── one call is let through

The words are those of an electric circuit: while it is *open*, nothing flows. Called by the threads that move
blocks to the store and back. The guard does not bound the time of a call: callers that wait for a store need
deadlines of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.batch import StoreUse
from penstock.errors import ErrorInfo, StoreError, describe
from penstock.kvstore.clearing import clear_records
from penstock.kvstore.record import seal, unseal
from penstock.kvstore.store import KVStore

MAX_FAILURES = 5
WINDOW_SECONDS = 60.0
PAUSE_SECONDS = 60.0
MAX_REASON_CHARACTERS = 256

_SWITCHED_OFF = StoreError(
    "the KV store has failed too often and is not used for a while.", remedy="Try again in a minute."
).info()

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class StoreCounts:
    """The counts of a guarded store since it was made.

    Attributes:
        num_hits: records that `get` has found, without bad ones.
        num_bytes_read, num_bytes_written: bytes of payloads.
        num_verify_failures: records that were damaged, or not of their key.
        num_failures: calls of the store that raised, or did not return one answer for each key.
        is_open: the circuit is open: the store is switched off.
        last_failure: why the last call that failed did so; None: none has failed.
    """

    num_hits: int = 0
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    num_verify_failures: int = 0
    num_failures: int = 0
    is_open: bool = False
    last_failure: ErrorInfo | None = None


class Circuit:
    """The rule by which a store that keeps failing is not called for a while. Not thread-safe.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._next_try: float | None = None  # None: closed
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        return self._next_try is not None

    def may_ask(self) -> bool:
        """Return whether this call may go through; after one that may, call `succeed` or `fail`.

        While the circuit is open only one call at a time may, the first `PAUSE_SECONDS` after the last
        failure.
        """
        if self._next_try is None:
            return True
        if self._is_probing or self._clock() < self._next_try:
            return False
        self._is_probing = True
        return True

    def succeed(self) -> None:
        if self.is_open and self._is_probing:
            self._failures.clear()
            self._next_try, self._is_probing = None, False

    def fail(self) -> None:
        now = self._clock()
        self._failures.append(now)
        too_many = len(self._failures) == MAX_FAILURES and now - self._failures[0] <= WINDOW_SECONDS
        if self._is_probing or (too_many and not self.is_open):
            self._next_try, self._is_probing = now + PAUSE_SECONDS, False


class GuardedStore:
    """A `KVStore` of payloads whose methods never raise.

    Args:
        store: keeps the records; closed with this one.
        clock: seconds, never going back.
    """

    def __init__(self, store: KVStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._circuit = Circuit(clock)
        self._counts = StoreCounts()
        self._lock = threading.Lock()  # for circuit and counts; never held while the store is called

    def counts(self) -> StoreCounts:
        """Return a copy of the counts."""
        with self._lock:
            copy = StoreCounts(**{name: getattr(self._counts, name) for name in StoreCounts.__slots__})
            copy.is_open = self._circuit.is_open
            return copy

    def use(self) -> StoreUse:
        """Return the use since the store was made, and whether it is switched off now."""
        counts = self.counts()
        last = counts.last_failure
        return StoreUse(
            bytes_read=counts.num_bytes_read,
            bytes_written=counts.num_bytes_written,
            records_read=counts.num_hits,
            verify_failures=counts.num_verify_failures,
            call_failures=counts.num_failures,
            switched_off=int(counts.is_open),
            failure=last.message[:MAX_REASON_CHARACTERS] if last is not None else "",
        )

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the payload of each key, or None where no valid record is stored."""
        records = self._ask(lambda: _one_each(self._store.get(keys), keys)) or [None] * len(keys)
        payloads = [_verified(key, record) for key, record in zip(keys, records, strict=True)]
        bad = [
            key
            for key, record, payload in zip(keys, records, payloads, strict=True)
            if record is not None and payload is None
        ]
        hits = [payload for payload in payloads if payload is not None]
        with self._lock:
            self._counts.num_hits += len(hits)
            self._counts.num_bytes_read += sum(map(len, hits))
            self._counts.num_verify_failures += len(bad)
        if bad:
            self.delete(bad)
        return payloads

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that the records of these keys were used together (`KVStore.used`)."""
        # Never the one call that an open circuit lets through: many stores do nothing here, and never fail.
        if keys and not self._circuit.is_open:
            self._ask(lambda: self._store.used(keys))

    def put(self, records: Mapping[bytes, bytes]) -> bool:
        """Keep these payloads; return whether that was done."""

        def store() -> int:
            self._store.put({key: seal(key, payload) for key, payload in records.items()})
            return sum(map(len, records.values()))

        num_bytes = self._ask(store)
        with self._lock:
            self._counts.num_bytes_written += num_bytes or 0
        return num_bytes is not None

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete these records, if it can be done."""
        if keys:
            self._ask(lambda: self._store.delete(keys))

    def release(self, keys: Sequence[bytes]) -> None:
        """Do nothing: this store keeps nothing in memory."""

    def discard_all(self) -> None:
        """Do nothing: this store keeps nothing in memory."""

    def clear(self, prefix: bytes, seconds: float) -> ErrorInfo | None:
        """Delete all records whose keys begin with `prefix`, in at most about `seconds`.

        Returns:
            Why some records may be left; None if all were deleted.
        """

        def clear() -> int:
            return clear_records(self._store, prefix, self._clock, self._clock() + seconds)

        _, failure = self._try(clear)
        return failure

    def close(self) -> None:
        """Close the store, even while the circuit is open. No call may follow."""
        try:
            self._store.close()
        except Exception as error:
            self._note_failure(error)

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        """Return the answer of the store; None when the call fails or the store is switched off."""
        return self._try(call)[0]

    def _try(self, call: Callable[[], _T]) -> tuple[_T | None, ErrorInfo | None]:
        """Return the answer of the store, or why there is none."""
        with self._lock:
            if not self._circuit.may_ask():
                return None, _SWITCHED_OFF
        try:
            answer = call()
        except BaseException as error:
            failure = self._note_failure(error)
            if isinstance(error, Exception):
                return None, failure
            raise
        with self._lock:
            self._circuit.succeed()
        return answer, None

    def _note_failure(self, error: BaseException) -> ErrorInfo:
        failure = describe(error)
        with self._lock:
            self._circuit.fail()
            self._counts.num_failures += 1
            self._counts.last_failure = failure
        return failure


def _one_each(answers: list[_T], keys: Sequence[bytes]) -> list[_T]:
    if len(answers) != len(keys):
        raise ValueError(f"{len(keys)} keys were requested, but {len(answers)} answers came")
    return answers


def _verified(key: bytes, record: object) -> bytes | None:
    return unseal(key, record) if isinstance(record, bytes) else None
