"""Channels of messages over streams: what only they have. What every channel promises is tested beside."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from carriers import TWO_WAY_CHANNELS, connect_channel
from hand_core import Crew
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links import stream_channel
from penstock.pipeline.links.channel import PolledChannel
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.pipeline.links.plan_channel import wait_any
from penstock.trust.conversation import WELCOME
from streams import Pair, channel_handle, connected_path, descriptors, end_event, tcp_pair, unix_pair

LONG_S = 30.0
STREAMS = ("tcp", "tls")
MANY = 1_000_000


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def channel_and_wire(
    closing: ExitStack, pair: Callable[[], Pair] = unix_pair, num_messages: int = 16
) -> tuple[PolledChannel, socket.socket, int]:
    """A channel, the other end of its socket, and what its host ends it with."""
    wire, taken = pair()
    end_fd = end_event(closing)
    channel = open_channel(channel_handle(connected_path(taken, end_fd), num_messages), "core - stage 1")
    taken.close()
    closing.callback(wire.close)
    closing.callback(channel.close)
    assert wire.recv(len(WELCOME)) == WELCOME
    return channel, wire, end_fd


@pytest.mark.parametrize("num_left", range(5))
def test_an_end_for_which_too_few_descriptors_are_left_keeps_none(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch, num_left: int
) -> None:
    """Its process tries again in the next epoch, with as many descriptors as before."""
    wire, taken = unix_pair()
    handle = channel_handle(connected_path(taken, end_event(closing)), 16)
    closing.callback(wire.close)
    closing.callback(taken.close)
    before, given = descriptors(), 0

    def scarce(make: Callable[..., int]) -> Callable[..., int]:
        def give(*arguments: int) -> int:
            nonlocal given
            if given == num_left:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            given += 1
            return make(*arguments)

        return give

    with monkeypatch.context() as patched:
        for name in ("dup", "eventfd"):
            patched.setattr(os, name, scarce(getattr(os, name)))
        with pytest.raises(OSError, match="Too many open files"):
            open_channel(handle, "core - stage 1")
    assert descriptors() == before


def bytes_of(closing: ExitStack, *messages: bytes) -> bytes:
    """Messages as they cross the wire."""
    channel, wire, _ = channel_and_wire(closing)
    for message in messages:
        channel.send(message)
    channel.close()
    return b"".join(iter(lambda: wire.recv(1 << 16), b""))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("carrier", STREAMS)
def test_messages_of_random_lengths_cross_both_ways_at_once(
    closing: ExitStack, carrier: str, seed: int
) -> None:
    chance = random.Random(seed)
    ends = connect_channel(TWO_WAY_CHANNELS, carrier, closing, "core - stage 1")
    lengths = [[chance.choice([0, 1, 70, 5_000, 300_000]) for _ in range(60)] for _ in ends]
    messages = [[chance.randbytes(chance.randint(0, length)) for length in each] for each in lengths]
    received: list[list[bytes | None]] = [[], []]
    crew = Crew()

    def send_and_receive(own: int) -> None:
        for message in messages[own]:
            ends[own].send(message, LONG_S)
        received[own].extend(ends[own].recv(LONG_S) for _ in messages[1 - own])

    for own in (0, 1):
        crew.start(lambda own=own: send_and_receive(own))
    crew.join()
    assert received == [messages[1], messages[0]]


def test_a_message_in_single_bytes_arrives_whole(closing: ExitStack) -> None:
    data = bytes_of(closing, b"plan", b"", b"another")
    channel, wire, _ = channel_and_wire(closing, tcp_pair)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for place in range(len(data)):
        wire.sendall(data[place : place + 1])
    assert [channel.recv(LONG_S) for _ in range(3)] == [b"plan", b"", b"another"]
    assert channel.recv(0) is None


def test_d1_no_changed_bit_of_a_message_goes_unnoticed(closing: ExitStack) -> None:
    data = bytes_of(closing, b"a plan")
    for bit in range(8 * len(data)):
        with ExitStack() as each:
            channel, wire, _ = channel_and_wire(each)
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            wire.sendall(changed)
            with pytest.raises(ProtocolError, match="core - stage 1") as caught:
                channel.recv(LONG_S)
            assert caught.value.remedy


@pytest.mark.parametrize("seed", range(20))
def test_d1_garbage_is_a_typed_error_behind_what_was_good(closing: ExitStack, seed: int) -> None:
    channel, wire, _ = channel_and_wire(closing)
    wire.sendall(bytes_of(closing, b"good") + random.Random(seed).randbytes(64))
    assert channel.recv(LONG_S) == b"good"
    for timeout_s in (None, 0, LONG_S):
        with pytest.raises(ProtocolError, match="received bytes that are not a message"):
            channel.recv(timeout_s)
    with pytest.raises(ProtocolError):
        channel.send(b"x")


def test_a_message_torn_at_any_byte_is_a_closed_channel(closing: ExitStack) -> None:
    data = bytes_of(closing, b"whole", b"torn")
    first = len(bytes_of(closing, b"whole"))
    for place in range(first, len(data)):
        with ExitStack() as each:
            channel, wire, _ = channel_and_wire(each, tcp_pair)
            wire.sendall(data[:place])
            wire.close()
            assert channel.recv(LONG_S) == b"whole"
            with pytest.raises(LinkClosedError, match="core - stage 1"):
                channel.recv(None)


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_reader_that_does_not_look_stops_its_sender_and_loses_nothing(
    closing: ExitStack, carrier: str
) -> None:
    sender, receiver = connect_channel(TWO_WAY_CHANNELS, carrier, closing, "core - stage 1")
    receiver._inbox._limit = sender._outbox._limit = 8
    sent = 0

    def send_many() -> None:
        nonlocal sent
        for number in range(MANY):
            # So many have room at both ends: until then it is only a slow thread that is waited for.
            sender.send(number.to_bytes(4, "little") * 10_000, LONG_S if sent < 16 else 0.05)
            sent += 1

    with pytest.raises(WaitTimeoutError, match="core - stage 1: the other end accepted no message"):
        send_many()
    with pytest.raises(WaitTimeoutError):
        sender.send(b"x", 0.0)
    assert sent >= 16
    for number in range(sent):
        assert receiver.recv(LONG_S) == number.to_bytes(4, "little") * 10_000
    sender.send(b"last", LONG_S)
    assert receiver.recv(LONG_S) == b"last"


@pytest.mark.parametrize("carrier", STREAMS)
def test_as_many_messages_as_promised_wait_for_a_reader(closing: ExitStack, carrier: str) -> None:
    """The last stage may be so many steps ahead of the plans that consume its samples, and must not wait."""
    sender, receiver = connect_channel(TWO_WAY_CHANNELS, carrier, closing, "samples")
    for _ in range(300):
        sender.send(bytes(80_000), 0.0)
    for _ in range(300):
        assert receiver.recv(LONG_S) == bytes(80_000)


@pytest.mark.parametrize("carrier", STREAMS)
def test_last_words_leave_before_a_close(
    closing: ExitStack, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the kernel has not taken at once, and though the other end has sent what nobody read."""
    monkeypatch.setattr(stream_channel, "_LINGER_S", LONG_S)  # however slow the threads are
    one, other = connect_channel(TWO_WAY_CHANNELS, carrier, closing, "core - stage 1")
    one.send(b"hello", LONG_S)
    assert other.recv(LONG_S) == b"hello"
    other.send(b"nobody reads this")
    for number in range(40):
        one.send(bytes([number]) * 200_000, LONG_S)
    one.send(b"the cause")
    one.close()
    assert [other.recv(LONG_S) for _ in range(40)] == [bytes([n]) * 200_000 for n in range(40)]
    assert other.recv(LONG_S) == b"the cause"
    with pytest.raises(LinkClosedError):
        other.recv(LONG_S)


