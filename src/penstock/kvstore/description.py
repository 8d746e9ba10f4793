"""What a namespace is, for people: a small record beside those of its blocks, which says whose they are.

A namespace is a hash, and tells nobody what it was made of. Whoever stores blocks puts this record there too,
again with each few of them, so that it is never what was used longest ago. `penstock cache` shows it; it
decides nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.kvstore.names import NAMESPACE_BYTES

_LATEST = 253_402_300_799  # the last second of the year 9999
_NAME = b"description".ljust(16, b"\0")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    kind: whatever else decides the numbers, such as how weights are quantised.
    block_size: tokens per block.
    quota_bytes: that the engine which opened the store last keeps it to; None: to none.
    opened_at: seconds since 1970, by the clock of that engine's host.
    """

    model: str
    dtype: str
    kind: str
    block_size: int
    quota_bytes: int | None = None
    opened_at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]


def description_key(namespace: bytes) -> bytes:
    """Under which the record is; of another length than keys of blocks."""
    assert len(namespace) == NAMESPACE_BYTES, f"a namespace of {len(namespace)} bytes"
    return namespace + _NAME


def encoded(description: Description) -> bytes:
    """The payload of its record."""
    return msgspec.json.encode(description)


def decoded(payload: bytes) -> Description | None:
    """None for what is no description, or one that a later version has made otherwise."""
    try:
        return msgspec.json.decode(payload, type=Description)
    except msgspec.DecodeError:
        return None
