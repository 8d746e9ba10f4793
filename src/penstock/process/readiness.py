"""Waits for objects to become readable or writable, also if their descriptors are above 1,023.

`select.select` cannot wait for such descriptors. The supervisor of many ranks may have more of them, and
so may a program that uses `LLM`. The module is called wherever a process waits for a few objects now and
then; loops that wait in every step keep a `select.poll` of their own.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol, TypeVar

_MAX_MS = float((1 << 31) - 1)  # 24 days, the longest that a system's poll waits


class Waitable(Protocol):
    """An object with a file descriptor that can be waited for, such as a socket."""

    def fileno(self) -> int: ...


Source = TypeVar("Source", bound=int | Waitable)


def await_readable(sources: Sequence[Source], timeout_s: float | None = None) -> list[Source]:
    """Wait until a source can be read or has ended, and return all such sources in the given order.

    Args:
        sources: objects with a descriptor, or descriptors.
        timeout_s: after so many seconds an empty list is returned; 0: the call returns at once; None: it
            waits without a limit.
    """
    return _await(sources, select.POLLIN, timeout_s)


def await_writable(sources: Sequence[Source], timeout_s: float | None = None) -> list[Source]:
    """Wait until a source takes more bytes or has ended, and return all such sources, as `await_readable`."""
    return _await(sources, select.POLLOUT, timeout_s)


def _await(sources: Sequence[Source], events: int, timeout_s: float | None) -> list[Source]:
    poll = select.poll()
    for source in sources:
        poll.register(source, events)
    limit_ms = None if timeout_s is None else min(1000 * max(0.0, timeout_s), _MAX_MS)
    ready = {number for number, _ in poll.poll(limit_ms)}
    return [source for source in sources if _number(source) in ready]


def _number(source: int | Waitable) -> int:
    return source if isinstance(source, int) else source.fileno()
