"""Bulk channels: payloads arrive whole and checked, behind hidden states, or not at all."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from carriers import BULK_CHANNELS, connect_bulk, connect_link
from hand_core import Crew
from link_frames import blank, header, tensors
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.hosts.connections import Place, connect
from penstock.hosts.link_streams import ProvedStreams
from penstock.hosts.local import LocalHost
from penstock.hosts.rank_host import BulkNeed
from penstock.pipeline.bulk.bulk_channel import BulkReceiver, BulkSender, ChunkChannel, open_bulk
from penstock.pipeline.bulk.chunk import Chunk, chunks_of, max_data_bytes
from penstock.pipeline.bulk.turns import ByteRate, Turns
from penstock.pipeline.links import stream_channel
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.links.stream import LOW_UNSENT_BYTES, Interruption, Stream
from penstock.process.endpoints import Certified, MemoryHandle, Precedence, StreamChannelHandle
from penstock.process.link_ports import PortRange
from penstock.trust import certificates
from penstock.trust.identity import ClusterIdentity
from streams import end_event, tcp_pair

LONG_S = 30.0
NAME = "stage 0 -> stage 2"
MAX_BYTES = 1 << 22
ROOM = max_data_bytes("kv/7")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def payload_of(length: int) -> bytes:
    return random.Random(length).randbytes(length)


class RoomyChannel(QueueChannel):
    """In memory, between threads; always has room."""

    def await_room(self, timeout_s: float) -> None:
        """There is."""


def in_memory(closing: ExitStack) -> tuple[RoomyChannel, RoomyChannel]:
    first, second = RoomyChannel.pair(NAME)
    assert isinstance(first, RoomyChannel)
    assert isinstance(second, RoomyChannel)
    closing.callback(first.close)
    return first, second


def sender_over(channel: ChunkChannel, turns: Turns | None = None) -> BulkSender:
    return BulkSender(channel, turns or Turns(), timeout_s=LONG_S)


def receiver_over(channel: ChunkChannel, max_payload_bytes: int = MAX_BYTES) -> BulkReceiver:
    return BulkReceiver(channel, NAME, max_payload_bytes=max_payload_bytes)


@pytest.mark.parametrize("carrier", BULK_CHANNELS)
def test_g1_payloads_of_any_length_arrive_whole_under_their_names(closing: ExitStack, carrier: str) -> None:
    sending, receiving = connect_bulk(carrier, closing, NAME)
    sender, receiver = sender_over(sending), receiver_over(receiving)
    payloads = {f"kv/{length}": payload_of(length) for length in (0, 1, ROOM, 5 * ROOM + 3, 1 << 20)}
    crew = Crew()
    crew.start(lambda: [sender.send_payload(name, payload) for name, payload in payloads.items()])
    for name, payload in payloads.items():
        arrived = receiver.receive_payload(LONG_S)
        assert arrived is not None
        assert (arrived.name, bytes(arrived.data)) == (name, payload)
    crew.join()
    assert receiver.receive_payload(0.0) is None


def test_g1_a_payload_that_is_not_whole_yet_is_waited_for_again(closing: ExitStack) -> None:
    sending, receiving = in_memory(closing)
    receiver = receiver_over(receiving)
    first, *others = (chunk.pack() for chunk in chunks_of("kv/7", payload_of(3 * ROOM)))
    sending.send(first)
    assert receiver.receive_payload(0.0) is None
    assert receiver.receive_payload(0.0) is None
    for chunk in others:
        sending.send(chunk)
    arrived = receiver.receive_payload(0.0)
    assert arrived is not None
    assert bytes(arrived.data) == payload_of(3 * ROOM)


# --- precedence and rate ---------------------------------------------------------------------------


class Wire:
    """What has left a process, in order: chunks of a bulk channel, and the frame of a link."""

    def __init__(self, frame_behind: int) -> None:
        self.left: list[str] = []
        self.is_sending = False
        self._frame_behind = frame_behind

    def await_room(self, timeout_s: float) -> None:
        """There is room."""

    def send(self, frame: bytes, timeout_s: float = 0.0) -> None:
        self.left.append(f"chunk at {Chunk.unpack(frame).offset // ROOM}")
        if len(self.left) == self._frame_behind:
            self.is_sending = True  # a stage has put its frame into the link

    def recv(self, timeout_s: float | None) -> bytes | None:
        raise AssertionError("nothing comes back")

    def close(self) -> None:
        """Nothing is held."""

    def pause(self, seconds: float) -> None:
        """The link uses it to write its frame."""
        self.left.append("hidden states")
        self.is_sending = False


def test_g1_hidden_states_that_are_queued_during_a_transfer_go_next() -> None:
    wire = Wire(frame_behind=2)
    turns = Turns([wire], pause=wire.pause)
    BulkSender(wire, turns, timeout_s=LONG_S).send_payload("kv/7", bytes(4 * ROOM))
    assert wire.left == ["chunk at 0", "chunk at 1", "hidden states", "chunk at 2", "chunk at 3"]


def test_g1_no_chunk_leaves_while_a_stream_holds_hidden_states(closing: ExitStack) -> None:
    """Over real streams: the receiver of the link does not read, so that frames stay where they are."""
    tokens = 1 << 20  # a frame that no kernel holds
    link_out, link_in = connect_link("tcp", closing, "stage 0 -> stage 1", LONG_S, max_num_tokens=tokens)
    sending, receiving = connect_bulk("tcp", closing, NAME)
    yielded = threading.Event()

    def pause(seconds: float) -> None:
        yielded.set()
        time.sleep(seconds)

    sender, receiver = sender_over(sending, Turns([link_out], pause=pause)), receiver_over(receiving)
    sender.send_payload("first", b"1")
    arrived = receiver.receive_payload(LONG_S)
    assert arrived is not None
    for step in range(2):  # the receiving end has memory for the first one
        link_out.send_frame(header(step, tokens), tensors(step, tokens))
    assert link_out.is_sending
    crew = Crew()
    crew.start(lambda: sender.send_payload("second", b"2"))
    assert yielded.wait(LONG_S)
    assert receiver.receive_payload(0.0) is None
    for step in range(2):
        link_in.receive_frame(header(step, tokens), blank(tokens)).wait()
    arrived = receiver.receive_payload(LONG_S)
    assert arrived is not None
    assert arrived.name == "second"
    crew.join()


def test_g1_the_kernel_is_told_that_bulk_yields(closing: ExitStack) -> None:
    """Other streams of the host go first, and little of it waits in the kernel."""
    interruption = Interruption(end_event(closing))
    closing.callback(interruption.close)
    found: dict[Precedence, tuple[int, int]] = {}
    precedences: tuple[Precedence, ...] = ("normal", "low")
    for precedence in precedences:
        taken, other = tcp_pair()
        closing.callback(other.close)
        closing.callback(Stream(taken, interruption, precedence).close)
        found[precedence] = (
            taken.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
            taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT),
        )
    assert found["low"] == (2, LOW_UNSENT_BYTES)
    assert found["normal"] == (0, 0)


def test_g1_a_payload_takes_as_long_as_its_rate_says(closing: ExitStack) -> None:
    now, pauses = [0.0], []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def clock() -> float:
        return now[0]

    sending, receiving = in_memory(closing)
    turns = Turns([], ByteRate(1e6, ROOM, clock), clock=clock, pause=pause)
    sender_over(sending, turns).send_payload("kv/7", bytes(101 * ROOM))
    assert now[0] == pytest.approx(100 * ROOM / 1e6)
    assert receiver_over(receiving).receive_payload(0.0) is not None


# --- what goes wrong -------------------------------------------------------------------------------


def changed(chunk: Chunk) -> Chunk:
    data = bytearray(chunk.data)
    data[len(data) // 2] ^= 4
    return replace(chunk, data=data)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_g1_d1_a_changed_bit_of_a_payload_does_not_arrive(closing: ExitStack, number: int) -> None:
    sending, receiving = in_memory(closing)
    chunks = list(chunks_of("kv/7", payload_of(3 * ROOM)))
    chunks[number] = changed(chunks[number])
    for chunk in chunks:
        sending.send(chunk.pack())
    end = (number + 1) * ROOM
    with pytest.raises(
        ProtocolError, match=rf"payload 'kv/7' of .*{NAME} was changed .* at byte {end}"
    ) as caught:
        receiver_over(receiving).receive_payload(LONG_S)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "order",
    [[0, 2], [0, 0, 2], [0, 1, 1], [1]],
    ids=["one is lost", "one is exchanged", "one comes twice", "none before it"],
)
def test_g1_chunks_out_of_order_are_refused(closing: ExitStack, order: list[int]) -> None:
    sending, receiving = in_memory(closing)
    chunks = list(chunks_of("kv/7", payload_of(3 * ROOM)))
    for number in order:
        sending.send(chunks[number].pack())
    with pytest.raises(ProtocolError, match=r"not the next one|the middle of payload 'kv/7' first"):
        receiver_over(receiving).receive_payload(LONG_S)


def test_g1_a_payload_beyond_the_bound_takes_no_memory(closing: ExitStack) -> None:
    sending, receiving = in_memory(closing)
    sending.send(replace(next(chunks_of("kv/7", b"12")), payload_bytes=1 << 60).pack())
    with pytest.raises(ProtocolError, match=f"of {1 << 60} bytes, but the limit is 64"):
        receiver_over(receiving, max_payload_bytes=64).receive_payload(LONG_S)


def test_g1_data_beyond_their_payload_are_refused(closing: ExitStack) -> None:
    sending, receiving = in_memory(closing)
    sending.send(replace(next(chunks_of("kv/7", b"1234")), payload_bytes=3).pack())
    with pytest.raises(ProtocolError, match="not the next one"):
        receiver_over(receiving).receive_payload(LONG_S)


def test_g1_a_payload_that_was_given_up_makes_room_for_the_next(closing: ExitStack) -> None:
    sending, receiving = in_memory(closing)
    sending.send(next(chunks_of("kv/7", payload_of(3 * ROOM))).pack())
    sender_over(sending).send_payload("kv/8", b"whole")
    arrived = receiver_over(receiving).receive_payload(LONG_S)
    assert arrived is not None
    assert (arrived.name, bytes(arrived.data)) == ("kv/8", b"whole")


@pytest.mark.parametrize("carrier", BULK_CHANNELS)
def test_g1_a_torn_channel_names_the_payload_at_the_receiver(
    closing: ExitStack, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_channel, "_LINGER_S", LONG_S)  # however slow the threads are
    sending, receiving = connect_bulk(carrier, closing, NAME)
    receiver = receiver_over(receiving)
    sender_over(sending).send_payload("kv/6", b"whole")
    first, _ = chunks_of("kv/7", payload_of(2 * ROOM))
    sending.send(first.pack(), LONG_S)
    sending.close()
    arrived = receiver.receive_payload(LONG_S)
    assert arrived is not None
    assert arrived.name == "kv/6", "what came whole before is delivered"
    within = rf"within payload 'kv/7', after {ROOM} of {2 * ROOM} bytes"
    with pytest.raises(LinkClosedError, match=within) as caught:
        receiver.receive_payload(LONG_S)
    assert "again over another channel" in caught.value.remedy


@pytest.mark.parametrize("carrier", BULK_CHANNELS)
def test_g1_a_torn_channel_names_the_payload_at_the_sender(closing: ExitStack, carrier: str) -> None:
    sending, receiving = connect_bulk(carrier, closing, NAME)
    sender, crew = sender_over(sending), Crew()

    def send() -> None:
        with pytest.raises(LinkClosedError, match=r"within payload 'long', after \d+ of"):
            sender.send_payload("long", bytes(1 << 26))  # more than all buffers

    crew.start(send)
    assert receiving.recv(LONG_S)  # one chunk: the payload is under way
    receiver_over(receiving).close()
    crew.join()


def test_g1_a_receiver_that_takes_nothing_holds_some_chunks_and_no_more(closing: ExitStack) -> None:
    sending, _ = connect_bulk("ring", closing, NAME)
    sender = BulkSender(sending, Turns(), timeout_s=0.01)
    with pytest.raises(WaitTimeoutError, match=rf"within payload 'kv/7', after {8 * ROOM} of"):
        sender.send_payload("kv/7", bytes(100 * ROOM))


def test_g1_an_endpoint_that_is_no_bulk_channel_is_refused() -> None:
    with pytest.raises(ProtocolError, match="supported kinds: ring, stream_channel"):
        open_bulk(MemoryHandle(number=7), NAME)  # type: ignore[arg-type]


# --- between hosts ---------------------------------------------------------------------------------


def host_of(cluster: ClusterIdentity, name: str, closing: ExitStack) -> LocalHost:
    """A host of a cluster that others reach at 127.0.0.1."""
    streams = ProvedStreams(
        name,
        cluster.name,
        lambda: cluster.run,
        lambda peer: "127.0.0.1",
        PortRange(0, 0),
        cluster.link_credentials,
    )
    host = LocalHost(name=name, streams=streams)
    closing.callback(host.close)
    return host


@pytest.mark.parametrize("names", [("tower", "tower"), ("tower", "desk")], ids=["one host", "two hosts"])
def test_g1_r15_hosts_join_any_two_ranks_by_a_bulk_channel(
    closing: ExitStack, names: tuple[str, str]
) -> None:
    """Between hosts over TLS, with the credentials that the ranks have for the epoch."""
    key = certificates.new_key()
    cluster = ClusterIdentity(key, certificates.sign_authority(key, time.time()), time.time)
    hosts = {name: host_of(cluster, name, closing) for name in set(names)}
    receiving, sending = (Place(hosts[name], f"rank-{2 * rank}") for rank, name in enumerate(names))
    connection = connect(BulkNeed(), 5, receiving, sending)
    closing.callback(connection.close)
    endpoints = [connection.joining[0], connection.accepting]
    if len(hosts) == 2:
        assert all(isinstance(endpoint, StreamChannelHandle) for endpoint in endpoints)
        assert all(isinstance(endpoint.path.security, Certified) for endpoint in endpoints)
    ends = [open_bulk(endpoint, NAME) for endpoint in endpoints]
    for end in ends:
        closing.callback(end.close)
    connection.delivered()
    crew = Crew()
    crew.start(lambda: sender_over(ends[0]).send_payload("kv/7", payload_of(1 << 18)))
    arrived = receiver_over(ends[1]).receive_payload(LONG_S)
    assert arrived is not None
    assert bytes(arrived.data) == payload_of(1 << 18)
    crew.join()
