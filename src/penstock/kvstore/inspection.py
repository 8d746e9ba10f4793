"""The content of an existing store: its namespaces, and whether its records are sound.

For `penstock cache`. Reads some keys at a time, so memory does not grow with the store.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import StoreError, UsageError
from penstock.kvstore.description import Description, decoded, description_key
from penstock.kvstore.found import Found, some_at_a_time
from penstock.kvstore.lmdb_reader import LmdbReader
from penstock.kvstore.lmdb_store import MIN_QUOTA_BYTES, LmdbStore
from penstock.kvstore.lmdb_tables import DATA_FILE
from penstock.kvstore.names import NAMESPACE_BYTES, is_entry
from penstock.kvstore.record import unseal
from penstock.kvstore.store import KVStore, directory_of, keeps_quota, open_store

GET_KEYS = 16  # records that are in memory at once
SAMPLE_RECORDS = 256  # that `verify_sample` looks at


class ReadableStore(Protocol):
    """The part of a `KVStore` that changes nothing."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Namespace:
    """A namespace of a store.

    Attributes:
        num_blocks: blocks that have an entry in the catalogue (`kvstore.catalogue`).
        num_records: all records: parts of blocks, entries, and the description.
        num_bytes: bytes of these records.
        description: what the namespace is of, for people; None: there is no valid record of it.
    """

    name: bytes
    num_blocks: int = 0
    num_records: int = 0
    num_bytes: int = 0
    description: Description | None = None


@dataclass(slots=True)
class Verified:
    """The number of records that were looked at, and of those that were not what their keys say."""

    num_looked_at: int = 0
    num_bad: int = 0


def open_to_read(url: str) -> ReadableStore:
    """Return the store at this address; a directory that does not exist is not made.

    Raises:
        UsageError: the kind of address is unknown, or is `memory:`, which no other process can have filled.
        StoreError: there is no such directory, or it cannot be read. Buckets and servers are contacted later,
            when they are used.
    """
    if url.lower().startswith("memory:"):
        raise UsageError("the KV store memory: ends with its process.", remedy="Give a directory or a URL.")
    directory = directory_of(url)
    if directory is not None and keeps_quota(url):
        return LmdbReader(directory)
    if directory is not None and not directory.is_dir():
        raise StoreError(f"{directory} is not a directory.", remedy="Give the address of --kv-store.")
    return open_store(url)


def open_to_clear(url: str) -> KVStore:
    """Return the store at this address for deleting records. It raises the errors of `open_to_read`."""
    open_to_read(url).close()
    directory = directory_of(url)
    if directory is None or not keeps_quota(url):
        return open_store(url)
    size = (directory / DATA_FILE).stat().st_size
    # Deleting copies pages, so the file needs some room to grow.
    return LmdbStore(directory, quota_bytes=size + max(size // 8, MIN_QUOTA_BYTES))


def survey(store: ReadableStore) -> list[Namespace]:
    """Return all namespaces, the largest first. Raises `StoreError`."""
    namespaces: dict[bytes, Namespace] = {}
    for page in store.scan():
        for record in page:
            name = record.key[:NAMESPACE_BYTES]
            namespace = namespaces.setdefault(name, Namespace(name))
            namespace.num_blocks += is_entry(record.key)
            namespace.num_records += 1
            namespace.num_bytes += record.num_bytes
    for namespace in namespaces.values():
        namespace.description = _description(store, namespace.name)
    return sorted(namespaces.values(), key=lambda namespace: (-namespace.num_bytes, namespace.name))


def _description(store: ReadableStore, namespace: bytes) -> Description | None:
    key = description_key(namespace)
    (record,) = store.get([key])
    payload = None if record is None else unseal(key, record)
    return None if payload is None else decoded(payload)


def verify_all(store: ReadableStore) -> Verified:
    """Verify every record. Raises `StoreError`."""
    verified = Verified()
    for page in store.scan():
        _verify(store, [record.key for record in page], verified)
    return verified


def verify_sample(store: ReadableStore) -> Verified:
    """Verify some records, each as likely as any other; the same ones while the store does not change."""
    chance, sample, count = random.Random(0), list[bytes](), 0
    for page in store.scan():
        for record in page:
            count += 1
            if len(sample) < SAMPLE_RECORDS:
                sample.append(record.key)
            elif (index := chance.randrange(count)) < SAMPLE_RECORDS:
                sample[index] = record.key
    verified = Verified()
    _verify(store, sample, verified)
    return verified


def _verify(store: ReadableStore, keys: Sequence[bytes], verified: Verified) -> None:
    for some in some_at_a_time(keys, GET_KEYS):
        for key, record in zip(some, store.get(some), strict=True):
            if record is not None:  # else it was deleted meanwhile
                verified.num_looked_at += 1
                verified.num_bad += unseal(key, record) is None
