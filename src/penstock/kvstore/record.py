"""What the bytes of a record are, and whether some bytes are the record of a key.

    ┌───────┬─────────┬────────────┬────────────────┬─────────────────┬──────┬─────────┐
    │ magic │ version │ key length │ payload length │ checksum        │ key  │ payload │
    │ PSKV  │ u16     │ u16        │ u64            │ BLAKE2b, 16 B   │      │         │
    └───────┴─────────┴────────────┴────────────────┴─────────────────┴──────┴─────────┘
    little-endian; the checksum is over key and payload

The key is in it so that a record which lies under another's name is found out (row R9). The checksum finds
accidents, not an enemy: who can write to a store is trusted (security rule 9). Pure.
"""

from __future__ import annotations

import hashlib
import struct

from penstock.kvstore.names import MAX_KEY_BYTES

MAGIC = b"PSKV"
VERSION = 1
_HEADER = struct.Struct("<4sHHQ")
_CHECKSUM_BYTES = 16


def overhead_bytes(key: bytes) -> int:
    """How much longer a record is than its payload."""
    return _HEADER.size + _CHECKSUM_BYTES + len(key)


def seal(key: bytes, payload: bytes) -> bytes:
    """The record that holds this payload under this key."""
    assert 0 < len(key) <= MAX_KEY_BYTES, f"a key of {len(key)} bytes"
    header = _HEADER.pack(MAGIC, VERSION, len(key), len(payload))
    return b"".join((header, _checksum(key, payload), key, payload))


def unseal(key: bytes, record: bytes) -> bytes | None:
    """The payload, or None for anything but a whole record of this version under this key."""
    begin = overhead_bytes(key)
    header = _HEADER.pack(MAGIC, VERSION, len(key), max(0, len(record) - begin))
    if len(record) < begin or record[: _HEADER.size] != header or record[begin - len(key) : begin] != key:
        return None
    payload = record[begin:]
    checksum = record[_HEADER.size : _HEADER.size + _CHECKSUM_BYTES]
    return payload if checksum == _checksum(key, payload) else None


def _checksum(key: bytes, payload: bytes) -> bytes:
    state = hashlib.blake2b(key, digest_size=_CHECKSUM_BYTES)
    state.update(payload)
    return state.digest()
