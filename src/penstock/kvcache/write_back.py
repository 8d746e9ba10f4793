"""Decides which KV blocks ranks store, and orders them to be stored, a few at a time.

    named, or found often enough ──▶ waiting line ──few at a time──▶ order ──all ranks have answered──▶ stored

A block is pinned in the pool while it is being copied. Called by `kvcache.storage_tier`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from penstock.batch import OrderStatus
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.host_names import AnyHostNames
from penstock.kvcache.stored_names import StoredNames
from penstock.kvcache.tier_orders import TierOrders

MAX_OPEN_STORES = 256  # blocks that are copied at once, or a quarter of the pool where that is less
MAX_WAITING_STORES = 1 << 16  # blocks in the waiting line; further ones are not stored


class WriteBack:
    """Decides which KV blocks are stored, and when; orders the ranks to store them.

    A name is the content hash of a block.

    Args:
        allocator: the pool's blocks.
        stored: names that are stored already.
        orders: takes the orders to the ranks.
        memory: the record of the blocks that ranks keep in host memory; what they store is kept there, too.
        store_when_found: 0: a block is stored as soon as requests can find it; n: when n requests have found
            it.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        stored: StoredNames,
        orders: TierOrders,
        memory: AnyHostNames,
        store_when_found: int,
    ) -> None:
        self._allocator = allocator
        self._known = stored
        self._orders, self._memory = orders, memory
        self._store_when_found = store_when_found
        self._stores: dict[int, tuple[int, bytes]] = {}  # by open order: block and name
        self._to_store: deque[tuple[int, bytes]] = deque()  # the waiting line: block and name
        self._pending: set[bytes] = set()  # names in `_stores` and `_to_store`
        self._disowned: set[bytes] = set()  # names in `_stores` that are not to be found when stored

    @property
    def open_orders(self) -> list[int]:
        """The numbers of the orders to store that the ranks have not answered."""
        return list(self._stores)

    def has_ordered(self, order: int) -> bool:
        """Return whether `order` is the number of an order to store that the ranks have not answered."""
        return order in self._stores

    def store_named(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Queue blocks to be stored that have just been named (have become findable), if the policy says so.

        Args:
            blocks: ids of the blocks.
            names: their names, in the same order.
        """
        if not self._store_when_found:
            self._store(zip(blocks, names, strict=True))

    def store_found(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Queue blocks to be stored that a starting request has found, if they were found often enough.

        Args:
            blocks: ids of the blocks.
            names: their names, in the same order.
        """
        cache = self._allocator.pool.cache
        self._memory.use(names)
        self._store(
            (block, name)
            for block, name in zip(blocks, names, strict=True)
            if cache.num_uses(block) >= self._store_when_found
        )

    def disown(self, names: Sequence[bytes]) -> None:
        """Let no request find blocks that are being stored under these names, even when they are stored."""
        self._disowned.update({name for _, name in self._stores.values()}.intersection(names))

    def settle_order(self, order: int, status: OrderStatus) -> list[bytes]:
        """Record the outcome of an order to store, which all ranks have answered, and unpin its block.

        Returns:
            The name that is stored now, in a list; it is empty if that failed, or after `disown` for the
            name.
        """
        block, name = self._stores.pop(order)
        self._allocator.unpin([block])
        self._pending.discard(name)
        if name in self._disowned:
            self._disowned.discard(name)
            status = "failed"
        self._memory.end_store(name, status)
        return [name] if status == "done" else []

    def lose_all(self) -> None:
        """Forget all orders and waiting blocks, since the ranks are lost; unpin the blocks."""
        for block, _ in self._stores.values():
            self._allocator.unpin([block])
        self._to_store.clear()
        self._pending.clear()
        self._disowned.clear()
        self._stores.clear()

    def flush_orders(self) -> None:
        """Drop the waiting line: of the pool's present blocks only those already ordered are still stored."""
        self._pending.difference_update(name for _, name in self._to_store)
        self._to_store.clear()

    def _store(self, candidates: Iterable[tuple[int, bytes]]) -> None:
        candidates = list(candidates)
        for block, name in candidates:
            is_known = name in self._known or name in self._pending
            if not is_known and len(self._to_store) < MAX_WAITING_STORES:
                self._pending.add(name)
                self._to_store.append((block, name))
        self.order_more()
        self._memory.use([name for _, name in candidates])

    def order_more(self) -> None:
        """Order ranks to store waiting blocks, as many as may be under way and host memory has room for.

        Blocks that were evicted while they waited are left out.
        """
        most = min(MAX_OPEN_STORES, max(1, self._allocator.num_blocks // 4))
        while self._to_store and len(self._stores) < most:
            block, name = self._to_store[0]
            # Looked up again, since the block may have been evicted and hold something else by now.
            is_there = self._allocator.find([name]) == [block]
            if is_there and not self._memory.make_room(name):
                return  # until an order is answered
            self._to_store.popleft()
            if is_there:
                # Pinned until all ranks have answered, because they read the block while other steps run.
                self._allocator.pin([block])
                self._stores[self._orders.order_copy(False, block, name)] = block, name
            else:  # the block was evicted while it waited
                self._pending.discard(name)
