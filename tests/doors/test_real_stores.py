"""Stores against real servers that are killed, stopped, slow, full or do not know us (row R9).

Redis is Debian's `redis-server`. S3 is SeaweedFS, whose program a wheel brings: of the servers that a package
registry has it is the one that people run in production (`real_servers` says more). What no server can be made
to show is in `tests/unit/kvstore` and `tests/pipeline/test_faulty_stores.py`, with fakes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakes import FakeClock
from penstock.errors import StoreError
from penstock.kvstore import object_store, redis_store
from penstock.kvstore.guard import MAX_FAILURES, PAUSE_SECONDS, GuardedStore
from penstock.kvstore.store import KVStore, open_store
from real_servers import SECRET, RealServer, RedisServer, S3Server
from store_contract import KEYS, RECORDS, behaves, every_call
from tcp_way import Way

pytestmark = pytest.mark.doors

HANG_S = 40.0  # against a call that never ends; all limits together are far less
MB = 1 << 20


@pytest.fixture(scope="module", params=[RedisServer, S3Server])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with request.param(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(running: RealServer) -> RealServer:
    """Up, whatever the test before has done to it."""
    running.start()
    return running


@pytest.fixture
def way(server: RealServer) -> Iterator[Way]:
    with Way(server.port) as way:
        yield way


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for an answer."""
    monkeypatch.setattr(redis_store, "_SECONDS", 1)
    monkeypatch.setattr(object_store, "_SECONDS", 1)


Open = Callable[..., KVStore]


@pytest.fixture
def opened(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the test's own store on the server: with this secret, through this port."""
    name, stores = server.new_name(), []

    def open_one(secret: str = SECRET, port: int = 0) -> KVStore:
        for variable, value in server.variables(secret, port).items():
            monkeypatch.setenv(variable, value)
        stores.append(open_store(server.url(name, secret, port)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def ends_with_an_error(call: Callable[[], object]) -> StoreError:
    """The error with which this call ends by itself."""
    errors: queue.Queue[StoreError | None] = queue.Queue()

    def run() -> None:
        try:
            call()
            errors.put(None)
        except StoreError as error:
            errors.put(error)

    threading.Thread(target=run, daemon=True).start()
    error = errors.get(timeout=HANG_S)
    assert error is not None, "the call went well"
    assert "KV store" in str(error)
    return error


# --- a server that works ----------------------------------------------------------------------------


def test_a_real_server_behaves_as_a_store(opened: Open) -> None:
    behaves(opened())


def test_records_of_all_sizes_come_back(opened: Open) -> None:
    sizes = [0, 1, 100, 64 << 10, MB, MB + 1, 12 * MB]  # the last in several parts, where a library likes that
    records = {key: bytes([number + 1]) * size for number, (key, size) in enumerate(zip(KEYS, sizes))}
    store = opened()
    store.put(records)
    assert store.get(KEYS[: len(sizes) + 1]) == [*records.values(), None]
    assert {found.key: found.num_bytes for page in store.scan() for found in page} == {
        key: len(record) for key, record in records.items()
    }


def test_many_threads_of_many_clients_share_a_store(opened: Open) -> None:
    stores = [opened() for _ in range(3)]
    parts = [KEYS[first::8] for first in range(8)]

    def write_and_read(number: int) -> list[bytes | None]:
        stores[number % 3].put({key: RECORDS[key] for key in parts[number]})
        return stores[(number + 1) % 3].get(parts[number])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(write_and_read, range(8)))
    assert found == [[RECORDS[key] for key in part] for part in parts]


# --- a server that goes and comes -------------------------------------------------------------------


def test_r9_connections_from_before_a_restart_cost_no_failure(server: RealServer, opened: Open) -> None:
    store = opened()
    with ThreadPoolExecutor(4) as pool:  # so that several connections are kept
        assert set(pool.map(lambda key: store.put({key: RECORDS[key]}), KEYS)) == {None}
    server.kill()
    server.start()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda key: store.get([key])[0], KEYS)) == [*RECORDS.values()]


