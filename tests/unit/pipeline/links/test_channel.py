"""What every channel of messages promises in the direction that is used (`tests/support/carriers.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from carriers import ONE_WAY_CHANNELS, Channels, connect_channel
from hand_core import Crew
from penstock.errors import LinkClosedError, ProtocolError
from penstock.pipeline.links.channel_carriers import open_channel

LONG = 30.0


@pytest.fixture(params=ONE_WAY_CHANNELS)
def ends(request: pytest.FixtureRequest) -> Iterator[Channels]:
    """The sending and the receiving end."""
    with ExitStack() as closing:
        yield connect_channel(ONE_WAY_CHANNELS, request.param, closing, "samples")


@pytest.fixture
def used_ends(ends: Channels) -> Channels:
    """Ends that have met."""
    ends[0].send(b"hello", LONG)
    assert ends[1].recv(LONG) == b"hello"
    return ends


def test_messages_of_any_length_arrive_whole_and_in_order(ends: Channels) -> None:
    sender, receiver = ends
    lengths = [5, 70 * 16384, 0, 16384, *range(100), 40_000]
    messages = [bytes([i % 251]) * length for i, length in enumerate(lengths)]
    crew = Crew()
    crew.start(lambda: [sender.send(message, LONG) for message in messages])
    assert [receiver.recv(LONG) for _ in messages] == messages
    crew.join()


def test_a_look_and_a_short_wait_find_nothing(used_ends: Channels) -> None:
    _, receiver = used_ends
    assert receiver.recv(0) is None
    assert receiver.recv(0.001) is None


def test_what_was_sent_before_the_end_is_still_delivered(used_ends: Channels) -> None:
    sender, receiver = used_ends
    sender.send(b"last words", LONG)
    sender.close()
    sender.close()
    assert receiver.recv(LONG) == b"last words"
    for timeout_s in (None, LONG, 0):
        with pytest.raises(LinkClosedError, match="samples"):
            receiver.recv(timeout_s)


def test_an_endless_wait_ends_with_the_other_end(used_ends: Channels) -> None:
    sender, receiver = used_ends
    crew = Crew()
    crew.start(sender.close)
    with pytest.raises(LinkClosedError):
        receiver.recv(None)
    crew.join()


def test_a_closed_end_sends_nothing(used_ends: Channels) -> None:
    sender, _ = used_ends
    sender.close()
    with pytest.raises(LinkClosedError):
        sender.send(b"too late", LONG)


def test_an_endpoint_that_no_carrier_opens_is_refused_with_a_remedy() -> None:
    class Pigeon(msgspec.Struct, tag="pigeon"):
        loft: int

    known = "ring, socket_handle, socket_listener, stream_channel"
    with pytest.raises(ProtocolError, match=rf"channel samples .* kind pigeon.* {known}") as caught:
        open_channel(Pigeon(7), "samples")  # type: ignore[arg-type]
    assert "same Penstock version" in caught.value.remedy
