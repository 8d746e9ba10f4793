"""Decides which cached block without a holder is evicted first.

    lru        the one that was let go longest ago
    lfu        the one that was found least often; of those the one that was let go longest ago
    priority   the one whose users mattered least; of those the one that was let go longest ago

Time is a count of events, never a clock. Blocks of one request are let go at one time; then the deeper one
goes first, since nothing behind a missing block can be found, and of equally deep ones the one with the lower
hash (row H10). A block is found whenever one behind it is: so it is never worth less than those.

What open sessions keep (`kvcache.sessions`) goes last of all, by the same policy.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from penstock.config.engine import EvictionPolicy


class Worth(NamedTuple):
    """The properties of a block that an eviction policy may use.

    Attributes:
        uses: how often it was found.
        priority: the highest of the requests that have held it.
        freed_at: event at which it was let go.
        depth: its place in its chain.
    """

    uses: int
    priority: int
    freed_at: int
    depth: int
    hash: bytes


class EvictionOrder(Protocol):
    """An order of the cached blocks that have no holder."""

    def add(self, block: int, worth: Worth) -> None:
        """Add a block, worth no less than any that was added at an earlier event."""

    def restore(self, block: int, worth: Worth) -> None:
        """Add a block that was let go before others that are here."""

    def discard(self, block: int) -> None:
        """Remove a block that is held again, or holds nothing any more."""

    def pop(self, worth_of: Callable[[int], Worth]) -> int:
        """Remove and return the block to evict now.

        Args:
            worth_of: returns what a block that is here was worth when it came.
        """

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int: ...


class HeapOrder:
    """An eviction order as a heap; entries of blocks that have left stay until they come up.

    Args:
        policy: decides what counts before the time at which a block was let go.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, int, int, bytes, int]] = []
        self._entries: dict[int, tuple[int, int, int, bytes, int]] = {}  # the valid one of each block

    def add(self, block: int, worth: Worth) -> None:
        self._entries[block] = entry = (*self._place(worth), block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    restore = add

    def discard(self, block: int) -> None:
        del self._entries[block]

    def pop(self, worth_of: Callable[[int], Worth]) -> int:
        self._drop_stale()
        block = heapq.heappop(self._heap)[-1]
        del self._entries[block]
        return block

    def gives_before(self, worth: Worth) -> bool:
        """Return whether one of its blocks is to be evicted before another of that worth."""
        self._drop_stale()
        return bool(self._heap) and self._heap[0][:-1] < self._place(worth)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _place(self, worth: Worth) -> tuple[int, int, int, bytes]:
        rank = {"lru": 0, "lfu": worth.uses, "priority": worth.priority}[self._policy]
        return rank, worth.freed_at, -worth.depth, worth.hash

    def _drop_stale(self) -> None:
        while self._heap and self._entries.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)


class LruOrder:
    """An eviction order by time, for which a queue suffices, since blocks come in order of their worth.

    Only restored blocks do not. No two are equal: those of one event are let go as a chain, the deepest first
    (`BlockPool.give_back`).
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._restored = HeapOrder("lru")

    def add(self, block: int, worth: Worth) -> None:
        self._queue[block] = None

    def restore(self, block: int, worth: Worth) -> None:
        self._restored.add(block, worth)

    def discard(self, block: int) -> None:
        if block in self._queue:
            del self._queue[block]
        else:
            self._restored.discard(block)

    def pop(self, worth_of: Callable[[int], Worth]) -> int:
        if self._restored and (
            not self._queue or self._restored.gives_before(worth_of(next(iter(self._queue))))
        ):
            return self._restored.pop(worth_of)
        return self._queue.popitem(last=False)[0]

    def __contains__(self, block: int) -> bool:
        return block in self._queue or block in self._restored

    def __len__(self) -> int:
        return len(self._queue) + len(self._restored)


class KeptLast:
    """An eviction order that gives up kept blocks only when there are no others.

    Args:
        policy: of both kinds of blocks.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._ordinary, self._kept = _order(policy), _order(policy)
        self._names: set[bytes] = set()

    def keep(self, name: bytes) -> None:
        """Keep blocks of this name that are added from now on."""
        self._names.add(name)

    def release(self, name: bytes) -> None:
        """Treat blocks of this name that are added from now on as ordinary ones."""
        self._names.discard(name)

    def add(self, block: int, worth: Worth) -> None:
        self._order_of(worth).add(block, worth)

    def restore(self, block: int, worth: Worth) -> None:
        self._order_of(worth).restore(block, worth)

    def discard(self, block: int) -> None:
        (self._kept if block in self._kept else self._ordinary).discard(block)

    def pop(self, worth_of: Callable[[int], Worth]) -> int:
        return (self._ordinary if self._ordinary else self._kept).pop(worth_of)

    def __contains__(self, block: int) -> bool:
        return block in self._ordinary or block in self._kept

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._kept)

    def _order_of(self, worth: Worth) -> EvictionOrder:
        return self._kept if worth.hash in self._names else self._ordinary


def _order(policy: EvictionPolicy) -> EvictionOrder:
    return LruOrder() if policy == "lru" else HeapOrder(policy)


def eviction_order(policy: EvictionPolicy) -> KeptLast:
    return KeptLast(policy)