def test_r9_every_call_of_a_server_that_is_gone_is_an_error(server: RealServer, opened: Open) -> None:
    store = opened()
    store.put(RECORDS)
    server.kill()
    for call in every_call(store):
        ends_with_an_error(call)


def test_r9_writer_and_readers_of_a_killed_server_only_miss_and_find_all_when_it_is_back(
    server: RealServer, opened: Open
) -> None:
    clock = FakeClock()
    store = GuardedStore(opened(), clock)
    may_end = threading.Event()
    progress = threading.Semaphore(0)

    def write() -> int:
        failed = 0
        while not may_end.is_set():
            for key, record in RECORDS.items():
                failed += not store.put({key: record})
                progress.release()
        return failed

    def read() -> int:
        missed = 0
        while not may_end.is_set():
            for key, found in zip(KEYS[:20], store.get(KEYS[:20]), strict=True):
                assert found in (None, RECORDS[key])
                missed += found is None
        return missed

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work) for work in (write, read, read)]
        try:
            for _ in range(len(KEYS) + 50):  # everything is there, and writing goes on
                assert progress.acquire(timeout=HANG_S)
            server.kill()
            for _ in range(len(KEYS)):
                assert progress.acquire(timeout=HANG_S)
        finally:
            may_end.set()
        assert all(worker.result(HANG_S) > 0 for worker in workers)
    assert MAX_FAILURES <= store.counts().num_failures <= MAX_FAILURES + 2, "those that were under way, at most"
    assert store.counts().is_open

    server.start()
    assert store.get(KEYS[:1]) == [None], "it is left alone"
    clock.advance(PAUSE_SECONDS)
    assert store.get(KEYS) == [*RECORDS.values()]
    assert store.put({KEYS[0]: b"again"})
    assert (store.counts().is_open, store.counts().num_verify_failures) == (False, 0)


def test_r9_an_answer_that_breaks_off_is_an_error_and_the_next_call_works(way: Way, opened: Open) -> None:
    store = opened(port=way.port)
    store.put(RECORDS)
    for call in every_call(store)[:2]:
        for num_bytes in (0, 3, 700):
            way.breaks_after = num_bytes
            try:
                call()  # another try may have gone well
            except StoreError as error:
                assert "KV store" in str(error)
            assert way.breaks_after is None, "it did break off"
            assert store.get(KEYS) == [*RECORDS.values()]


# --- a server that is slow --------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_r9_every_call_of_a_stopped_server_ends_with_an_error(server: RealServer, opened: Open) -> None:
    store = opened()
    store.put(RECORDS)
    server.stand_still()
    for call in every_call(store):
        ends_with_an_error(call)
    server.start()
    assert store.get(KEYS[:3]) == [*RECORDS.values()][:3]


@pytest.mark.usefixtures("impatient")
def test_r9_a_network_that_passes_nothing_on_is_an_error(way: Way, opened: Open) -> None:
    store = opened(port=way.port)
    store.put(RECORDS)
    way.is_still = True
    for call in every_call(store):
        ends_with_an_error(call)


@pytest.mark.usefixtures("impatient")
def test_r9_an_answer_that_drips_is_an_error_though_never_silent_for_long(way: Way, opened: Open) -> None:
    """A byte each half second, and all of it would take hours."""
    store = opened(port=way.port)
    store.put(RECORDS)
    way.drips = 0.5
    ends_with_an_error(lambda: store.get(KEYS))
    way.drips = 0.0
    assert store.get(KEYS) == [*RECORDS.values()]


# --- a server that refuses --------------------------------------------------------------------------


def test_r9_wrong_credentials_are_an_error_that_does_not_tell_them(opened: Open) -> None:
    store = opened(secret="not-the-secret")
    for call in every_call(store):
        assert "not-the-secret" not in str(ends_with_an_error(call))


