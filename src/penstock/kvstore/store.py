"""The storage tier (L3) of the KV cache, as its users see it: records by key, in a store that a URL names.

    lmdb:///path, /path        an LMDB directory on this machine, shared by its processes   `lmdb_store`
    s3:// gs:// az:// file://  objects in a bucket or a directory, shared by machines       `object_store`
    redis:// rediss://         a Redis or Valkey server                                     `redis_store`
    memory:                    a dict; for tests

Stores keep bytes and do not check them: `record` defines the form of a record, and `names` its key. Stores
raise `StoreError`; callers that must not fail with it put a `guard` around them. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from penstock.errors import UsageError
from penstock.kvstore.found import SCAN_KEYS, Found
from penstock.kvstore.lmdb_store import LmdbStore

DIRECTORY_KIND = "lmdb"  # a store that one host has to itself
_REDIS_SCHEMES = ("redis", "rediss")
_SCHEMES = ("lmdb", "s3", "gs", "az", "file", *_REDIS_SCHEMES, "memory")
_REMEDY = f"Give a path, or one of {', '.join(f'{name}://' for name in _SCHEMES[:-1])}, or memory: for tests."


class KVStore(Protocol):
    """A store of records by key. Keys have 32 to 64 bytes.

    Several threads may call at once; every call may block. `used` is a method apart from `get` because only
    the loader of a chain of blocks knows which records belong together.

    All methods raise `StoreError` for whatever goes wrong: disk full or read-only, server gone, access
    denied. A `put` or `delete` that fails may have done a part of its work.
    """

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the record of each key, None where there is none."""

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that the records of these keys were used together just now, as a chain of blocks.

        Where a store gives up what was used longest ago, the first key counts as used last, in whatever order
        they were read: without the first block of a chain the others cannot be found.
        """

    def put(self, records: Mapping[bytes, bytes]) -> None:
        """Keep records, replacing those of the same keys; a store with a quota may give up others for them.

        Where a store gives up what was used longest ago, the first record of a call counts as used last.
        """

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete records; unknown keys are passed over."""

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        """Yield the records whose keys begin with `prefix` in pages, which may be empty.

        Records come in any order, and a scan does not count as use. Records that are put or deleted meanwhile
        may be missing, and one may come twice. The caller may delete records that have come. Errors are
        raised while the pages are iterated.

        Args:
            prefix: a namespace; empty for all records.
        """

    def close(self) -> None:
        """Close files and connections. No call may follow."""


class MemoryStore:
    """A store in a dict. It grows without bound."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.records.get(key) for key in keys]

    def used(self, keys: Sequence[bytes]) -> None:
        pass

    def put(self, records: Mapping[bytes, bytes]) -> None:
        self.records.update(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.records.pop(key, None)

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        keys = [key for key in self.records if key.startswith(prefix)]
        for first in range(0, len(keys), SCAN_KEYS):
            some = keys[first : first + SCAN_KEYS]
            yield [Found(key, len(self.records[key])) for key in some if key in self.records]

    def close(self) -> None:
        pass


def open_store(url: str, *, quota_bytes: int | None = None) -> KVStore:
    """Return the store at this address.

    Args:
        url: the address, of one of the kinds above.
        quota_bytes: size that an LMDB directory is kept to; None for as much as the disk holds. Other stores
            are bounded by the rules of the bucket, or by the server's `maxmemory`.

    Raises:
        UsageError: the kind of address is unknown, a store of this kind cannot keep a quota, or the extra
            `stores` is not installed.
        StoreError: the store cannot be opened. Buckets and Redis servers are first contacted when used.
    """
    scheme, rest = _split(url)
    if scheme == "lmdb":
        return LmdbStore(Path(rest), quota_bytes=quota_bytes)
    if quota_bytes is not None:
        raise UsageError(
            f"a quota of {quota_bytes:,} bytes is given for a {scheme} store, which does not support quotas.",
            remedy="Limit its size with a lifecycle rule of the bucket or Redis' maxmemory, or use "
            "lmdb:///PATH.",
        )
    if scheme == "memory":
        return MemoryStore()
    return _optional_store(scheme, url)


def kind_of(url: str) -> str:
    """Return the kind of the store at this address: its scheme, and `lmdb` for a plain path.

    `rediss`, which is Redis with TLS, is of the kind `redis`. Raises as `open_store`.
    """
    scheme = _split(url)[0]
    return "redis" if scheme in _REDIS_SCHEMES else scheme  # hosts may reach one server in both ways


def keeps_quota(url: str) -> bool:
    """Return whether a store at this address can be kept to a size from here. Raises as `open_store`."""
    return _split(url)[0] == "lmdb"


def directory_of(url: str) -> Path | None:
    """Return the directory of a store on this machine; None for other stores. Raises as `open_store`."""
    scheme, rest = _split(url)
    if scheme == "file":
        return Path(unquote(urlsplit(url).path))
    return Path(rest) if scheme == "lmdb" else None


def _split(url: str) -> tuple[str, str]:
    """Return the store's kind and the rest of its address; a plain path is an LMDB directory."""
    match = re.match(r"(memory|[a-z][a-z0-9+.-]*(?=://)):(//)?", url, re.IGNORECASE)
    scheme, rest = (match[1].lower(), url[match.end() :]) if match else ("lmdb", url)
    if scheme not in _SCHEMES:
        raise UsageError(f"no KV store supports addresses that begin with {scheme}://.", remedy=_REMEDY)
    if scheme == "memory" and rest:
        raise UsageError(f"the KV store memory: takes no path, but {rest} is given.", remedy=_REMEDY)
    if scheme != "memory" and not rest:
        raise UsageError("the address of the KV store has no path.", remedy=_REMEDY)
    if scheme not in ("memory", DIRECTORY_KIND):
        _require_url(scheme, url)
    return scheme, rest


def _require_url(scheme: str, url: str) -> None:
    """Raise `UsageError` for an address whose host cannot be read; the address may hold a password."""
    try:
        urlsplit(url)
    except ValueError:
        raise UsageError(
            f"the address of the KV store begins with {scheme}:// but is not a URL.",
            remedy=f"Check the name of the host; brackets stand around an IPv6 address: {scheme}://[::1]/...",
        ) from None


def _optional_store(scheme: str, url: str) -> KVStore:
    """Return a store of the extra `stores`, whose libraries are loaded only here, when one is needed."""
    library = "redis" if scheme in _REDIS_SCHEMES else "obstore"
    try:
        if library == "redis":
            from penstock.kvstore.redis_store import open_redis

            return open_redis(url)
        from penstock.kvstore.object_store import open_objects

        return open_objects(url)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a {scheme}:// store needs the library {library}, which cannot be loaded: {error}.",
            remedy="Install it: pip install 'penstock[stores]'.",
        ) from error
