"""Takes the orders of plans to copy blocks, and reports to the core what became of them, and of grammars.

The stage loop gives the orders of each plan, and while answers are due it looks for them between plans, so
that a request that waits for its blocks, or its grammar, does not wait for another plan. Calls about the
catalogue of the host's store come between plans, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.batch import EntryAnswers, EntryCall, GrammarsBuilt, OrdersDone, TierOrder, encode
from penstock.kvstore.entry_calls import NO_ENTRY_CALLS
from penstock.models.interfaces import BeforeLayer
from penstock.pipeline.links.channel import MessageChannel

PATIENCE_S = 0.001


class Transfer(Protocol):
    """The interface of what copies blocks (`runner.kv_transfer`)."""

    @property
    def is_busy(self) -> bool: ...

    def submit_orders(self, orders: list[TierOrder]) -> None: ...

    def forget_blocks(self, names: Sequence[bytes]) -> None: ...

    def collect(self) -> OrdersDone | None: ...

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer: ...


class Entries(Protocol):
    """The interface of the catalogue of the host's store (`kvstore.entry_calls`)."""

    @property
    def is_busy(self) -> bool: ...

    def carry_out(self, call: EntryCall) -> None: ...

    def collect(self) -> EntryAnswers | None: ...


class Builds(Protocol):
    """The interface of what builds grammars (`sample.grammar_rows`)."""

    @property
    def is_building(self) -> bool: ...

    def collect(self) -> GrammarsBuilt | None: ...


class NoTransfer:
    """The transfer of a rank without a store: refuses every order, which the core counts as failed."""

    def __init__(self) -> None:
        self._refused: list[int] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._refused)

    def submit_orders(self, orders: list[TierOrder]) -> None:
        self._refused += [order.order for order in orders]

    def forget_blocks(self, names: Sequence[bytes]) -> None:
        """Do nothing, since no block is kept."""

    def collect(self) -> OrdersDone | None:
        refused, self._refused = self._refused, []
        return OrdersDone(done=[], failed=refused) if refused else None

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer:
        return lambda layer: None


class NoBuilds:
    """The builds of a rank that builds no grammars."""

    is_building = False

    def collect(self) -> GrammarsBuilt | None:
        return None


class TransferOrders:
    """The orders of plans on a rank, and the reports about them.

    Args:
        transfer: copies blocks.
        core: channel for the answers.
        builds: builds grammars.
        entries: the catalogue of the host's store.
    """

    def __init__(
        self, transfer: Transfer, core: MessageChannel, builds: Builds, entries: Entries = NO_ENTRY_CALLS
    ) -> None:
        self._transfer, self._core, self._builds, self._entries = transfer, core, builds, entries

    def take_orders(self, orders: list[TierOrder], given_up: Sequence[bytes] = ()) -> None:
        """Take the orders of a plan; the rank has run all steps before it.

        Args:
            given_up: names of blocks that host memory is not to keep, before the orders.
        """
        if given_up:
            # First: an order of the same plan may store one of these names anew.
            self._transfer.forget_blocks(given_up)
        if orders:
            self._transfer.submit_orders(orders)

    def take_call(self, call: EntryCall) -> None:
        """Start to carry out a call about the store's catalogue, beside the steps."""
        self._entries.carry_out(call)

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer | None:
        """Return a function that waits until these loads have a layer or have failed; None: no loads."""
        return self._transfer.layers_of(orders) if orders else None

    @property
    def patience_s(self) -> float | None:
        """The seconds to wait for a plan before the next `send_answers`; None: without end."""
        is_due = self._transfer.is_busy or self._builds.is_building or self._entries.is_busy
        return PATIENCE_S if is_due else None

    def send_answers(self) -> None:
        """Send the answers about copies, grammars and the catalogue that are ready."""
        for source in (self._transfer, self._builds, self._entries):
            answers = source.collect()
            if answers is not None:
                self._core.send(encode(answers))


class NoOrders:
    """The orders of a rank whose plans bear none, and which builds nothing."""

    patience_s = None

    def take_orders(self, orders: list[TierOrder], given_up: Sequence[bytes] = ()) -> None:
        """Do nothing."""

    def take_call(self, call: EntryCall) -> None:
        """Do nothing."""

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer | None:
        return None

    def send_answers(self) -> None:
        """Do nothing."""


NO_ORDERS = NoOrders()
