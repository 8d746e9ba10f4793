"""Which store an address means, and the stores of the extra `stores` against stand-ins of their servers."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StoreError, UsageError
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.lmdb_store import LmdbStore
from penstock.kvstore.store import KVStore, MemoryStore, directory_of, kind_of, open_store
from store_contract import KEYS, RECORDS, behaves, every_call

# --- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "lmdb://{}", "LMDB://{}"])
def test_a_path_is_an_lmdb_directory(tmp_path: Path, form: str) -> None:
    store = open_store(form.format(tmp_path / "kv"), quota_bytes=2 << 20)
    assert isinstance(store, LmdbStore)
    behaves(store)
    store.close()
    assert (tmp_path / "kv" / "data.mdb").stat().st_size <= 2 << 20


def test_memory_is_a_dict() -> None:
    store = open_store("memory:")
    assert isinstance(store, MemoryStore)
    behaves(store)
    store.close()


@pytest.mark.parametrize("url", ["http://host/path", "nope://x", "S4://x"])
def test_an_unknown_scheme_names_those_that_are_known(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_store(url)
    for known in ("lmdb://", "s3://", "gs://", "az://", "file://", "redis://", "memory:"):
        assert known in str(raised.value)


@pytest.mark.parametrize("url", ["", "lmdb://", "s3://", "memory:/x", "memory://x"])
def test_an_address_without_a_path_or_with_one_too_many_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="path"):
        open_store(url)


@pytest.mark.parametrize("call", [open_store, kind_of, directory_of])
@pytest.mark.parametrize(
    "url", ["redis://:secret@[::1:6379/0", "s3://[bucket", "FILE://[x", "redis://\u2100.io"]
)
def test_an_address_that_is_not_a_url_is_refused_and_not_shown(
    url: str, call: Callable[[str], object]
) -> None:
    with pytest.raises(UsageError, match="is not a URL") as raised:
        call(url)
    assert "secret" not in f"{raised.value} {raised.value.remedy}"
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("url", ["memory:", "s3://bucket/path", "redis://host"])
def test_a_quota_that_nobody_would_keep_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="a quota of 1,048,576 bytes"):
        open_store(url, quota_bytes=1 << 20)


@pytest.mark.parametrize(("url", "library"), [("s3://b/p", "obstore"), ("redis://host", "redis")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, url: str, library: str) -> None:
    for module in ("redis_store", "object_store"):
        monkeypatch.delitem(sys.modules, f"penstock.kvstore.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"needs the library {library}.*pip install 'penstock\[stores\]'"):
        open_store(url)


# --- objects ----------------------------------------------------------------------------------------


@pytest.fixture
def object_store() -> Iterator[Any]:
    pytest.importorskip("obstore")
    from obstore.store import MemoryStore as Objects

    from penstock.kvstore.object_store import ObjectStore

    store = ObjectStore(Objects(), "memory")
    yield store
    store.close()


def test_objects_behave_as_a_store(object_store: KVStore) -> None:
    behaves(object_store)


def test_objects_in_a_directory_behave_as_a_store(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    store = open_store((tmp_path / "a b" / "kv").as_uri())
    behaves(store)
    store.close()
    root = tmp_path / "a b" / "kv"
    names = [path.relative_to(root).as_posix() for path in root.glob("*/*/*")]
    assert len(names) == len(KEYS) - 2
    assert f"{KEYS[5].hex()[:32]}/{KEYS[5].hex()[32:36]}/{KEYS[5].hex()[32:]}" in names
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("url", ["s3://bucket/path", "gs://bucket/path"])
def test_buckets_are_not_asked_when_they_are_opened(url: str) -> None:
    pytest.importorskip("obstore")
    open_store(url).close()


def test_an_address_without_a_bucket_is_an_error() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(StoreError, match="KV store s3:///x: ") as raised:
        open_store("s3://user:secret@/x")
    assert "secret" not in str(raised.value)


def test_r9_a_bucket_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    from obstore.exceptions import PermissionDeniedError

    def denied(*args: object, **options: object) -> None:
        raise PermissionDeniedError("not yours\n\nDebug source:\nsecret")

    store = open_store("s3://bucket/path")
    for call in ("get", "put", "list", "delete"):
        monkeypatch.setattr(obstore, call, denied)
    for call_it in every_call(store):
        with pytest.raises(StoreError, match=r"path: PermissionDeniedError: not yours\. Check") as raised:
            call_it()
        assert "secret" not in str(raised.value)
    store.close()
    with pytest.raises(StoreError, match="RuntimeError"):
        store.get(KEYS)


def refusal(code: str) -> str:
    """What obstore says of an answer of S3."""
    return f"""Error performing GET: 404 Not Found: <?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>secret</Message></Error>"""


def test_r9_a_missing_object_is_a_miss_and_a_missing_bucket_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    store = open_store("s3://bucket/path")

    def answer(code: str) -> None:
        def get(*args: object) -> None:
            raise FileNotFoundError(refusal(code))

        monkeypatch.setattr(obstore, "get", get)

    answer("NoSuchKey")
    assert store.get(KEYS[:2]) == [None, None]
    for code in ("NoSuchBucket", "ContainerNotFound"):
        answer(code)
        with pytest.raises(StoreError, match=f"path: FileNotFoundError, {code}: Error performing") as raised:
            store.get(KEYS[:2])
        assert "secret" not in str(raised.value)
    store.close()


@pytest.mark.parametrize(
    ("allowed", "cause"), [("true", "Connect|connect|error sending"), ("false", "builder")]
)
def test_the_environment_may_allow_a_server_without_tls(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int, allowed: str, cause: str
) -> None:
    pytest.importorskip("obstore")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused_tcp_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", allowed)
    store = open_store("s3://bucket/path")
    with pytest.raises(StoreError, match=cause):
        store.get(KEYS[:1])
    store.close()


def test_r9_a_directory_of_objects_that_vanishes_only_misses(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    import shutil

    guard = GuardedStore(open_store((tmp_path / "kv").as_uri()))
    guard.put(RECORDS)
    shutil.rmtree(tmp_path / "kv")
    assert guard.get(KEYS) == [None] * len(KEYS)
    (tmp_path / "kv").write_text("in the way", encoding="utf-8")
    guard.put(RECORDS)
    assert guard.get(KEYS) == [None] * len(KEYS)
    assert guard.counts().num_failures >= 1
    guard.close()


# --- Redis ------------------------------------------------------------------------------------------


class FakeRedis:
    """The few commands that are used; raises `error` while it is set, and answers `full` to what is set."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.full: Exception | None = None
        self.max_keys = 0
        self.is_closed = False

    def scan(self, cursor: int, *, match: bytes, count: int) -> tuple[int, list[bytes]]:
        self._note(1)
        names = sorted(self.values)[cursor : cursor + count]
        found = [name for name in names if fnmatch.fnmatchcase(name.hex(), _hex_pattern(match))]
        return (cursor + count if cursor + count < len(self.values) else 0), found

    def mget(self, keys: list[bytes]) -> list[bytes | None]:
        self._note(len(keys))
        return [self.values.get(key) for key in keys]

    def delete(self, *keys: bytes) -> int:
        self._note(len(keys))
        return sum(self.values.pop(key, None) is not None for key in keys)

    def pipeline(self, *, transaction: bool) -> FakePipeline:
        assert not transaction
        return FakePipeline(self)

    def close(self) -> None:
        self.is_closed = True

    def _note(self, num_keys: int) -> None:
        assert num_keys > 0, "Redis refuses a command without keys"
        self.max_keys = max(self.max_keys, num_keys)
        if self.error is not None:
            raise self.error


