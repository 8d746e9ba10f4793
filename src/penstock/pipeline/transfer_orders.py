"""Takes plans' orders to copy KV blocks from or to the store, and reports their outcome to the core.

It also reports which grammars are compiled, and passes on the core's calls about the catalogue of the host's
store, which come between plans. The stage loop hands over the orders of each plan. While answers are due, the
loop looks for them between plans too: a request that waits for its blocks, or its grammar, must not wait
until the next plan comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.batch import EntryAnswers, EntryCall, GrammarsBuilt, OrdersDone, TierOrder, encode
from penstock.kvstore.entry_calls import NO_ENTRY_CALLS
from penstock.models.interfaces import BeforeLayer
from penstock.pipeline.links.channel import MessageChannel

PATIENCE_S = 0.001  # between two looks for answers while some are due and no plan comes


class Transfer(Protocol):
    """The interface of the transfer of KV blocks between cache and store (`runner.kv_transfer`)."""

    @property
    def is_busy(self) -> bool: ...

    def submit_orders(self, orders: list[TierOrder]) -> None: ...

    def forget_blocks(self, names: Sequence[bytes]) -> None: ...

    def collect(self) -> OrdersDone | None: ...

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer: ...


class Entries(Protocol):
    """The interface of the part that carries out the core's calls about the host's store (`EntryCall`).

    They concern its catalogue, the list of its blocks. `kvstore.entry_calls` implements this interface.
    """

    @property
    def is_busy(self) -> bool: ...

    def carry_out(self, call: EntryCall) -> None: ...

    def collect(self) -> EntryAnswers | None: ...


class Builds(Protocol):
    """The interface of the part that compiles grammars on the last stage (`sample.grammar_rows`)."""

    @property
    def is_building(self) -> bool: ...

    def collect(self) -> GrammarsBuilt | None: ...


class NoTransfer:
    """The stand-in for `Transfer` on a rank without a store: refuses every order.

    The core counts a refused order as failed.
    """

    def __init__(self) -> None:
        self._refused: list[int] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._refused)

    def submit_orders(self, orders: list[TierOrder]) -> None:
        self._refused += [order.order for order in orders]

    def forget_blocks(self, names: Sequence[bytes]) -> None:
        """Do nothing, since this rank keeps no block in host memory."""

    def collect(self) -> OrdersDone | None:
        refused, self._refused = self._refused, []
        return OrdersDone(done=[], failed=refused) if refused else None

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer:
        return lambda layer: None


class TransferOrders:
    """Gives a rank's orders and calls from the core to the parts that carry them out, and sends the answers.

    Args:
        transfer: copies KV blocks.
        core: channel to the core, for the answers.
        builds: builds grammars.
        entries: carries out calls about the catalogue of the host's store.
    """

    def __init__(
        self, transfer: Transfer, core: MessageChannel, builds: Builds, entries: Entries = NO_ENTRY_CALLS
    ) -> None:
        self._transfer, self._core, self._builds, self._entries = transfer, core, builds, entries

    def take_orders(self, orders: list[TierOrder], given_up: Sequence[bytes] = ()) -> None:
        """Submit a plan's orders to copy KV blocks, without waiting; all steps before the plan must have run.

        Args:
            given_up: names (content hashes) of blocks to remove from host memory before the orders.
        """
        if given_up:
            # Before the orders: one of them may store a block of the same name anew.
            self._transfer.forget_blocks(given_up)
        if orders:
            self._transfer.submit_orders(orders)

    def take_call(self, call: EntryCall) -> None:
        """Start to carry out a call about the store's catalogue, beside the steps."""
        self._entries.carry_out(call)

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer | None:
        """Return a function that waits, for one layer, until these orders have loaded it or have failed.

        Args:
            orders: numbers of orders to load blocks; without any, None is returned.
        """
        return self._transfer.layers_of(orders) if orders else None

    @property
    def patience_s(self) -> float | None:
        """The longest wait for a plan, in seconds, until `send_answers` is called; None: no answer is due."""
        is_due = self._transfer.is_busy or self._builds.is_building or self._entries.is_busy
        return PATIENCE_S if is_due else None

    def send_answers(self) -> None:
        """Send the core those answers about copies, grammars and the catalogue that are ready."""
        for source in (self._transfer, self._builds, self._entries):
            answers = source.collect()
            if answers is not None:
                self._core.send(encode(answers))


class NoOrders:
    """The stand-in for `TransferOrders` on a rank whose plans have no orders and no grammars."""

    patience_s = None

    def take_orders(self, orders: list[TierOrder], given_up: Sequence[bytes] = ()) -> None:
        """Do nothing, since the plans of this rank have no orders."""

    def take_call(self, call: EntryCall) -> None:
        """Do nothing, since this rank has no catalogue."""

    def layers_of(self, orders: Sequence[int]) -> BeforeLayer | None:
        return None

    def send_answers(self) -> None:
        """Do nothing, since no answer is ever due."""


NO_ORDERS = NoOrders()
