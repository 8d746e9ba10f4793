"""The orders to ranks to copy blocks to or from the store: numbered, and kept until a plan takes them.

Shared by `kvcache.write_back` and `kvcache.prefetching`; the ranks' answers bear the numbers.
"""

from __future__ import annotations

import itertools

from penstock.batch import TierOrder


class TierOrders:
    """The orders that no plan has taken yet."""

    def __init__(self) -> None:
        self._new_orders: list[TierOrder] = []
        self._numbers = itertools.count()  # of orders, and of questions to the catalogue

    def __len__(self) -> int:
        return len(self._new_orders)

    def next_number(self) -> int:
        """Return a number that no order and no question has."""
        return next(self._numbers)

    def order_copy(self, is_load: bool, block: int, name: bytes) -> int:
        """Order a copy of a block from the store, or to it, and return the order's number."""
        order = next(self._numbers)
        self._new_orders.append(TierOrder(order, is_load, block, name))
        return order

    def take_orders(self) -> list[TierOrder]:
        """Return all orders since the last call, for the plan that is issued now."""
        orders, self._new_orders = self._new_orders, []
        return orders

    def clear(self) -> None:
        """Forget the orders that no plan has taken."""
        self._new_orders.clear()