def _hex_pattern(match: bytes) -> str:
    """Of a pattern that ends with its only star; all else in it is escaped where it must be."""
    assert match.endswith(b"*")
    return re.sub(rb"\\(.)", rb"\1", match[:-1], flags=re.DOTALL).hex() + "*"


class FakePipeline:
    def __init__(self, server: FakeRedis) -> None:
        self._server = server
        self._commands: list[Callable[[], object]] = []

    def strlen(self, key: bytes) -> None:
        self._commands.append(lambda: len(self._server.values.get(key, b"")))

    def set(self, key: bytes, value: bytes) -> None:
        self._commands.append(lambda: self._server.full or self._server.values.update({key: value}) or True)

    def execute(self, raise_on_error: bool = True) -> list[object]:
        self._server._note(len(self._commands))
        answers = [command() for command in self._commands]
        if raise_on_error and self._server.full in answers:
            raise type(self._server.full)(f"{self._server.values} of pipeline: {self._server.full}")
        return answers


@pytest.fixture
def server() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def redis_store(server: FakeRedis) -> Any:
    pytest.importorskip("redis")
    from penstock.kvstore.redis_store import RedisStore

    return RedisStore(server, "redis://host/0")


def test_redis_behaves_as_a_store(redis_store: KVStore, server: FakeRedis) -> None:
    behaves(redis_store)
    assert server.max_keys == 64
    assert all(name.startswith(b"penstock:") for name in server.values)
    redis_store.close()
    assert server.is_closed


def test_redis_is_told_the_first_record_last(redis_store: KVStore, server: FakeRedis) -> None:
    redis_store.put(RECORDS)
    assert list(server.values) == [b"penstock:" + key for key in reversed(KEYS)]


def test_r9_a_server_that_refuses_is_an_error(redis_store: KVStore, server: FakeRedis) -> None:
    from redis import AuthenticationError, ConnectionError

    for error in (AuthenticationError("no"), ConnectionError("down"), OSError("reset"), TimeoutError("late")):
        server.error = error
        for call in every_call(redis_store):
            with pytest.raises(StoreError, match=f"redis://host/0: {type(error).__name__}: "):
                call()


def test_r9_a_server_without_room_is_an_error_without_the_record(
    redis_store: KVStore, server: FakeRedis
) -> None:
    from redis.exceptions import OutOfMemoryError

    redis_store.put({KEYS[0]: b"kept"})
    server.full = OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
    cause = r"redis://host/0: OutOfMemoryError: command not allowed when used memory > 'maxmemory'\. Check"
    with pytest.raises(StoreError, match=cause):
        redis_store.put(RECORDS)
    assert redis_store.get(KEYS[:1]) == [b"kept"]


def test_a_password_is_in_no_error(unused_tcp_port: int) -> None:
    pytest.importorskip("redis")
    store = open_store(f"redis://user:secret@127.0.0.1:{unused_tcp_port}/0")
    with pytest.raises(
        StoreError, match=rf"KV store redis://127\.0\.0\.1:{unused_tcp_port}/0: ConnectionError"
    ) as raised:
        store.get(KEYS)
    assert "secret" not in str(raised.value)
    store.close()


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    """Bound and not listened on, so that nobody answers and nobody else takes it."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
