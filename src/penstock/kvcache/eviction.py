"""Decides which of the cached blocks that no request holds is evicted first.

    lru        the one that was let go longest ago
    lfu        the one that was found least often; of those the one that was let go longest ago
    priority   the one whose users mattered least; of those the one that was let go longest ago

Time is a count of events, never a clock. The blocks of a request are let go in one event. Among them the
deepest is evicted first (depth is the place in the chain of a prompt's blocks), since nothing behind a
missing block can be found; of equally deep ones it is the one with the lower hash [H10]. Whenever a block is
found, all blocks before it in the chain are found too, so they are never worth less.

Blocks that open sessions keep (`kvcache.sessions`) are evicted after all others, by the same policy.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from penstock.config.engine import EvictionPolicy


class Worth(NamedTuple):
    """The properties of a cached block that an eviction policy may use.

    Attributes:
        uses: how often it was found.
        priority: the highest of the requests that have held it.
        freed_at: number of the event at which its last holder let it go.
        depth: its place in the chain of its prompt's blocks.
        hash: its name.
    """

    uses: int
    priority: int
    freed_at: int
    depth: int
    hash: bytes


class EvictionOrder(Protocol):
    """The cached blocks that no request holds, in the order in which they are to be evicted."""

    def add(self, block: int, worth: Worth) -> None:
        """Add a block that its last holder has just let go.

        Its `worth.freed_at` is no less than that of any block added before.
        """

    def restore(self, block: int, worth: Worth) -> None:
        """Put a block back that was let go earlier, at the place that its worth gives it."""

    def discard(self, block: int) -> None:
        """Remove a block that is in the order, because it is held again or has lost its name."""

    def pop(self, worth_of: Callable[[int], Worth]) -> int:
        """Remove and return the block to evict now; there must be one.

        Args:
            worth_of: returns the worth with which a block of the order came.
        """

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int: ...


class HeapOrder:
    """An eviction order as a heap; entries of blocks that have left it stay until they reach the top.

    Args:
        policy: decides which property of a block counts before the time at which it was let go.
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
        """Return whether the heap would evict one of its blocks before a block of this worth elsewhere."""
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
    """An eviction order by the time at which blocks were let go, for which a queue suffices.

    Blocks are added in the order of these times. Within one event that is right too: blocks are let go as a
    chain, the deepest first (`BlockPool.give_back`). Restored blocks come in any order, so they lie in a heap
    beside the queue.
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
    """An eviction order that gives up blocks that sessions keep only when there are no others.

    Args:
        policy: decides the order among the kept blocks, and among the others.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._ordinary, self._kept = _order(policy), _order(policy)
        self._names: set[bytes] = set()

    def keep(self, name: bytes) -> None:
        """Treat blocks of this name (hash) that are added from now on as kept, to be evicted last."""
        self._names.add(name)

    def release(self, name: bytes) -> None:
        """Treat blocks of this name (hash) that are added from now on as ordinary ones."""
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
