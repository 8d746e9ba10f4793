"""What a store tells of a record without getting it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

SCAN_KEYS = 256  # that a scan gives at a time


@dataclass(frozen=True, slots=True)
class Found:
    """Attributes:
    num_bytes: of the record.
    """

    key: bytes
    num_bytes: int