def test_r9_a_bucket_that_is_missing_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path) as server:
        for variable, value in server.variables().items():
            monkeypatch.setenv(variable, value)
        store = open_store("s3://another-bucket/path")
        errors = [str(ends_with_an_error(call)) for call in every_call(store)[:3]]  # nothing to delete is no error
        store.close()
    assert "NoSuchBucket" in errors[0]
    assert "NoSuchBucket" in errors[1]
    assert "AccessDenied" in errors[2], "it may not be made either"


def test_r9_a_wrong_key_is_told_from_a_wrong_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "not-the-secret"}
    with S3Server(tmp_path) as server:
        for name, code in zip(wrong, ("InvalidAccessKeyId", "SignatureDoesNotMatch"), strict=True):
            for variable, value in (server.variables() | {name: wrong[name]}).items():
                monkeypatch.setenv(variable, value)
            store = open_store(server.url(0))
            for call in every_call(store):
                assert code in str(ends_with_an_error(call))
            store.close()


# --- a server that is full, or takes no such record ---------------------------------------------------


def test_r9_a_redis_without_room_is_counted_and_found_again_when_it_has_some(tmp_path: Path) -> None:
    clock = FakeClock()
    with RedisServer(tmp_path, maxmemory="16mb", maxmemory_policy="noeviction") as server:
        store = GuardedStore(open_store(server.url(0)), clock)
        assert store.put({KEYS[0]: b"first"})
        large = iter(KEYS[1:])
        while store.put({next(large): bytes(4 * MB)}):
            pass
        assert store.counts().num_failures == 1
        failure = store.counts().last_failure
        assert failure is not None
        assert "OutOfMemoryError: command not allowed" in failure.message
        assert store.get(KEYS[:1]) == [b"first"], "what is there is served"

        for _ in range(MAX_FAILURES - 1):
            assert not store.put({KEYS[-1]: bytes(4 * MB)})
        assert store.get(KEYS[:1]) == [None], "it is left alone"
        server.ask("CONFIG", "SET", "maxmemory", "0")
        clock.advance(PAUSE_SECONDS)
        assert store.put({KEYS[-1]: bytes(4 * MB)})
        assert store.get([KEYS[0], KEYS[-1]]) == [b"first", bytes(4 * MB)]
        store.close()


def test_r9_a_redis_that_gives_up_what_is_oldest_only_misses(tmp_path: Path) -> None:
    with RedisServer(tmp_path, maxmemory="16mb", maxmemory_policy="allkeys-lru") as server:
        store = GuardedStore(open_store(server.url(0)))
        for key in KEYS[:20]:
            assert store.put({key: key * (MB // len(key))})
        found = store.get(KEYS[:20])
        assert all(payload in (None, key * (MB // len(key))) for key, payload in zip(KEYS, found))
        assert 0 < store.counts().num_hits < 20
        assert (store.counts().num_failures, store.counts().num_verify_failures) == (0, 0)
        store.close()


LIMITED: list[tuple[type[RealServer], dict[str, str]]] = [
    (RedisServer, {"proto_max_bulk_len": "1mb"}),
    (S3Server, {"volume.fileSizeLimitMB": "1"}),
]


@pytest.mark.parametrize(("kind", "limit"), LIMITED)
def test_r9_a_record_larger_than_the_server_takes_is_refused_and_others_are_kept(
    kind: type[RealServer], limit: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kind(tmp_path, **limit) as server:
        for variable, value in server.variables().items():
            monkeypatch.setenv(variable, value)
        store = GuardedStore(open_store(server.url(0)))
        assert store.put({KEYS[0]: b"small"})
        assert not store.put({KEYS[1]: bytes(3 * MB)})
        assert store.get(KEYS[:2]) == [b"small", None]
        assert store.put({KEYS[1]: b"small, too"})
        assert store.get(KEYS[:2]) == [b"small", b"small, too"]
        assert (store.counts().num_failures, store.counts().is_open) == (1, False)
        store.close()
