"""Links over streams: what only they have. What every link promises is in `test_link.py`."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Literal

import pytest
import torch

from carriers import MAX_TOKENS, WIDTH, connect_link, stream, tls
from hand_core import Crew
from link_frames import blank, header, tensors
from penstock.errors import LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.hosts.rank_host import LinkNeed
from penstock.pipeline.links.frame import ALIGNMENT, FrameHeader, FrameKind
from penstock.pipeline.links.frame_memory import FrameMemory
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.link_carriers import open_link
from penstock.trust.conversation import WELCOME
from streams import (
    FRAME_BYTES,
    Pair,
    connected_path,
    descriptors,
    end_event,
    link_handle,
    reset,
    tcp_pair,
    unix_pair,
)

NAME = "stage 0 -> stage 1"
STREAMS = ("tcp", "tcp, the sender is dialled", "tls")
LONG_S = 30.0
MANY = 200_000  # frames; more than any kernel buffers


def is_blank(out: list[torch.Tensor]) -> bool:
    return all(bool((tensor == 99.0).all()) for tensor in out)


def bytes_of(described: FrameHeader, sent: list[torch.Tensor]) -> bytes:
    """A frame as it crosses the wire."""
    memory = bytearray(FRAME_BYTES)
    FrameMemory(memoryview(memory), FRAME_BYTES, NAME).fill(0, described, sent)
    return bytes(memory[: ALIGNMENT + described.payload_bytes])


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def end_and_wire(
    closing: ExitStack,
    direction: Literal["out", "in"],
    pair: Callable[[], Pair] = unix_pair,
    num_frames: int = 1,
    timeout_s: float = LONG_S,
) -> tuple[Link, socket.socket, int]:
    """One end of a link, the other end of its socket, and what its host ends it with."""
    wire, taken = pair()
    end_fd = end_event(closing)
    link = open_link(link_handle(connected_path(taken, end_fd), direction, num_frames), NAME, timeout_s)
    taken.close()
    closing.callback(wire.close)
    closing.callback(link.close)
    assert wire.recv(len(WELCOME)) == WELCOME
    return link, wire, end_fd


def meet(sender: Link, receiver: Link) -> None:
    """A first frame crosses, so that the stream is open at both ends."""
    sender.send_frame(header(0), tensors(0, 3))
    receiver.receive_frame(header(0), blank(3)).wait()


def send_until_it_fails(link: Link) -> None:
    for step in range(MANY):
        link.send_frame(header(step, MAX_TOKENS), tensors(1, MAX_TOKENS))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("carrier", STREAMS)
def test_frames_of_random_sizes_arrive_bit_for_bit_in_order(
    closing: ExitStack, carrier: str, seed: int
) -> None:
    """Every bit pattern, those that are not numbers too, in frames of any size."""
    chance = random.Random(seed)
    num_frames, max_tokens, width = chance.randint(1, 4), chance.choice([8, 500, 3000]), 24
    sender, receiver = connect_link(
        carrier, closing, NAME, LONG_S, num_frames=num_frames, max_num_tokens=max_tokens, width=width
    )
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    steps = []
    for step in range(40):
        name, tokens = chance.choice(list(dtypes)), chance.choice([0, 1, chance.randint(0, max_tokens)])
        size = tokens * width * dtypes[name].itemsize
        sent = [
            torch.frombuffer(bytearray(chance.randbytes(size) or b"\0\0\0\0"), dtype=dtypes[name])[
                : tokens * width
            ].view(tokens, width)
            for _ in range(2)
        ]
        described = FrameHeader(
            epoch=2, step_id=step, kind=FrameKind.HIDDEN, num_tokens=tokens, width=width, dtype=name,
            num_tensors=2, digest=step,
        )  # fmt: skip
        steps.append((described, sent))
    crew = Crew()
    crew.start(lambda: [sender.send_frame(described, sent) for described, sent in steps])
    for described, sent in steps:
        out = [torch.empty_like(tensor) for tensor in sent]
        receiver.receive_frame(described, out).wait()
        for a, b in zip(out, sent, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    crew.join()


def test_a_frame_on_the_wire_is_the_frame_and_nothing_else(closing: ExitStack) -> None:
    sender, wire, _ = end_and_wire(closing, "out", num_frames=2)
    sender.send_frame(header(0), tensors(0, 3))
    sender.send_frame(header(1, 0), tensors(1, 0))
    sender.close()
    expected = bytes_of(header(0), tensors(0, 3)) + bytes_of(header(1, 0), tensors(1, 0))
    received = b"".join(iter(lambda: wire.recv(1 << 16), b""))
    assert received == expected


@pytest.mark.parametrize("ends_by", ["close", "half", "reset"])
def test_d1_a_frame_torn_at_any_byte_is_a_closed_link(closing: ExitStack, ends_by: str) -> None:
    frame = bytes_of(header(7), tensors(7, 3))
    chance = random.Random(ends_by)
    places = range(len(frame)) if ends_by == "close" else sorted(chance.sample(range(len(frame)), 40))
    for place in places:
        with ExitStack() as each:
            receiver, wire, _ = end_and_wire(each, "in", tcp_pair)
            wire.sendall(frame[:place])
            if ends_by == "half":
                wire.shutdown(socket.SHUT_WR)
            elif ends_by == "reset":
                reset(wire)
            else:
                wire.close()
            out = blank(3)
            with pytest.raises(LinkClosedError, match=r"stage 0 -> stage 1.*hidden states of step 7"):
                receiver.receive_frame(header(7), out).wait()
            assert is_blank(out)


@pytest.mark.parametrize("seed", range(20))
def test_a_frame_in_pieces_arrives_whole(closing: ExitStack, seed: int) -> None:
    chance = random.Random(seed)
    receiver, wire, _ = end_and_wire(closing, "in", tcp_pair, num_frames=2)
    left = b"".join(bytes_of(header(step), tensors(step, 3)) for step in range(4))
    crew = Crew()

    def send_pieces() -> None:
        rest = left
        while rest:
            cut = chance.randint(1, 90)
            wire.sendall(rest[:cut])
            rest = rest[cut:]

    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    crew.start(send_pieces)
    for step in range(4):
        out = blank(3)
        receiver.receive_frame(header(step), out).wait()
        assert all(torch.equal(a, b) for a, b in zip(out, tensors(step, 3), strict=True))
    crew.join()


def test_d1_no_changed_bit_of_a_frame_goes_unnoticed(closing: ExitStack) -> None:
    frame = bytes_of(header(0), tensors(0, 3))
    tensor_bytes = 3 * WIDTH * 4
    payload = [*range(64, 64 + tensor_bytes), *range(192, 192 + tensor_bytes)]
    for place in (*range(ALIGNMENT), *payload[::7]):
        with ExitStack() as each:
            receiver, wire, _ = end_and_wire(each, "in")
            changed = bytearray(frame)
            changed[place] ^= 1 << place % 8
            wire.sendall(changed)
            out = blank(3)
            with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1.*step 0.*request-a"):
                receiver.receive_frame(header(0), out, ["request-a"]).wait()
            assert is_blank(out)


def test_dr1_a_frame_of_another_step_is_refused_before_its_payload_has_come(closing: ExitStack) -> None:
    receiver, wire, _ = end_and_wire(closing, "in")
    wire.sendall(bytes_of(header(4), tensors(4, 3))[:ALIGNMENT])
    with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1.*step 3: step_id expected 3, found 4"):
        receiver.receive_frame(header(3), blank(3)).wait()


@pytest.mark.parametrize("seed", range(30))
def test_d1_garbage_is_a_typed_error(closing: ExitStack, seed: int) -> None:
    receiver, wire, _ = end_and_wire(closing, "in")
    wire.sendall(random.Random(seed).randbytes(200))
    with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1.*expected b'PSTK'") as caught:
        receiver.receive_frame(header(0), blank(3)).wait()
    assert "same Penstock version" in caught.value.remedy
    with pytest.raises(PeerError):
        receiver.receive_frame(header(1), blank(3)).wait()


def test_dr2_a_frame_that_is_too_long_is_never_read(closing: ExitStack) -> None:
    receiver, wire, _ = end_and_wire(closing, "in")
    wire.sendall(header(0, 2**31).pack() + bytes(8))
    with pytest.raises(ProtocolError, match="num_tokens expected 3"):
        receiver.receive_frame(header(0), blank(3)).wait()


@pytest.mark.parametrize("carrier", STREAMS)
def test_c8_a_reader_that_does_not_read_stops_its_sender_and_loses_nothing(
    closing: ExitStack, carrier: str
) -> None:
    sender, receiver = connect_link(carrier, closing, NAME, LONG_S, num_frames=2, max_num_tokens=2000)
    meet(sender, receiver)
    sent: list[int] = []

    def send_many() -> None:
        for step in range(MANY):
            # Not before: until then it is only a slow thread that is waited for.
            sender._timeout_s = LONG_S if len(sent) < 5 else 0.05
            sender.send_frame(header(step, 2000), tensors(step % 7, 2000))
            sent.append(step)

    with pytest.raises(WaitTimeoutError, match=r"stage 0 -> stage 1.*room for the hidden states of step"):
        send_many()
    assert len(sent) > 4
    for step in sent[:6]:
        out = blank(2000)
        receiver.receive_frame(header(step, 2000), out).wait()
        assert torch.equal(out[1], tensors(step % 7, 2000)[1])


@pytest.mark.parametrize("carrier", STREAMS)
def test_frames_sent_before_the_end_are_still_delivered(closing: ExitStack, carrier: str) -> None:
    sender, receiver = connect_link(carrier, closing, NAME, LONG_S, num_frames=4)
    meet(sender, receiver)
    for step in (1, 2, 3):
        sender.send_frame(header(step), tensors(step, 3))
    sender.close()
    sender.close()
    for step in (1, 2, 3):
        out = blank(3)
        receiver.receive_frame(header(step), out).wait()
        assert torch.equal(out[0], tensors(step, 3)[0])
    for _ in range(2):
        with pytest.raises(LinkClosedError, match=r"closed by the other end.*step 4"):
            receiver.receive_frame(header(4), blank(3)).wait()
    with pytest.raises(LinkClosedError, match="step 5"):
        sender.send_frame(header(5), tensors(5, 3))


@pytest.mark.parametrize("carrier", STREAMS)
@pytest.mark.parametrize("own", [True, False], ids=["own end", "other end"])
def test_a_close_ends_a_send_that_waits(closing: ExitStack, carrier: str, own: bool) -> None:
    sender, receiver = connect_link(carrier, closing, NAME, LONG_S, num_frames=1)
    meet(sender, receiver)
    crew = Crew()
    is_full = threading.Event()

    def close() -> None:
        is_full.wait(LONG_S)
        (sender if own else receiver).close()

    def send_many() -> None:
        for step in range(MANY):
            if step == 20:
                is_full.set()
            sender.send_frame(header(step, MAX_TOKENS), tensors(1, MAX_TOKENS))

    crew.start(close)
    with pytest.raises(LinkClosedError, match=r"stage 0 -> stage 1.*step"):
        send_many()
    crew.join()


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_close_of_the_own_end_within_a_send_is_a_closed_link(
    closing: ExitStack, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another thread, when this one is about to look whether the reader is there."""
    sender, receiver = connect_link(carrier, closing, NAME, LONG_S)
    meet(sender, receiver)
    look = sender._thread.has_lost_peer

    def close_and_look() -> bool:
        sender.close()
        return look()

    monkeypatch.setattr(sender._thread, "has_lost_peer", close_and_look)
    with pytest.raises(LinkClosedError, match=r"stage 0 -> stage 1.*step 1"):
        sender.send_frame(header(1), tensors(1, 3))


