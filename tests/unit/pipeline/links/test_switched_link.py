"""A link that another one follows at a named step: what crosses which, and when the old one is closed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from carriers import LINKS, connect_link
from hand_core import Crew
from link_frames import blank, header, tensors
from penstock.pipeline.links.frame import FrameHeader
from penstock.pipeline.links.link import RecvHandle
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.switched_link import SwitchedLink
from penstock.trace.phases import NOBODYS, PhaseClock

LONG_S = 30.0
NUM_STEPS = 40


class NotedLink(MemoryLink):
    """A link in memory that notes which steps cross it, and whether an end was closed."""

    def __init__(self, num_frames: int = NUM_STEPS) -> None:
        super().__init__("stage 0 -> stage 1", LONG_S, num_frames)
        self.sent: list[int] = []
        self.received: list[int] = []
        self.num_closed = 0

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        self.sent.append(header.step_id)
        super().send_frame(header, tensors, clock)

    def receive_frame(
        self,
        header: FrameHeader,
        out: Sequence[Tensor],
        requests: Sequence[str] = (),
        clock: PhaseClock = NOBODYS,
    ) -> RecvHandle:
        self.received.append(header.step_id)
        return super().receive_frame(header, out, requests, clock)

    def close(self) -> None:
        self.num_closed += 1


class SendingLink(NotedLink):
    """A link whose frames have not left."""

    is_sending = True


def send(link: SwitchedLink, *steps: int) -> None:
    for step in steps:
        link.send_frame(header(step), tensors(step, 3))


def receive(link: SwitchedLink, *steps: int) -> None:
    for step in steps:
        out = blank(3)
        link.receive_frame(header(step), out).wait()
        assert all(torch.equal(one, other) for one, other in zip(out, tensors(step, 3), strict=True))


@pytest.mark.parametrize("lead", [0, 1, 7])
def test_g1_each_step_crosses_the_link_that_is_named_for_it(lead: int) -> None:
    """However many steps the sender is ahead of the receiver."""
    first, second, third = (NotedLink() for _ in range(3))
    sender, receiver = SwitchedLink(first, keep_steps=lead + 2), SwitchedLink(first)
    for end in (sender, receiver):
        end.attach(second, 10)
        end.attach(third, 12)
    send(sender, *range(lead))
    for step in range(NUM_STEPS - lead):
        send(sender, step + lead)
        receive(receiver, step)
    assert first.sent == first.received == list(range(10))
    assert second.sent == second.received == [10, 11]
    assert third.sent == list(range(12, NUM_STEPS))


def test_g1_a_link_is_kept_by_the_sender_until_no_step_that_crossed_it_is_in_flight() -> None:
    old, new, released = NotedLink(), NotedLink(), list[str]()
    sender, receiver = SwitchedLink(old, keep_steps=4), SwitchedLink(old)
    sender.attach(new, 3, lambda: released.append("sender"))
    receiver.attach(new, 3, lambda: released.append("receiver"))
    send(sender, *range(4))
    receive(receiver, 0, 1, 2)
    assert (old.num_closed, released) == (0, [])
    receive(receiver, 3)
    assert (old.num_closed, released) == (1, ["receiver"])
    send(sender, 4, 5, 6)
    assert old.num_closed == 1
    send(sender, 7)
    assert (old.num_closed, released) == (2, ["receiver", "sender"])
    assert new.num_closed == 0


def test_g1_a_link_whose_step_has_passed_takes_the_next_one() -> None:
    old, new = NotedLink(), NotedLink()
    sender = SwitchedLink(old)
    send(sender, 8, 9)
    sender.attach(new, 3)
    send(sender, 10)
    assert (old.sent, new.sent) == ([8, 9], [10])


def test_r6_links_that_were_left_or_never_used_are_closed_with_it() -> None:
    links = [NotedLink() for _ in range(4)]
    first, second, third, fourth = links
    switched = SwitchedLink(first, keep_steps=1000)
    switched.attach(second, 1)
    switched.attach(third, 2)
    switched.attach(fourth, 500)
    send(switched, 0, 1, 2)
    assert [link.num_closed for link in links] == [0, 0, 0, 0]
    switched.close()
    assert [link.num_closed for link in links] == [1, 1, 1, 1]


@pytest.mark.parametrize("carrier", LINKS)
def test_g1_frames_keep_their_order_over_links_of_any_carrier(carrier: str) -> None:
    """The sender is ahead as far as each link lets it, and exchanges a link every few steps."""
    with ExitStack() as closing:
        pairs = [connect_link(carrier, closing, "stage 0 -> stage 1", LONG_S, num_frames=2) for _ in range(6)]
        sender = SwitchedLink(pairs[0][0], keep_steps=NUM_STEPS)
        receiver = SwitchedLink(pairs[0][1])
        for number, (out, into) in enumerate(pairs[1:], 1):
            sender.attach(out, 6 * number)
            receiver.attach(into, 6 * number)
        crew = Crew()
        crew.start(lambda: send(sender, *range(NUM_STEPS)))
        receive(receiver, *range(NUM_STEPS))
        crew.join()


def test_g1_the_links_say_whether_any_of_them_sends() -> None:
    old, new = NotedLink(), SendingLink()
    switched = SwitchedLink(old, keep_steps=2)
    assert not switched.is_sending
    switched.attach(new, 1)
    assert not switched.is_sending
    send(switched, 1)
    assert switched.is_sending


def test_g1_a_replaced_link_whose_frames_are_still_leaving_sends() -> None:
    old = SendingLink()
    switched = SwitchedLink(old, keep_steps=2)
    send(switched, 0)
    switched.attach(NotedLink(), 1)
    send(switched, 1)
    assert switched.is_sending
    old.is_sending = False
    assert not switched.is_sending
    old.is_sending = True
    send(switched, 2, 3)
    assert old.num_closed == 1
    assert not switched.is_sending
