"""Stores against real servers that are killed, stopped, slow, full or do not know us (row R9).

Redis is Debian's `redis-server`. S3 is SeaweedFS, whose program a wheel brings: of the S3 servers that a
package registry has it is the one that people run in production (`real_servers` says more). What no server
can be made to show is in `tests/unit/kvstore` and `tests/pipeline/test_faulty_stores.py`, with fakes.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeClock
from penstock import LLM, AsyncLLM, SamplingParams
from penstock.engine.stats import CoreStats
from penstock.errors import StoreError
from penstock.kvstore import object_store, opening, redis_store
from penstock.kvstore.guard import MAX_FAILURES, PAUSE_SECONDS, GuardedStore
from penstock.kvstore.inspection import open_to_read, survey
from penstock.kvstore.store import KVStore, open_store
from real_servers import SECRET, RealServer, RedisServer, S3Server
from small_engines import BLOCK, findable, run, small_engine, wait_until_stored
from store_contract import FOREIGN, KEYS, RECORDS, behaves, every_call
from tcp_way import Way

pytestmark = pytest.mark.doors

HANG_S = 60.0  # against a call that never ends; all limits together are far less
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


Address = Callable[..., str]
Open = Callable[..., KVStore]


@pytest.fixture
def address(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Address:
    """The address of the test's own store, with this secret and through this port, for which the environment
    is set."""
    name = server.new_name()

    def address_by(secret: str = SECRET, port: int = 0) -> str:
        for variable, value in server.variables(secret, port).items():
            monkeypatch.setenv(variable, value)
        return server.url(name, secret, port)

    return address_by


@pytest.fixture
def opened(address: Address) -> Iterator[Open]:
    """Opens the test's own store: with this secret, through this port."""
    stores: list[KVStore] = []

    def open_one(secret: str = SECRET, port: int = 0) -> KVStore:
        stores.append(open_store(address(secret, port)))
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
    sizes = [0, 1, 100, 64 << 10, MB, MB + 1, 12 * MB]  # obstore sends the last in several parts
    records = {KEYS[number]: bytes([number + 1]) * size for number, size in enumerate(sizes)}
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
    assert MAX_FAILURES <= store.counts().num_failures <= MAX_FAILURES + 2, "and calls under way"
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
            with suppress(StoreError):  # another try may go well
                call()
            assert way.breaks_after is None, "it did break off"
            assert store.get(KEYS) == [*RECORDS.values()]


