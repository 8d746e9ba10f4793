"""Messages over a ring: any length, in order, and the end of either side."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from hand_core import Crew
from penstock.batch import SampledTokens, encode
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.ring_channel import FRAME_BYTES, RingChannel, create_channel_ring
from penstock.pipeline.links.ring_memory import Ring, close_handle

LONG = 30.0
Ends = tuple[RingChannel, RingChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    handle = create_channel_ring(num_messages=16, num_rows=64)
    sender, receiver = RingChannel(handle, "samples"), RingChannel(handle, "samples")
    close_handle(handle)
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "length",
    [0, 1, FRAME_BYTES - 17, FRAME_BYTES - 16, FRAME_BYTES - 15, 2 * FRAME_BYTES - 16, 3 * FRAME_BYTES + 5],
)
def test_a_message_of_any_length_arrives_whole(ends: Ends, length: int) -> None:
    sender, receiver = ends
    message = bytes(i * 7 % 251 for i in range(length))
    sender.send(message, LONG)
    sender.send(b"next", LONG)
    assert receiver.recv(LONG) == message
    assert receiver.recv(LONG) == b"next"
    assert receiver.recv(0.0) is None


def test_messages_longer_than_the_ring_and_many_of_them_arrive_in_order(ends: Ends) -> None:
    sender, receiver = ends
    lengths = [5, 70 * FRAME_BYTES, 0, FRAME_BYTES, *range(100), 40_000]
    messages = [bytes([i % 251]) * length for i, length in enumerate(lengths)]
    crew = Crew()
    crew.start(lambda: [sender.send(message, LONG) for message in messages])
    assert [receiver.recv(None) for _ in messages] == messages
    crew.join()


def test_d1_no_changed_bit_of_a_message_goes_unnoticed() -> None:
    """Issue 25, point 4: samples and results that change in the memory between two processes are refused."""
    handle = create_channel_ring(num_messages=16, num_rows=64)
    sender, receiver = RingChannel(handle, "samples"), RingChannel(handle, "samples")
    memory = Ring(handle, "samples")
    close_handle(handle)
    message = encode(SampledTokens(7, 0, 5, [[3], [500]], [0, 0]))
    for number, place in enumerate(range(8, 16 + len(message))):
        sender.send(message, LONG)
        memory.frames[number % memory.num_frames * memory.frame_bytes + place] ^= 1 << place % 8
        with pytest.raises(ProtocolError, match=r"a message of samples was changed.*checksum"):
            receiver.recv(LONG)
    sender.send(message, LONG)
    assert receiver.recv(LONG) == message
    for end in (sender, receiver, memory):
        end.close()


def test_a_sender_whose_receiver_takes_nothing_gives_up_at_its_deadline(ends: Ends) -> None:
    sender, _ = ends

    def send_many() -> None:
        for _ in range(1000):
            sender.send(b"x", 0.0)

    with pytest.raises(WaitTimeoutError, match="samples"):
        send_many()


@pytest.mark.parametrize(("num_messages", "num_rows"), [(1, 1), (20, 64), (300, 5000)])
def test_as_many_messages_as_promised_wait_for_a_reader(num_messages: int, num_rows: int) -> None:
    """The last stage may be so many steps ahead of the plans that consume its samples."""
    handle = create_channel_ring(num_messages, num_rows)
    sender = RingChannel(handle, "samples")
    largest = 2**31
    tokens = SampledTokens(1 << 40, 0, 1 << 31, [[largest]] * num_rows, [100] * num_rows)
    for _ in range(num_messages):
        sender.send(encode(tokens), 0.0)
    sender.close()
    close_handle(handle)


def test_what_was_sent_before_the_end_is_still_delivered(ends: Ends) -> None:
    sender, receiver = ends
    sender.send(b"last words", LONG)
    sender.close()
    assert receiver.recv(None) == b"last words"
    with pytest.raises(LinkClosedError):
        receiver.recv(None)
    with pytest.raises(LinkClosedError):
        receiver.recv(0.0)


def test_a_sender_learns_that_its_receiver_has_gone(ends: Ends) -> None:
    sender, receiver = ends
    receiver.close()
    with pytest.raises(LinkClosedError):
        sender.send(b"x", LONG)


def test_the_descriptor_is_readable_while_there_is_a_message(ends: Ends) -> None:
    sender, receiver = ends

    def is_readable() -> bool:
        return bool(select.select([receiver.fileno()], [], [], 0)[0])

    assert not is_readable()
    sender.send(b"x", LONG)
    assert is_readable()
    receiver.recv(0.0)
    assert not is_readable()