@pytest.mark.parametrize("carrier", STREAMS)
def test_a_close_of_the_own_end_ends_a_receive_that_waits(closing: ExitStack, carrier: str) -> None:
    _, receiver = connect_link(carrier, closing, NAME, LONG_S)
    crew = Crew()
    crew.start(receiver.close)
    for _ in range(2):
        with pytest.raises(LinkClosedError, match="stage 0 -> stage 1 has ended"):
            receiver.receive_frame(header(0), blank(3)).wait()
    crew.join()


def test_a_half_closed_reader_is_one_that_has_gone(closing: ExitStack) -> None:
    sender, wire, _ = end_and_wire(closing, "out", tcp_pair)
    wire.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosedError):
        send_until_it_fails(sender)


@pytest.mark.parametrize("ends_by", [socket.socket.close, reset], ids=["close", "reset"])
def test_a_sender_learns_that_its_reader_has_gone(
    closing: ExitStack, ends_by: Callable[[socket.socket], None]
) -> None:
    sender, wire, _ = end_and_wire(closing, "out", tcp_pair, num_frames=2)
    ends_by(wire)
    with pytest.raises(LinkClosedError, match="stage 0 -> stage 1"):
        send_until_it_fails(sender)


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_r2_a_host_ends_a_link_whose_other_end_is_silent(
    closing: ExitStack, pair: Callable[[], Pair]
) -> None:
    """The other end neither reads, writes nor closes, as when its cable has been pulled."""
    receiver, _, end_of_receiver = end_and_wire(closing, "in", pair)
    crew = Crew()
    crew.start(lambda: os.eventfd_write(end_of_receiver, 1))
    with pytest.raises(LinkClosedError, match="stage 0 -> stage 1 has ended"):
        receiver.receive_frame(header(0), blank(3)).wait()
    sender, _, end_of_sender = end_and_wire(closing, "out", pair)
    crew.start(lambda: os.eventfd_write(end_of_sender, 1))
    with pytest.raises(LinkClosedError, match="stage 0 -> stage 1"):
        send_until_it_fails(sender)
    crew.join()