# --- a server that is slow --------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_r9_every_call_of_a_stopped_server_ends_with_an_error(server: RealServer, opened: Open) -> None:
    """A call that got no answer may be carried out later: deleted records may be there or not, but whole."""
    store = opened()
    store.put(RECORDS)
    server.stand_still()
    for call in every_call(store):
        ends_with_an_error(call)
    server.start()
    for found, record in zip(store.get(KEYS), RECORDS.values(), strict=True):
        assert found in (None, record)
    store.put(FOREIGN)
    assert store.get(list(FOREIGN)) == [*FOREIGN.values()]


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
        get, scan, put, _ = every_call(store)  # to delete what is not there is no error
        errors = [str(ends_with_an_error(call)) for call in (get, scan, put)]
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
            assert store.put({key: key * (MB // 52)})
        found = store.get(KEYS[:20])
        assert all(payload in (None, KEYS[number] * (MB // 52)) for number, payload in enumerate(found))
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


# --- whole engines ----------------------------------------------------------------------------------

NUM_ROUNDS = 16
ROUNDS = [
    [[(11 * index + 5 * turn + number) % 90 for index in range(17 + 24 * number)] for number in range(3)]
    for turn in range(NUM_ROUNDS)
]
NUM_FOUND = sum(map(findable, ROUNDS[0]))
DEMO = Path("demo")
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "dtype": "float32"}
PROCESSES: dict[str, Any] = TWO_STAGES | {"threads_per_rank": 1, "block_size": BLOCK}
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
HARM_AT = 100  # tokens


@pytest.fixture(scope="module")
def cold() -> list[list[list[int]]]:
    """What an engine without a store and a cache says, round by round."""
    with small_engine(DEMO, enable_prefix_caching=False, dtype="float32") as llm:
        return [run(llm, prompts)[0] for prompts in ROUNDS]


@pytest.fixture(scope="module")
def cold_long() -> list[list[int]]:
    with small_engine(DEMO, enable_prefix_caching=False, dtype="float32") as llm:
        return run(llm, ROUNDS[0], LONG)[0]


def stats_of(llm: LLM) -> CoreStats:
    stats = llm.stats()
    assert stats is not None
    return stats


def fill(url: str, cold: Sequence[Sequence[Sequence[int]]]) -> None:
    """Store what the first round has."""
    with small_engine(DEMO, kv_store=url, **TWO_STAGES) as llm:
        assert run(llm, ROUNDS[0]) == (cold[0], 0)
        wait_until_stored(llm, ROUNDS[0], cold[0])


def test_h1_an_engine_that_starts_again_finds_what_the_one_before_has_stored(
    address: Address, cold: list[list[list[int]]]
) -> None:
    """Two stages, each a process with connections of its own."""
    url = address()
    with LLM("demo", kv_store=url, **PROCESSES) as llm:
        assert run(llm, ROUNDS[0]) == (cold[0], 0)
        wait_until_stored(llm, ROUNDS[0], cold[0])
        num_stored = stats_of(llm).store.stored_blocks
    with closing(open_to_read(url)) as store:
        (found,) = survey(store)
    assert found.num_blocks == num_stored
    assert found.description is not None
    assert found.description.block_size == BLOCK
    with LLM("demo", kv_store=url, kv_store_patience_s=60.0, **PROCESSES) as llm:
        assert run(llm, ROUNDS[0]) == (cold[0], NUM_FOUND)
        assert stats_of(llm).store.use.call_failures == stats_of(llm).store.use.verify_failures == 0


@pytest.mark.parametrize("harm", [RealServer.kill, RealServer.stand_still])
def test_r9_streams_go_on_when_the_server_is_killed_or_stopped_under_them(
    server: RealServer, address: Address, cold_long: list[list[int]], harm: Callable[[RealServer], None]
) -> None:
    async def stream(llm: AsyncLLM, number: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate({"prompt_token_ids": ROUNDS[0][number]}, LONG):
            if number == 0 and len(tokens) < HARM_AT <= len(output.outputs[0].token_ids):
                harm(server)
            tokens = output.outputs[0].token_ids
        return tokens

    async def use() -> None:
        async with AsyncLLM("demo", kv_store=address(), **PROCESSES) as llm:
            assert await asyncio.gather(*(stream(llm, number) for number in range(3))) == cold_long

    asyncio.run(use())


def test_r9_nobody_waits_longer_than_his_patience_for_a_stopped_server(
    server: RealServer, address: Address, cold: list[list[list[int]]]
) -> None:
    url = address()
    fill(url, cold)
    with small_engine(DEMO, kv_store=url, **TWO_STAGES | {"kv_store_patience_s": 0.2}) as llm:
        server.stand_still()
        assert run(llm, ROUNDS[0]) == (cold[0], 0)
        server.start()


def test_r9_an_engine_leaves_a_killed_server_alone_and_uses_it_again(
    server: RealServer,
    address: Address,
    cold: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(opening, "GuardedStore", lambda inner: GuardedStore(inner, clock))
    url = address()
    fill(url, cold)
    turns = iter(range(1, NUM_ROUNDS))

    def take_a_turn(llm: LLM) -> None:
        turn = next(turns)
        for prompt, tokens in zip(ROUNDS[turn], cold[turn], strict=True):
            assert run(llm, [prompt])[0] == [tokens]

    with small_engine(DEMO, kv_store=url, **TWO_STAGES) as llm:
        server.kill()
        while stats_of(llm).store.use.switched_off < 3:  # core and both ranks
            take_a_turn(llm)
        num_failures = stats_of(llm).store.use.call_failures
        take_a_turn(llm)
        assert stats_of(llm).store.use.call_failures == num_failures == 3 * MAX_FAILURES

        server.start()
        clock.advance(PAUSE_SECONDS)
        while stats_of(llm).store.use.switched_off:
            take_a_turn(llm)
        assert run(llm, ROUNDS[0]) == (cold[0], NUM_FOUND)
        assert stats_of(llm).store.use.call_failures == num_failures
