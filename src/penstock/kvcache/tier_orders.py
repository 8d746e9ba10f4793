"""The orders to ranks to copy blocks to or from the store: numbered, and kept until a plan takes them.

Shared by `kvcache.write_back` and `kvcache.prefetching`; the ranks' answers bear the numbers.
"""

from __future__ import annotations

import itertools

from penstock.batch import TierOrder


class TierOrders:
    """The orders to ranks to copy KV blocks to or from the store that no plan has taken yet."""

    def __init__(self) -> None:
        self._new_orders: list[TierOrder] = []
        self._numbers = itertools.count()  # of orders, and of questions to the catalogue

    def __len__(self) -> int:
        return len(self._new_orders)

    def next_number(self) -> int:
        """Return a new number for an order, or for a question to the catalogue: no other has it."""
        return next(self._numbers)

    def order_copy(self, is_load: bool, block: int, name: bytes) -> int:
        """Add an order to ranks to copy a block, and return the order's number.

        Args:
            is_load: copy from the store; else to it.
            block: the id of the block in the KV cache.
            name: the hash of the content under which the store has it.
        """
        order = next(self._numbers)
        self._new_orders.append(TierOrder(order, is_load, block, name))
        return order

    def take_orders(self) -> list[TierOrder]:
        """Remove and return all orders, for the plan that is issued now."""
        orders, self._new_orders = self._new_orders, []
        return orders

    def clear(self) -> None:
        """Forget the orders that no plan has taken yet."""
        self._new_orders.clear()