def test_the_descriptor_is_readable_while_there_is_a_message_or_the_end(closing: ExitStack) -> None:
    channel, wire, _ = channel_and_wire(closing)

    def is_readable(timeout_s: float = 0.0) -> bool:
        return bool(select.select(channel.filenos(), [], [], timeout_s)[0])

    assert not is_readable()
    wire.sendall(bytes_of(closing, b"one", b"two"))
    assert is_readable(LONG_S)
    assert channel.recv(LONG_S) == b"one"
    assert is_readable(LONG_S)
    assert channel.recv(0) == b"two"
    assert not is_readable()
    wire.close()
    assert is_readable(LONG_S)
    with pytest.raises(LinkClosedError):
        channel.recv(0)
    assert is_readable()


def test_streams_and_others_can_be_waited_for_together(closing: ExitStack) -> None:
    ends = [channel_and_wire(closing) for _ in range(3)]
    channels = [channel for channel, _, _ in ends]
    ends[2][1].sendall(bytes_of(closing, b"x"))
    wait_any(channels, LONG_S)
    assert [channel.recv(0) for channel in channels] == [None, None, b"x"]
    ends[0][1].close()
    wait_any(channels, LONG_S)
    with pytest.raises(LinkClosedError):
        channels[0].recv(0)
    wait_any(channels[1:], 0.001)


def test_r2_a_host_ends_a_channel_whose_other_end_is_silent(closing: ExitStack) -> None:
    channel, _, end_fd = channel_and_wire(closing)
    crew = Crew()
    crew.start(lambda: os.eventfd_write(end_fd, 1))
    with pytest.raises(LinkClosedError, match="core - stage 1 has ended"):
        channel.recv(None)
    crew.join()
    with pytest.raises(LinkClosedError):
        channel.send(b"x", LONG_S)


def test_a_send_that_waits_ends_with_its_channel(closing: ExitStack) -> None:
    channel, _, end_fd = channel_and_wire(closing, num_messages=1)
    crew = Crew()
    is_full = threading.Event()
    crew.start(lambda: is_full.wait(LONG_S) and os.eventfd_write(end_fd, 1))

    def send_many() -> None:
        for number in range(MANY):
            if number == 3:
                is_full.set()
            channel.send(bytes(100_000), LONG_S)

    with pytest.raises(LinkClosedError, match="core - stage 1"):
        send_many()
    crew.join()


@pytest.mark.parametrize("carrier", STREAMS)
def test_r6_neither_threads_nor_descriptors_are_left(carrier: str) -> None:
    threads, before = set(threading.enumerate()), descriptors()
    for round_number in range(12):
        with ExitStack() as each:
            one, other = connect_channel(TWO_WAY_CHANNELS, carrier, each, "core - stage 1")
            if round_number % 3:  # else they are closed while they open
                one.send(b"x", LONG_S)
                assert other.recv(LONG_S) == b"x"
            first, second = (one, other) if round_number % 2 else (other, one)
            first.close()
            second.close()
            second.close()
    assert set(threading.enumerate()) <= threads
    assert descriptors() <= before
