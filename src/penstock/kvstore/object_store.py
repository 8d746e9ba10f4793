"""The records as objects in a bucket or a directory, through the library `obstore` (extra `stores`).

One object for each record, named by its key in hexadecimal:

    0123…(namespace) / ab12 / ab12…  ◀── the rest: block hash, layer, head

An object is written as a whole or not at all. Credentials, region and endpoint come from the environment, as
the makers of each store define (AWS_…, GOOGLE_…, AZURE_…). Records are given up only by the bucket's own
rules. Loads `obstore`; only `store.open_store` imports this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from penstock.kvstore.failures import code_of, place_of, reported
from penstock.kvstore.found import SCAN_KEYS, Found, some_at_a_time
from penstock.kvstore.names import MAX_KEY_BYTES, MIN_KEY_BYTES, NAMESPACE_BYTES

_SECONDS = 5  # for one request, and for all tries of it
_CONNECT_SECONDS = 2
_MAX_AT_ONCE = 16
_REMEDY = "Check the address, the network, and the credentials in the environment."
_ERRORS = (BaseError, OSError, ValueError)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # codes of S3 and Google, and of Azure

# Settings of connections. When obstore gets any of these from its caller, it takes none from the environment,
# so they are read from there and passed on.
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_CLIENT_SETTINGS = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate")

_T = TypeVar("_T")


def open_objects(url: str) -> ObjectStore:
    """Return the store at an s3://, gs://, az:// or file:// URL. Directories are created with mode 0700.

    Raises `StoreError` if the URL or the settings in the environment cannot be right.
    """
    parts = urlsplit(url)
    address = place_of(url)
    with reported(address, _REMEDY, _ERRORS):
        if parts.scheme == "file":
            Path(unquote(parts.path)).mkdir(mode=0o700, parents=True, exist_ok=True)
            return ObjectStore(from_url(url), address)
        store = from_url(
            url,
            client_options=_client_options(parts.scheme),
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_SECONDS)},
        )
        return ObjectStore(store, address)


def _client_options(scheme: str) -> Any:
    """Return deadlines, and the settings of the environment (AWS_ALLOW_HTTP for a server without TLS)."""
    names = {name: f"{_PREFIXES[scheme]}_{name.upper()}" for name in _CLIENT_SETTINGS}
    given = {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}
    return given | {"timeout": f"{_SECONDS}s", "connect_timeout": f"{_CONNECT_SECONDS}s"}


class ObjectStore:
    """A `KVStore` in a bucket or a directory.

    Args:
        objects: one of obstore's stores.
        address: the store's name in errors, without passwords.
    """

    def __init__(self, objects: Any, address: str) -> None:
        self._objects = objects
        self._place = address
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="kv-objects")

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._all(self._get, keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the bucket's own rules decide what is given up."""

    def put(self, records: Mapping[bytes, bytes]) -> None:
        self._all(self._put, records.items())

    def delete(self, keys: Sequence[bytes]) -> None:
        self._all(self._delete, keys)

    def scan(self, prefix: bytes = b"") -> Iterator[list[Found]]:
        """Yield records as `KVStore.scan` does; objects of other names are passed over."""
        assert len(prefix) in (0, NAMESPACE_BYTES), "objects of a namespace lie together, and no others do"
        with reported(self._place, _REMEDY, _ERRORS):
            pages = iter(obstore.list(self._objects, prefix=prefix.hex() or None, chunk_size=SCAN_KEYS))
        while True:
            with reported(self._place, _REMEDY, _ERRORS):
                page = next(pages, None)
            if page is None:
                return
            named = [(key_of(entry["path"]), entry["size"]) for entry in page]
            records = [Found(key, size) for key, size in named if key is not None]
            for some in some_at_a_time(records, SCAN_KEYS):  # some kinds of stores list all objects at once
                yield list(some)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _all(self, call: Callable[[Any], _T], items: Iterable[Any]) -> list[_T]:
        """Make a call for each item, several at once; raise the first error, and cancel calls not begun."""
        with reported(self._place, _REMEDY, (*_ERRORS, RuntimeError)):  # RuntimeError: the pool is closed
            return list(self._threads.map(call, items))

    def _get(self, key: bytes) -> bytes | None:
        try:
            return bytes(obstore.get(self._objects, object_name(key)).bytes())
        except FileNotFoundError as error:
            if code_of(error) in _NO_BUCKET:  # a wrong address, which would look like an empty store
                raise
            return None

    def _put(self, item: tuple[bytes, bytes]) -> None:
        key, record = item
        obstore.put(self._objects, object_name(key), record)

    def _delete(self, key: bytes) -> None:
        try:
            obstore.delete(self._objects, object_name(key))
        except FileNotFoundError:
            return


def object_name(key: bytes) -> str:
    """Return the name of an object below the address; two levels, so that no directory gets too large."""
    digits = key.hex()
    return f"{digits[:32]}/{digits[32:36]}/{digits[32:]}"


def key_of(name: str) -> bytes | None:
    """Return the key of the record that an object is, or None for an object that is not ours."""
    directory, _, rest = name.partition("/")
    try:
        key = bytes.fromhex(directory + rest.rpartition("/")[2])
    except ValueError:
        return None
    is_ours = MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES and object_name(key) == name
    return key if is_ours else None
