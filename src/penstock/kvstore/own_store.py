"""The store of a worker: the head says what kind is needed, the worker's command line says where it is.

The head tells the host the kind of the store, the namespace of its records and how much may be kept. Every
host knows by itself where the store is and with which credentials it is opened: neither a path nor an address
crosses a link. A store in a directory (LMDB) is one for each host. Stores of all other kinds have an address
at which all hosts find the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import ProtocolError, UsageError
from penstock.kvstore.names import NAMESPACE_BYTES
from penstock.kvstore.store import DIRECTORY_KIND, keeps_quota, kind_of, open_store
from penstock.process.config import StoreConfig

Count = Annotated[int, msgspec.Meta(ge=0)]
_FLAG = "kv_store"


class TierNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The head's needs of another host for tiers of KV blocks; all but `kind` as in `StoreConfig`.

    Attributes:
        kind: kind of the store (`kvstore.store.kind_of`); empty: host memory is the only tier.
    """

    kind: str
    quota_bytes: Count | None
    namespace: bytes
    description: bytes = b""
    host_blocks: Count = 0
    writes_back: bool = False
    write_bytes_per_s: Count = 0

    @classmethod
    def of(cls, store: StoreConfig) -> TierNeed:
        """Return what another host may know of the tiers of the head's ranks."""
        return cls(
            kind="" if store.url is None else kind_of(store.url),
            quota_bytes=store.quota_bytes,
            namespace=store.namespace,
            description=store.description,
            host_blocks=store.host_blocks,
            writes_back=store.writes_back,
            write_bytes_per_s=store.write_bytes_per_s,
        )


class OwnStore:
    """The place where a host keeps KV blocks.

    Args:
        host: the name of the host.
        address: the address that the host's command line gives; None: it gives none.
        directory: where a store in a directory lies if no address is given.
        tell: takes a line for the user of this host when a tier is refused.
    """

    def __init__(
        self,
        host: str,
        address: str | None,
        directory: Path,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._host, self._address, self._directory, self._tell = host, address, directory, tell

    def config(self, need: TierNeed) -> StoreConfig:
        """Return how ranks of this host open the tiers that the head has.

        Raises:
            UsageError: this host has no store of that kind.
            ProtocolError: the namespace has a wrong length.
        """
        if len(need.namespace) != NAMESPACE_BYTES:
            raise ProtocolError(f"a namespace of KV blocks must have {NAMESPACE_BYTES} bytes.")
        url = self._url(need.kind)
        return StoreConfig(
            url=url,
            quota_bytes=need.quota_bytes if url is not None and keeps_quota(url) else None,
            namespace=need.namespace,
            description=need.description,
            host_blocks=need.host_blocks,
            writes_back=need.writes_back,
            write_bytes_per_s=need.write_bytes_per_s,
            host=self._host if need.kind == DIRECTORY_KIND else "",
        )

    def _url(self, kind: str) -> str | None:
        if not kind:
            return None
        if self._address is None and kind == DIRECTORY_KIND:
            return str(self._directory)
        if self._address is None or kind_of(self._address) != kind:
            error = self._refusal(kind)
            self._tell(f"{error.message} {error.remedy}")
            raise error
        return self._address

    def _refusal(self, kind: str) -> UsageError:
        own = "no --kv-store" if self._address is None else f"a store of the kind {kind_of(self._address)}"
        if kind == DIRECTORY_KIND:
            remedy = "Leave --kv-store of that worker out, or give it a directory."
        else:
            remedy = f"Start that worker with --kv-store {kind}://..., with its own credentials."
        return UsageError(
            f"the head's KV store is of the kind {kind}, but the worker {self._host} has {own}.",
            remedy=remedy,
            param=_FLAG,
        )


class NoOwnStore(OwnStore):
    """The store of a host that keeps no blocks."""

    def __init__(self) -> None:
        super().__init__("", None, Path())

    def config(self, need: TierNeed) -> StoreConfig:
        raise UsageError(
            "this host does not keep KV blocks.",
            remedy="Leave out --kv-store and --kv-host-bytes.",
            param=_FLAG,
        )


def require_usable(address: str) -> None:
    """Refuse the address of a store that can never work, before any work begins.

    Raises:
        UsageError, StoreError: as `open_store`.
    """
    open_store(address).close()
