"""Which of the cached blocks that nobody holds is given up first.

    lru        the one that was let go longest ago
    lfu        the one that was found least often; of those the one that was let go longest ago
    priority   the one whose users mattered least; of those the one that was let go longest ago

Time is a count of events, never a clock. Blocks of one request are let go at one time; then the deeper one
goes first, since nothing behind a missing block can be found, and of equally deep ones the one with the lower
hash (row H10). A block is found whenever one behind it is: so it is never worth less than those.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Literal, NamedTuple, Protocol

from penstock.config import EvictionPolicy


class Worth(NamedTuple):
    """What a policy may know of a block.

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
    """The cached blocks that nobody holds."""

    def add(self, block: int, worth: Worth) -> None:
        """It may be given up from now on; it is worth no less than any that was added at an earlier event."""

    def discard(self, block: int) -> None:
        """It is held again, or holds nothing any more."""

    def pop(self) -> int:
        """The one to give up now."""

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int: ...


class LruOrder:
    """Blocks come in the order of their worth, so a queue is enough."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, worth: Worth) -> None:
        self._queue[block] = None

    def discard(self, block: int) -> None:
        del self._queue[block]

    def pop(self) -> int:
        return self._queue.popitem(last=False)[0]

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def __len__(self) -> int:
        return len(self._queue)


class HeapOrder:
    """A heap; entries of blocks that have left it stay until they come up.

    Args:
        policy: what counts before the time at which a block was let go.
    """

    def __init__(self, policy: Literal["lfu", "priority"]) -> None:
        self._counts_uses = policy == "lfu"
        self._heap: list[tuple[int, int, int, bytes, int]] = []
        self._entries: dict[int, tuple[int, int, int, bytes, int]] = {}  # the valid one of each block

    def add(self, block: int, worth: Worth) -> None:
        rank = worth.uses if self._counts_uses else worth.priority
        entry = (rank, worth.freed_at, -worth.depth, worth.hash, block)
        self._entries[block] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, block: int) -> None:
        del self._entries[block]

    def pop(self) -> int:
        while True:
            entry = heapq.heappop(self._heap)
            block = entry[-1]
            if self._entries.get(block) is entry:
                del self._entries[block]
                return block

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def eviction_order(policy: EvictionPolicy) -> EvictionOrder:
    return LruOrder() if policy == "lru" else HeapOrder(policy)
