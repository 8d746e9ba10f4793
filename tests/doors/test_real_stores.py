"""Stores against real servers, also behind a way that stands still, breaks off or ends nowhere (row R9).

    PENSTOCK_TEST_REDIS_URL   redis://:PASSWORD@HOST:PORT/0 of a Redis or Valkey server that wants a password
    PENSTOCK_TEST_S3_URL      s3://BUCKET/PATH of a server that checks signatures; credentials, region and
                              AWS_ENDPOINT_URL (http) are in the environment, as for a user

Where a variable is not set its tests are skipped. They delete the records that they write, and disturb only
the way to the server.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.errors import StoreError
from penstock.kvstore.guard import MAX_FAILURES, GuardedStore
from penstock.kvstore.store import KVStore, open_store
from store_contract import KEYS, RECORDS, behaves, every_call

REDIS, S3 = os.environ.get("PENSTOCK_TEST_REDIS_URL", ""), os.environ.get("PENSTOCK_TEST_S3_URL", "")
ENDPOINT = os.environ.get("AWS_ENDPOINT_URL", "")
needs_redis = pytest.mark.skipif(not REDIS, reason="PENSTOCK_TEST_REDIS_URL names no Redis server")
SECRET = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
HAS_KEY = SECRET and "AWS_ACCESS_KEY_ID" in os.environ  # else one is looked for in the network
needs_s3 = pytest.mark.skipif(
    not (S3 and ENDPOINT and HAS_KEY),
    reason="PENSTOCK_TEST_S3_URL names no bucket, or AWS_ENDPOINT_URL or AWS_ACCESS_KEY_ID is not set",
)


class Way:
    """A port on this machine that leads to a server.

    Attributes:
        is_still: nothing more is passed on, in either direction.
        breaks_after: bytes of the server's answers, after which connections are closed.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._to = parts.hostname or "", parts.port or 0
        self.is_still = False
        self.breaks_after: int | None = None
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """The server is gone."""
        with self._lock:
            for end in (self._listener, *self._ends):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to, 5)
            except OSError:
                return
            with self._lock:
                self._ends += [near, far]
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, sink, is_answer), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                if self.is_still:
                    continue
                if is_answer and self.breaks_after is not None:
                    data, self.breaks_after = data[: self.breaks_after], self.breaks_after - len(data)
                    if self.breaks_after < 0:
                        self.breaks_after = 0
                        sink.sendall(data)
                        break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def opened(kind: str, way: Way | None, monkeypatch: pytest.MonkeyPatch) -> KVStore:
    """The store behind the way, or at the server itself."""
    pytest.importorskip("redis" if kind == "redis" else "obstore")
    if kind == "redis":
        return open_store(
            REDIS if way is None else re.sub(r"[^@/]+:\d+(?=/|$)", f"127.0.0.1:{way.port}", REDIS)
        )
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", ENDPOINT if way is None else f"http://127.0.0.1:{way.port}")
    return open_store(S3)


@pytest.fixture(params=[pytest.param("redis", marks=needs_redis), pytest.param("s3", marks=needs_s3)])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    clean(request.param)
    yield request.param
    clean(request.param)


def clean(kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        store = opened(kind, None, patch)
        store.delete(KEYS)
        store.close()


@pytest.fixture
def way(kind: str) -> Iterator[Way]:
    one = Way(REDIS if kind == "redis" else ENDPOINT)
    yield one
    one.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second for an answer."""
    from penstock.kvstore import object_store, redis_store

    monkeypatch.setattr(redis_store, "_SECONDS", 1)
    monkeypatch.setattr(object_store, "_SECONDS", 1)


def test_a_real_server_behaves_as_a_store(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(kind, None, monkeypatch)
    behaves(store)
    store.close()


def test_records_of_a_megabyte_come_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(kind, None, monkeypatch)
    records = {key: bytes([number]) * (1 << 20) for number, key in enumerate(KEYS[:8])}
    store.put(records)
    assert store.get(KEYS[:9]) == [*records.values(), None]
    store.close()


def test_r9_a_server_that_goes_in_the_middle_is_an_error_and_may_come_back(
    kind: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(kind, way, monkeypatch)
    store.put(RECORDS)
    way.breaks_after = 1000
    with pytest.raises(StoreError, match="KV store"):
        store.get(KEYS)
    way.breaks_after = None
    assert store.get(KEYS) == [*RECORDS.values()]
    way.close()
    for call in every_call(store):
        with pytest.raises(StoreError, match="KV store"):
            call()
    store.close()


@pytest.mark.usefixtures("impatient")
def test_r9_a_server_that_stands_still_is_an_error(
    kind: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(kind, way, monkeypatch)
    store.put(RECORDS)
    way.is_still = True
    with pytest.raises(StoreError, match="KV store"):
        store.get(KEYS)
    way.is_still = False
    assert store.get(KEYS[:3]) == [*RECORDS.values()][:3]
    store.close()


def test_r9_behind_a_guard_a_server_that_is_gone_only_misses(
    kind: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = GuardedStore(opened(kind, way, monkeypatch))
    assert store.put({KEYS[0]: b"kept"})
    assert store.get(KEYS[:2]) == [b"kept", None]
    way.close()
    for _ in range(MAX_FAILURES):
        assert store.get(KEYS[:2]) == [None, None]
    assert store.counts().is_open
    assert not store.put({KEYS[1]: b"lost"})
    store.close()


def test_r9_wrong_credentials_are_an_error_that_does_not_tell_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "redis":
        store: Any = open_store(re.sub(r"//.*@", "//:not-the-secret@", REDIS))
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
        store = opened(kind, None, monkeypatch)
    for call in every_call(store):
        with pytest.raises(StoreError) as raised:
            call()
        assert "not-the-secret" not in str(raised.value)
    store.close()
