"""The metadata of a stored record (key and size), and a walk over many records, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

SCAN_KEYS = 256  # keys that a scan gives at a time

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Found:
    """A record in a store.

    Attributes:
        num_bytes: bytes of the record.
    """

    key: bytes
    num_bytes: int


def in_pages(page: Callable[[bytes], list[Found]]) -> Iterator[list[Found]]:
    """Yield all pages, in order of keys. Nothing is held open between two pages.

    Args:
        page: returns the next records behind a key, or from the first on for an empty key; an empty list at
            the end.
    """
    after = b""
    while records := page(after):
        yield records
        after = records[-1].key


def some_at_a_time(items: Sequence[_T], count: int) -> Iterator[Sequence[_T]]:
    """Yield the items, `count` at a time; fewer at the end."""
    for first in range(0, len(items), count):
        yield items[first : first + count]
