"""The description of a namespace for people: a small record that says which model its blocks belong to.

A namespace is a hash, which does not show what it was made of. The catalogue writes this record again with
all new entries (`kvstore.catalogue`), so that it is never the record used longest ago. `penstock cache` shows
it; nothing else reads it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.kvstore.names import NAMESPACE_BYTES

_LATEST = 253_402_300_799  # the last second of the year 9999
_NAME = b"description".ljust(16, b"\0")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a namespace.

    Attributes:
        kind: whatever else decides the numbers, such as how weights are quantised.
        block_size: tokens per block.
        quota_bytes: quota of the engine that last wrote the description; None: it has none.
        opened_at: when that engine opened the store: seconds since 1970, by the clock of its host.
    """

    model: str
    dtype: str
    kind: str
    block_size: int
    quota_bytes: int | None = None
    opened_at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]


def description_key(namespace: bytes) -> bytes:
    """Return the key of the record; it differs in length from keys of blocks."""
    assert len(namespace) == NAMESPACE_BYTES, f"a namespace of {len(namespace)} bytes"
    return namespace + _NAME


def encoded(description: Description) -> bytes:
    """Return the payload of the record that holds this description."""
    return msgspec.json.encode(description)


def decoded(payload: bytes) -> Description | None:
    """Return the description that a payload holds; None if this version cannot read it."""
    try:
        return msgspec.json.decode(payload, type=Description)
    except msgspec.DecodeError:
        return None
