"""Records on a Redis or Valkey server, through the library `redis` (extra `stores`).

A record is a string under `penstock:` and its key. Nothing is ever given up here: that is up to the server
(`maxmemory`, with the policy `allkeys-lru`). Loads `redis`; only `store.open_store` imports this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.kvstore.failures import place_of, reported
from penstock.kvstore.found import SCAN_KEYS, Found, some_at_a_time
from penstock.kvstore.names import MAX_KEY_BYTES, MIN_KEY_BYTES

_SECONDS = 5.0  # for each answer
_CONNECT_SECONDS = 2.0
_PREFIX = b"penstock:"
_MAX_KEYS = 64  # of one command
_REMEDY = "Check that the server is up, its address and password, and how much memory it may use."
_ERRORS = (redis.RedisError, OSError, ValueError)


def open_redis(url: str) -> RedisStore:
    """The store at a redis:// or rediss:// address, which may hold user, password and number of the database.

    Raises `StoreError` if the address cannot be right; the server is first asked when it is used.
    """
    place = place_of(url)
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
        client: a `redis.Redis`; its `mget`, `delete`, `scan`, `close`, and `pipeline` of `set` and `strlen`
            are used.
        place: what it is called in errors, without passwords.
    """

    def __init__(self, client: Any, place: str) -> None:
        self._client = client
        self._place = place

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        records: list[bytes | None] = []
        with reported(self._place, _REMEDY, _ERRORS):
            for some in some_at_a_time(keys, _MAX_KEYS):
                records += self._client.mget([_PREFIX + key for key in some])
        return records

    def used(self, keys: Sequence[bytes]) -> None:
        """What is given up, and when, is settled where the records are."""

    def put(self, records: Mapping[bytes, bytes]) -> None:
        """The first key last, so that a server that gives up what was used longest ago keeps it longest."""
        with reported(self._place, _REMEDY, _ERRORS):
            for some in some_at_a_time(list(reversed(list(records))), _MAX_KEYS):
                pipeline = self._client.pipeline(transaction=False)
                for key in some:
                    pipeline.set(_PREFIX + key, records[key])
                pipeline.execute()

    def delete(self, keys: Sequence[bytes]) -> None:
        with reported(self._place, _REMEDY, _ERRORS):
            for some in some_at_a_time(keys, _MAX_KEYS):
                self._client.delete(*(_PREFIX + key for key in some))

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        """As `KVStore`; goes through all keys of the database, whosoever they are, so some steps find
        nothing."""
        pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", _PREFIX + prefix) + b"*"
        cursor = None
        while cursor != 0:
            with reported(self._place, _REMEDY, _ERRORS):
                cursor, names = self._client.scan(cursor or 0, match=pattern, count=SCAN_KEYS)
                found = self._sizes(names)
            yield found

    def _sizes(self, names: Sequence[bytes]) -> list[Found]:
        """Of the records, which are not got for it; keys that no record has are passed over."""
        keys = [name[len(_PREFIX) :] for name in names]
        found: list[Found] = []
        possible = [key for key in keys if MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES]
        for some in some_at_a_time(possible, _MAX_KEYS):
            pipeline = self._client.pipeline(transaction=False)
            for key in some:
                pipeline.strlen(_PREFIX + key)
            sizes = pipeline.execute(raise_on_error=False)  # of what is no string there is none
            pairs = zip(some, sizes, strict=True)
            found += [Found(key, size) for key, size in pairs if isinstance(size, int)]
        return found

    def close(self) -> None:
        with reported(self._place, _REMEDY, _ERRORS):
            self._client.close()