def test_r2_a_host_ends_a_link_whose_other_end_never_came(closing: ExitStack) -> None:
    need = LinkNeed(frame_bytes=FRAME_BYTES, num_frames=1)
    joining, accepting = stream(need, closing)
    sender, receiver = (open_link(end.endpoint, NAME, LONG_S) for end in (joining, accepting))
    for link in (sender, receiver):
        closing.callback(link.close)
    lonely_end = stream(need, closing)[1]
    lonely = open_link(lonely_end.endpoint, NAME, LONG_S)
    closing.callback(lonely.close)
    crew = Crew()
    crew.start(lonely_end.end)
    with pytest.raises(LinkClosedError, match="has ended"):
        lonely.receive_frame(header(0), blank(3)).wait()
    crew.join()


def test_each_end_goes_one_way(closing: ExitStack) -> None:
    sender, receiver = connect_link("tcp", closing, NAME, LONG_S)
    with pytest.raises(AssertionError, match="only receives"):
        receiver.send_frame(header(0), tensors(0, 3))
    with pytest.raises(AssertionError, match="only sends"):
        sender.receive_frame(header(0), blank(3)).wait()


@pytest.mark.parametrize("carrier", STREAMS)
def test_r6_neither_threads_nor_descriptors_are_left(carrier: str) -> None:
    threads, before = set(threading.enumerate()), descriptors()
    for round_number in range(12):
        with ExitStack() as each:
            sender, receiver = connect_link(carrier, each, NAME, LONG_S, num_frames=2)
            if round_number % 3:  # else they are closed while they open
                meet(sender, receiver)
            first, second = (sender, receiver) if round_number % 2 else (receiver, sender)
            first.close()
            second.close()
    assert set(threading.enumerate()) <= threads
    assert descriptors() <= before


