"""The format of a record, and the check whether some bytes are the record of a key.

    ┌───────┬─────────┬────────────┬────────────────┬─────────────────┬──────┬─────────┐
    │ magic │ version │ key length │ payload length │ checksum        │ key  │ payload │
    │ PSKV  │ u16     │ u16        │ u64            │ XXH3-128, 16 B  │      │         │
    └───────┴─────────┴────────────┴────────────────┴─────────────────┴──────┴─────────┘
    little-endian; the checksum is over key and payload

A record contains its key, so that one which lies under another key is found out [R9]. The checksum finds
damage, not forgery: writers of a store are trusted (security rule 9). It is chosen for speed, since every
byte that comes from a store is checked before the first token. Pure.
"""

from __future__ import annotations

import struct

import xxhash

from penstock.kvstore.names import MAX_KEY_BYTES

MAGIC = b"PSKV"
VERSION = 2
_HEADER = struct.Struct("<4sHHQ")
_CHECKSUM_BYTES = 16


def overhead_bytes(key: bytes) -> int:
    """Return by how many bytes a record is longer than its payload."""
    return _HEADER.size + _CHECKSUM_BYTES + len(key)


def seal(key: bytes, payload: bytes) -> bytes:
    """Return the record that holds this payload under this key."""
    assert 0 < len(key) <= MAX_KEY_BYTES, f"a key of {len(key)} bytes"
    header, named = _HEADER.pack(MAGIC, VERSION, len(key), len(payload)), key + payload
    return b"".join((header, xxhash.xxh3_128_digest(named), named))


def unseal(key: bytes, record: bytes) -> bytes | None:
    """Return the payload, or None for anything but a whole record of this version under this key."""
    begin = overhead_bytes(key)
    header = _HEADER.pack(MAGIC, VERSION, len(key), max(0, len(record) - begin))
    if len(record) < begin or record[: _HEADER.size] != header or record[begin - len(key) : begin] != key:
        return None
    checksum_at = begin - len(key) - _CHECKSUM_BYTES
    checksum = xxhash.xxh3_128_digest(memoryview(record)[begin - len(key) :])
    return record[begin:] if record[checksum_at : checksum_at + _CHECKSUM_BYTES] == checksum else None
