"""Records on a Redis or Valkey server, through the library `redis` (extra `stores`).

A record is a string under `penstock:` and its key. Nothing is ever given up here: that is up to the server
(`maxmemory`, with the policy `allkeys-lru`). Loads `redis`; only `store.open_store` imports this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.kvstore.failures import reported

_SECONDS = 5.0  # for each answer
_CONNECT_SECONDS = 2.0
_PREFIX = b"penstock:"
_MAX_KEYS = 64  # of one command
_REMEDY = "Check that the server is up, its address and password, and how much memory it may use."
_ERRORS = (redis.RedisError, OSError, ValueError)

_T = TypeVar("_T")


def open_redis(url: str) -> RedisStore:
    """The store at a redis:// or rediss:// address, which may hold user, password and number of the database.

    Raises `StoreError` if the address cannot be right; the server is first asked when it is used.
    """
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    with reported(place, _REMEDY, _ERRORS):
        client = redis.Redis.from_url(
            url,
            socket_timeout=_SECONDS,
            socket_connect_timeout=_CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 1),  # a connection that the server has closed meanwhile
        )
    return RedisStore(client, place)


class RedisStore:
    """A `KVStore`.

    Args:
        client: a `redis.Redis`; its `mget`, `delete`, `close`, and `pipeline` of `exists` and `set` are used.
        place: what it is called in errors, without passwords.
    """

    def __init__(self, client: Any, place: str) -> None:
        self._client = client
        self._place = place

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        with reported(self._place, _REMEDY, _ERRORS):
            for some in _parts(keys):
                pipeline = self._client.pipeline(transaction=False)
                for key in some:
                    pipeline.exists(_PREFIX + key)
                found += map(bool, pipeline.execute())
        return found

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        records: list[bytes | None] = []
        with reported(self._place, _REMEDY, _ERRORS):
            for some in _parts(keys):
                records += self._client.mget([_PREFIX + key for key in some])
        return records

    def put(self, records: Mapping[bytes, bytes]) -> None:
        """The first key last, so that a server that gives up what was used longest ago keeps it longest."""
        with reported(self._place, _REMEDY, _ERRORS):
            for some in _parts(list(reversed(list(records)))):
                pipeline = self._client.pipeline(transaction=False)
                for key in some:
                    pipeline.set(_PREFIX + key, records[key])
                pipeline.execute()

    def delete(self, keys: Sequence[bytes]) -> None:
        with reported(self._place, _REMEDY, _ERRORS):
            for some in _parts(keys):
                self._client.delete(*(_PREFIX + key for key in some))

    def close(self) -> None:
        with reported(self._place, _REMEDY, _ERRORS):
            self._client.close()


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), _MAX_KEYS):
        yield items[start : start + _MAX_KEYS]
