"""The records on a Redis or Valkey server, through the library `redis` (extra `stores`).

A record is a Redis string whose name is `penstock:` and the record's key. Records are given up only by the
server (`maxmemory`, with the policy `allkeys-lru`). Loads `redis`; only `store.open_store` imports this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.kvstore.failures import place_of, reported
from penstock.kvstore.found import SCAN_KEYS, Found, some_at_a_time
from penstock.kvstore.names import MAX_KEY_BYTES, MIN_KEY_BYTES

_SECONDS = 5.0  # for the whole answer to one command, or to several that were sent together
_CONNECT_SECONDS = 2.0
_PREFIX = b"penstock:"
_MAX_KEYS = 64  # of one command, or commands that are sent together
_REMEDY = "Check that the server is up, its address and password, and how much memory it may use."
_ERRORS = (redis.RedisError, OSError, ValueError)


def open_redis(url: str) -> RedisStore:
    """Return the store at a redis:// or rediss:// URL, which may hold user, password and database number.

    Raises `StoreError` if the URL cannot be right. No connection is made before the first use.
    """
    address = place_of(url)
    with reported(address, _REMEDY, _ERRORS):
        client = redis.Redis.from_url(
            url,
            connection_class=_TLSConnection if address.startswith("rediss:") else _Connection,
            socket_timeout=_SECONDS,
            socket_connect_timeout=_CONNECT_SECONDS,
            # One more try, since the server may have closed a connection that was not used for a while; none
            # after a timeout, since a server that is late would be late again.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
    return RedisStore(client, address)


def _raise_first(answers: Sequence[object]) -> None:
    """Raise the first of these answers that is an error.

    The library could raise it by itself. But then it would put the whole command into the error's text, which
    takes a second for a record of some megabytes.
    """
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


class _Connection(redis.Connection):
    def _connect(self) -> Any:
        connect: Any = super()._connect  # which says nothing of types
        return _TimedSocket(connect())


class _TLSConnection(redis.SSLConnection):
    def _connect(self) -> Any:
        connect: Any = super()._connect  # which says nothing of types
        return _TimedSocket(connect())


class _TimedSocket:
    """A socket that limits the time of a whole answer, counted from the last time that something was sent.

    The timeout of an ordinary socket starts again with each piece that arrives, so an answer that arrives a
    byte at a time would hold its reader for hours.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._timeout: float | None = inner.gettimeout()
        self._deadline = time.monotonic() + _SECONDS

    def sendall(self, data: bytes) -> None:
        self._deadline = time.monotonic() + _SECONDS
        self._inner.settimeout(self._timeout)
        self._inner.sendall(data)

    def recv(self, num_bytes: int) -> bytes:
        self._limit_wait()
        received: bytes = self._inner.recv(num_bytes)
        return received

    def recv_into(self, buffer: bytearray) -> int:
        self._limit_wait()
        num_bytes: int = self._inner.recv_into(buffer)
        return num_bytes

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds
        self._inner.settimeout(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _limit_wait(self) -> None:
        if self._timeout == 0.0:  # the caller does not wait
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer takes too long")
        self._inner.settimeout(left if self._timeout is None else min(left, self._timeout))


class RedisStore:
    """A `KVStore` on a Redis or Valkey server.

    Args:
        client: a `redis.Redis`; its `mget`, `delete`, `scan`, `close`, and `pipeline` of `set` and `strlen`
            are used.
        address: the store's name in errors, without passwords.
    """

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._place = address

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        records: list[bytes | None] = []
        with reported(self._place, _REMEDY, _ERRORS):
            for some in some_at_a_time(keys, _MAX_KEYS):
                records += self._client.mget([_PREFIX + key for key in some])
        return records

    def used(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the server decides what is given up."""

    def put(self, records: Mapping[bytes, bytes]) -> None:
        """Keep records; the first is sent last, so a server that gives up the oldest keeps it longest."""
        with reported(self._place, _REMEDY, _ERRORS):
            for some in some_at_a_time(list(reversed(list(records))), _MAX_KEYS):
                pipeline = self._client.pipeline(transaction=False)
                for key in some:
                    pipeline.set(_PREFIX + key, records[key])
                _raise_first(pipeline.execute(raise_on_error=False))

    def delete(self, keys: Sequence[bytes]) -> None:
        with reported(self._place, _REMEDY, _ERRORS):
            for some in some_at_a_time(keys, _MAX_KEYS):
                self._client.delete(*(_PREFIX + key for key in some))

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        """Yield records as `KVStore.scan` does; some pages are empty.

        The scan goes through the keys of the whole database.
        """
        pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", _PREFIX + prefix) + b"*"
        cursor = None
        while cursor != 0:
            with reported(self._place, _REMEDY, _ERRORS):
                cursor, names = self._client.scan(cursor or 0, match=pattern, count=SCAN_KEYS)
                records = self._sizes(names)
            yield records

    def _sizes(self, names: Sequence[bytes]) -> list[Found]:
        """Return the records with their sizes, without reading them; other keys are passed over."""
        keys = [name[len(_PREFIX) :] for name in names]
        records: list[Found] = []
        possible = [key for key in keys if MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES]
        for some in some_at_a_time(possible, _MAX_KEYS):
            pipeline = self._client.pipeline(transaction=False)
            for key in some:
                pipeline.strlen(_PREFIX + key)
            sizes = pipeline.execute(raise_on_error=False)  # an error for a value that is not a string
            pairs = zip(some, sizes, strict=True)
            records += [Found(key, size) for key, size in pairs if isinstance(size, int)]
        return records

    def close(self) -> None:
        with reported(self._place, _REMEDY, _ERRORS):
            self._client.close()