def relay(source: socket.socket, sink: socket.socket, change_at: int) -> None:
    """Pass bytes on, one bit of them changed, until either end closes."""
    passed = 0
    while data := bytearray(source.recv(1 << 16)):
        if passed <= change_at < passed + len(data):
            data[change_at - passed] ^= 1
        passed += len(data)
        try:
            sink.sendall(data)
        except OSError:
            return


def test_r15_a_byte_that_was_changed_under_tls_is_refused(closing: ExitStack) -> None:
    of_sender, of_receiver = tls(closing)
    (out_taken, out_wire), (in_wire, in_taken) = tcp_pair(), tcp_pair()
    paths = [
        connected_path(out_taken, end_event(closing), side="dialler", security=of_sender),
        connected_path(in_taken, end_event(closing), side="accepter", security=of_receiver),
    ]
    sender = open_link(link_handle(paths[0], "out"), NAME, LONG_S)
    receiver = open_link(link_handle(paths[1], "in"), NAME, LONG_S)
    for taken in (out_taken, in_taken):
        taken.close()
    for wire in (out_wire, in_wire):
        closing.callback(wire.close)
    crew = Crew()
    closing.callback(crew.join)
    for link in (sender, receiver):
        closing.callback(link.close)
    crew.start(lambda: relay(out_wire, in_wire, change_at=60_000))
    crew.start(lambda: relay(in_wire, out_wire, change_at=-1))

    def pass_frames() -> None:
        for step in range(1000):
            sender.send_frame(header(step, MAX_TOKENS), tensors(step, MAX_TOKENS))
            out = blank(MAX_TOKENS)
            receiver.receive_frame(header(step, MAX_TOKENS), out).wait()
            assert torch.equal(out[0], tensors(step, MAX_TOKENS)[0])

    with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1: TLS reports .*mac"):
        pass_frames()
