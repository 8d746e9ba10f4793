"""Where a rank takes orders for copies of blocks, and tells the core what became of them, and of grammars.

The stage loop gives the orders of each plan, and while answers are due it looks for them between plans, so
that a request that waits for its blocks, or its grammar, does not wait for another plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.batch import GrammarsBuilt, OrdersDone, TierOrder, encode
from penstock.models.interfaces import BeforeLayer
from penstock.pipeline.links.channel import MessageChannel

PATIENCE_S = 0.001


class Transfer(Protocol):
    """Who copies (`runner.kv_transfer`)."""

    @property
    def is_busy(self) -> bool: ...

    def submit(self, orders: list[TierOrder]) -> None: ...

    def collect(self) -> OrdersDone | None: ...

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer: ...


class Builds(Protocol):
    """Who builds grammars (`sample.grammar_rows`)."""

    @property
    def is_building(self) -> bool: ...

    def collect(self) -> GrammarsBuilt | None: ...


class TransferOrders:
    """Args:
    transfer: None refuses every order, which the core then counts as failed.
    core: takes the answers.
    builds: None: of none.
    """

    def __init__(self, transfer: Transfer | None, core: MessageChannel, builds: Builds | None = None) -> None:
        self._transfer, self._core, self._builds = transfer, core, builds

    def give(self, orders: list[TierOrder]) -> None:
        """Those of a plan; the rank has run all steps before it."""
        if not orders:
            return
        if self._transfer is None:
            self._core.send(encode(OrdersDone(done=[], failed=[order.order for order in orders])))
        else:
            self._transfer.submit(orders)

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer | None:
        """What returns when a layer is there of all that these load, or will not come."""
        return None if self._transfer is None else self._transfer.layers_of(orders)

    @property
    def patience_s(self) -> float | None:
        """How long to wait for a plan before the next `tell`; None: without end."""
        is_busy = self._transfer is not None and self._transfer.is_busy
        return PATIENCE_S if is_busy or (self._builds is not None and self._builds.is_building) else None

    def tell(self) -> None:
        """Send what has been answered, or built."""
        for source in (self._transfer, self._builds):
            answers = None if source is None else source.collect()
            if answers is not None:
                self._core.send(encode(answers))
