"""R9: whatever a store does, whoever asks through the guard meets a miss and no error."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import StoreError
from penstock.kvstore import store
from penstock.kvstore.found import Found
from penstock.kvstore.guard import MAX_FAILURES, PAUSE_SECONDS, WINDOW_SECONDS, GuardedStore
from penstock.kvstore.names import namespace, record_key
from penstock.kvstore.record import seal
from penstock.kvstore.store import MemoryStore

SPACE = namespace(bytes(32), dtype="bfloat16", block_size=32, kind="keys and values")
KEYS = [record_key(SPACE, bytes([n]) * 32, layer, 0) for n in range(2) for layer in range(3)]
PAYLOADS = {key: random.Random(n).randbytes(100 + n) for n, key in enumerate(KEYS)}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Moody(MemoryStore):
    """Raises `error` at every call while it is set, and counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.num_calls = 0

    def _feel(self) -> None:
        self.num_calls += 1
        if self.error is not None:
            raise self.error

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        for page in super().scan(prefix):
            self._feel()
            yield page

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._feel()
        return super().get(keys)

    def put(self, records: Mapping[bytes, bytes]) -> None:
        self._feel()
        super().put(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._feel()
        super().delete(keys)

    def close(self) -> None:
        self._feel()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def moody() -> Moody:
    return Moody()


@pytest.fixture
def guard(moody: Moody, clock: Clock) -> GuardedStore:
    store = GuardedStore(moody, clock)
    store.put(PAYLOADS)
    moody.num_calls = 0
    return store


def test_payloads_come_back_and_are_counted(guard: GuardedStore) -> None:
    unknown = record_key(SPACE, bytes(32), 9, 0)
    assert guard.get([*KEYS, unknown]) == [*PAYLOADS.values(), None]
    total = sum(map(len, PAYLOADS.values()))
    counts = guard.counts()
    assert (counts.num_hits, counts.num_failures) == (len(KEYS), 0)
    assert (counts.num_bytes_read, counts.num_bytes_written) == (total, total)
    assert not counts.is_open
    guard.delete(KEYS)
    assert guard.get(KEYS) == [None] * len(KEYS)
    assert guard.get([]) == []


@pytest.mark.parametrize(
    "fault",
    ["cut short", "flipped bit", "empty", "swapped layer", "another model", "bare payload", "no bytes"],
)
def test_r9_a_bad_record_is_missing_and_goes_away(guard: GuardedStore, moody: Moody, fault: str) -> None:
    key, record = KEYS[1], moody.records[KEYS[1]]
    flipped = bytearray(record)
    flipped[-1] ^= 1
    foreign = record_key(namespace(b"x" * 32, dtype="bfloat16", block_size=32, kind=""), bytes(32), 1, 0)
    moody.records[key] = {
        "cut short": record[:-1],
        "flipped bit": bytes(flipped),
        "empty": b"",
        "swapped layer": moody.records[KEYS[2]],
        "another model": seal(foreign, PAYLOADS[key]),
        "bare payload": PAYLOADS[key],
        "no bytes": "a text",  # type: ignore[dict-item]
    }[fault]
    expected = [None if k == key else payload for k, payload in PAYLOADS.items()]
    assert guard.get(KEYS) == expected
    assert guard.counts().num_verify_failures == 1
    assert guard.counts().num_failures == 0
    assert key not in moody.records
    assert guard.get([key]) == [None]
    assert guard.counts().num_verify_failures == 1


@pytest.mark.parametrize(
    "error",
    [StoreError("disk full."), OSError(30, "read-only"), RuntimeError("odd"), MemoryError(), KeyError(1)],
)
def test_r9_no_error_gets_out(guard: GuardedStore, moody: Moody, error: Exception) -> None:
    moody.error = error
    assert guard.clear(SPACE, 60.0) is not None
    assert guard.get(KEYS) == [None] * len(KEYS)
    guard.put({KEYS[0]: b"new"})
    guard.delete(KEYS)
    guard.close()
    counts = guard.counts()
    assert counts.num_failures == 5
    assert counts.num_hits == 0
    assert counts.num_bytes_written == sum(map(len, PAYLOADS.values()))
    assert counts.last_failure is not None


def test_the_end_of_the_program_is_not_kept_back(guard: GuardedStore, moody: Moody) -> None:
    moody.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        guard.get(KEYS)
    moody.error = None
    assert guard.get(KEYS) == list(PAYLOADS.values())


def test_r9_half_an_answer_is_a_failure(clock: Clock) -> None:
    class Half(MemoryStore):
        def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
            return super().get(keys)[:-1]

    guard = GuardedStore(Half(), clock)
    guard.put(PAYLOADS)
    assert guard.get(KEYS) == [None] * len(KEYS)
    assert guard.counts().num_failures == 1


def test_h16_a_namespace_is_cleared_and_no_other(guard: GuardedStore, moody: Moody) -> None:
    others = {b"another model   " + bytes([n]) * 36: b"x" for n in range(3)}
    moody.records |= others
    assert guard.clear(SPACE, 60.0) is None
    assert moody.records == others


def test_h16_a_clearing_that_takes_too_long_ends_and_says_how_far_it_came(
    guard: GuardedStore, moody: Moody, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SCAN_KEYS", 2)
    monkeypatch.setattr(moody, "delete", lambda keys: setattr(clock, "now", clock.now + 25.0))
    failure = guard.clear(SPACE, 40.0)
    assert failure is not None
    assert failure.kind == "StoreError"
    assert "4 were deleted" in failure.message
    assert guard.counts().num_failures == 1


# --- the circuit ------------------------------------------------------------------------------------


def fail(guard: GuardedStore, moody: Moody, times: int = 1) -> None:
    moody.error = StoreError("gone.")
    for _ in range(times):
        guard.get(KEYS)


def test_r9_after_five_failures_nothing_is_asked(guard: GuardedStore, moody: Moody, clock: Clock) -> None:
    fail(guard, moody, MAX_FAILURES - 1)
    assert not guard.counts().is_open
    fail(guard, moody)
    assert guard.counts().is_open
    moody.error = None
    assert guard.get(KEYS) == [None] * len(KEYS)
    refused = guard.clear(SPACE, 60.0)
    assert refused is not None
    assert "not used for a while" in refused.message
    guard.put({KEYS[0]: b"new"})
    clock.now += PAUSE_SECONDS - 0.01
    guard.delete(KEYS)
    assert moody.num_calls == MAX_FAILURES
    assert guard.counts().num_failures == MAX_FAILURES


def test_r9_a_good_probe_switches_it_on(guard: GuardedStore, moody: Moody, clock: Clock) -> None:
    fail(guard, moody, MAX_FAILURES)
    clock.now += PAUSE_SECONDS
    moody.error = None
    assert guard.get(KEYS) == list(PAYLOADS.values())
    assert not guard.counts().is_open
    fail(guard, moody, MAX_FAILURES - 1)
    assert not guard.counts().is_open, "earlier failures are forgotten"


def test_r9_a_bad_probe_waits_as_long_again(guard: GuardedStore, moody: Moody, clock: Clock) -> None:
    fail(guard, moody, MAX_FAILURES)
    for probe in range(1, 4):
        clock.now += PAUSE_SECONDS
        fail(guard, moody, 3)
        assert moody.num_calls == MAX_FAILURES + probe
        assert guard.counts().is_open


def test_failures_far_apart_do_not_count_together(guard: GuardedStore, moody: Moody, clock: Clock) -> None:
    for _ in range(3 * MAX_FAILURES):
        fail(guard, moody)
        clock.now += WINDOW_SECONDS / (MAX_FAILURES - 1) + 0.01
    assert not guard.counts().is_open


def test_while_one_probes_the_others_miss(clock: Clock) -> None:
    class Asking(Moody):
        """Asks its own guard from inside a call, as another thread would."""

        guard: GuardedStore | None = None
        seen: list[bytes | None] | None = None

        def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
            guard, self.guard = self.guard, None
            if guard is not None:
                self.seen = guard.get(keys)
            return super().get(keys)

    store = Asking()
    guard = GuardedStore(store, clock)
    guard.put(PAYLOADS)
    fail(guard, store, MAX_FAILURES)
    clock.now += PAUSE_SECONDS
    store.error, store.guard = None, guard
    assert guard.get(KEYS) == list(PAYLOADS.values())
    assert store.seen == [None] * len(KEYS)


def test_close_reaches_a_store_that_is_switched_off(guard: GuardedStore, moody: Moody) -> None:
    fail(guard, moody, MAX_FAILURES)
    guard.close()
    assert moody.num_calls == MAX_FAILURES + 1


def test_threads_lose_no_count(moody: Moody, clock: Clock) -> None:
    guard = GuardedStore(moody, clock)
    guard.put(PAYLOADS)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: guard.get(KEYS), range(200)))
    assert answers == [list(PAYLOADS.values())] * 200
    assert guard.counts().num_hits == 200 * len(KEYS)


def test_r9_a_call_that_asks_nothing_tells_nothing_of_the_store(
    guard: GuardedStore, moody: Moody, clock: Clock
) -> None:
    """A store may take it for done without being there."""
    moody.error = StoreError("it is gone.")
    for _ in range(MAX_FAILURES):
        guard.get(KEYS)
    clock.now += PAUSE_SECONDS + 1
    moody.error = None
    guard.used([])
    guard.delete([])
    guard.used(KEYS)
    assert guard.counts().is_open
