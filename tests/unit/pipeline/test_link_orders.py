"""Orders of plans to exchange links: which rank obeys which, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from link_frames import blank, header, tensors
from penstock.batch import LinkOrder
from penstock.errors import ProtocolError
from penstock.pipeline.link_orders import NO_LINK_ORDERS, LinkOrders
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.switched_link import SwitchedLink


class Pipe:
    """A rank of stage 1 of three, which has a link in and two out; new links are in memory."""

    def __init__(self) -> None:
        self.opened: dict[int, MemoryLink] = {}
        self.released: list[int] = []
        self.first_links = [_link() for _ in range(3)]
        incoming, *outgoing = (SwitchedLink(link) for link in self.first_links)
        self.incoming, self.outgoing = incoming, dict(zip((2, 3), outgoing, strict=True))
        self.orders = LinkOrders(
            1,
            4,
            incoming=incoming,
            outgoing=self.outgoing,
            open_end=self._open,
            released=self.released.append,
        )

    def _open(self, order: LinkOrder) -> Link:
        self.opened[order.number] = _link()
        return self.opened[order.number]


def _link() -> MemoryLink:
    return MemoryLink("link", 30.0, 8)


def order(number: int, stage: int, sender: int, receiver: int) -> LinkOrder:
    return LinkOrder(number=number, first_step=5, stage=stage, sender=sender, receiver=receiver)


def send(link: Link, steps: Sequence[int]) -> None:
    for step in steps:
        link.send_frame(header(step), tensors(step, 3))


def test_g1_a_rank_opens_its_own_ends_and_no_others() -> None:
    pipe = Pipe()
    pipe.orders.obey(
        [order(1, 0, 9, 4), order(2, 1, 4, 3), order(3, 1, 5, 3), order(4, 0, 9, 5), order(5, 2, 4, 4)]
    )
    assert list(pipe.opened) == [1, 2]


def test_g1_the_receiver_says_when_the_link_of_before_is_empty() -> None:
    pipe = Pipe()
    pipe.orders.obey([order(7, 0, 9, 4), order(8, 1, 4, 2)])
    send(pipe.first_links[0], [3, 4])
    send(pipe.opened[7], [5])
    for step in (3, 4):
        pipe.incoming.receive_frame(header(step), blank(3)).wait()
    assert pipe.released == []
    pipe.incoming.receive_frame(header(5), blank(3)).wait()
    assert pipe.released == [7]
    send(pipe.outgoing[2], range(4, 9))
    assert pipe.released == [7], "the sender cannot know it"


def test_g1_a_link_that_a_rank_does_not_have_is_refused() -> None:
    pipe = Pipe()
    with pytest.raises(
        ProtocolError, match=r"link 7 .* at step 5: there is no link from rank 4 of stage 1 to rank 0"
    ):
        pipe.orders.obey([order(7, 1, 4, 0)])
    first = LinkOrders(
        0, 0, incoming=None, outgoing={}, open_end=lambda order: _link(), released=lambda number: None
    )
    with pytest.raises(ProtocolError, match="there is no link"):
        first.obey([order(7, -1, 0, 0)])


def test_g1_a_rank_whose_links_stay_refuses_every_order() -> None:
    NO_LINK_ORDERS.obey([])
    with pytest.raises(ProtocolError, match="there is no link"):
        NO_LINK_ORDERS.obey([order(7, 0, 0, 0)])
