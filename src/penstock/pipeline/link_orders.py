"""Exchanges a rank's links to neighbouring stages for new ones, each at the step that a plan names.

    supervisor ──AttachLink(7, one end)──▶ both ranks, beside the plans
    core       ──plan with LinkOrder(7, first_step=N)──▶ all ranks: the two that it concerns open their ends
    step N     crosses link 7;  the receiver reports that the old link is empty

All ranks replay the same plans, so that both ends know N before either comes to that step. `rank.rank` calls
`obey` once for a plan that has orders, before its step. The change-over itself is done by
`pipeline.links.switched_link`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.batch import LinkOrder
from penstock.errors import ProtocolError
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.switched_link import SwitchedLink


class LinkOrders:
    """Carries out, for one rank, the orders of plans to replace a link to a neighbouring stage by a new one.

    Args:
        stage, tp_rank: this rank.
        incoming: link from the stage before, if there is one.
        outgoing: links to ranks of the next stage, by the numbers that these ranks have in that stage.
        open_end: waits for this rank's end of the link that an order names, and opens it.
        released: called with the number of a new link once this rank, its receiver, has emptied the old one.
    """

    def __init__(
        self,
        stage: int,
        tp_rank: int,
        *,
        incoming: SwitchedLink | None,
        outgoing: Mapping[int, SwitchedLink],
        open_end: Callable[[LinkOrder], Link],
        released: Callable[[int], None],
    ) -> None:
        self._stage, self._tp_rank = stage, tp_rank
        self._incoming, self._outgoing = incoming, outgoing
        self._open_end, self._released = open_end, released

    def obey(self, orders: Sequence[LinkOrder]) -> None:
        """Carry out the orders of a plan that concern this rank: open each new link, for its step and later.

        Raises:
            WaitTimeoutError: the host did not hand over the end of a link in time.
            ProtocolError: this rank has no link that the new one could replace.
        """
        for order in orders:
            if (order.stage + 1, order.receiver) == (self._stage, self._tp_rank):
                self._receive_over(order)
            if (order.stage, order.sender) == (self._stage, self._tp_rank):
                self._send_over(order)

    def _receive_over(self, order: LinkOrder) -> None:
        """Attach the new link for receiving, and report when this end has emptied the old one."""
        if self._incoming is None:
            raise _no_such_link(order)
        self._incoming.attach(self._open_end(order), order.first_step, lambda: self._released(order.number))

    def _send_over(self, order: LinkOrder) -> None:
        link = self._outgoing.get(order.receiver)
        if link is None:
            raise _no_such_link(order)
        link.attach(self._open_end(order), order.first_step)


class NoLinkOrders:
    """The stand-in for `LinkOrders` on a rank whose links cannot be replaced while the epoch lasts."""

    def obey(self, orders: Sequence[LinkOrder]) -> None:
        """Raise `ProtocolError` if there are any orders."""
        for order in orders:
            raise _no_such_link(order)


NO_LINK_ORDERS = NoLinkOrders()


def _no_such_link(order: LinkOrder) -> ProtocolError:
    return ProtocolError(
        f"link {order.number} cannot be replaced at step {order.first_step}: there is no link from rank "
        f"{order.sender} of stage {order.stage} to rank {order.receiver} of the next stage."
    )
