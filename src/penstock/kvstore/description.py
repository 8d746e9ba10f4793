"""The description of a namespace for people: a small record beside its blocks, which says what they are of.

A namespace is a hash, and does not tell what it was made of. Ranks that store blocks put this record there
too, again with each few of them, so that it is never what was used longest ago. `penstock cache` shows it; it
decides nothing.
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
        quota_bytes: quota of the engine which opened the store last; None: it keeps to none.
        opened_at: seconds since 1970, by the clock of that engine's host.
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
    """Return the payload of its record."""
    return msgspec.json.encode(description)


def decoded(payload: bytes) -> Description | None:
    """Return a description; None for other bytes, or one that a later version has made otherwise."""
    try:
        return msgspec.json.decode(payload, type=Description)
    except msgspec.DecodeError:
        return None
