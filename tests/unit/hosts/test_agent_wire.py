"""Messages between head and agent: whole however they are cut; who speaks otherwise is given up."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import msgspec
import pytest

from penstock.errors import LinkClosedError, ProtocolError
from penstock.hosts import agent_wire
from penstock.hosts.agent_messages import AskResources, Ended, Heartbeat, KeepSpare, ToAgent, TouchMember
from penstock.hosts.agent_wire import AgentWire

Wires = tuple[AgentWire[ToAgent], AgentWire[ToAgent]]
MESSAGES = [Heartbeat(), TouchMember(number=7, what="kill_now"), KeepSpare(threads=2), AskResources()]


def wire_of(end: socket.socket) -> AgentWire[ToAgent]:
    return AgentWire(end, ToAgent)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def bytes_of(*messages: msgspec.Struct) -> bytes:
    encoded = [msgspec.json.encode(message) for message in messages]
    return b"".join(len(each).to_bytes(4, "big") + each for each in encoded)


def test_messages_come_as_they_were_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = map(wire_of, ends)
    for message in MESSAGES:
        sender.send(message)
    assert receiver.receive() == MESSAGES
    assert receiver.receive() == []
    assert receiver.failure is None


def send_and_fail(sender: AgentWire[ToAgent], message: msgspec.Struct) -> None:
    with sender.together():
        sender.send(message)
        raise RuntimeError


def test_what_is_sent_together_leaves_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = map(wire_of, ends)
    with sender.together():
        sender.send(MESSAGES[0])
        with sender.together():
            sender.send(MESSAGES[1])
        assert receiver.receive() == []
    sender.send(MESSAGES[2])
    assert receiver.receive() == MESSAGES[:3]
    with pytest.raises(RuntimeError):
        send_and_fail(sender, MESSAGES[3])
    assert receiver.receive() == MESSAGES[3:], "whatever happens, it has left"


@pytest.mark.parametrize("seed", range(8))
def test_messages_are_whole_however_the_bytes_are_cut(
    ends: tuple[socket.socket, socket.socket], seed: int
) -> None:
    chance, receiver, received = random.Random(seed), wire_of(ends[1]), list[object]()
    data = bytes_of(*MESSAGES * 5)
    while data:
        size = chance.randint(1, 9)
        ends[0].sendall(data[:size])
        data = data[size:]
        received += receiver.receive()
    assert received == MESSAGES * 5


def test_what_is_not_taken_at_once_goes_later(ends: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = map(wire_of, ends)
    message = TouchMember(number=1, what="forget")
    for _ in range(20_000):
        sender.send(message)
    assert not sender.flush(), "the kernel holds less than that"
    received = 0
    while received < 20_000:
        received += len(receiver.receive())
        sender.flush()
    assert sender.flush()


def test_r15_nothing_is_kept_for_a_peer_that_has_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    sender = wire_of(ends[0])
    sender.give_up("it has gone")
    sender.send(Heartbeat())
    assert sender.flush(), "a host may be away for days"


def test_a_peer_that_has_gone_is_told_behind_its_last_words(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].sendall(bytes_of(*MESSAGES) + b"\0\0")
    ends[0].close()
    receiver = wire_of(ends[1])
    assert receiver.receive() == MESSAGES
    assert isinstance(receiver.failure, LinkClosedError)
    receiver.send(Heartbeat())  # nobody hears it


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\1{",
        bytes_of(Ended(number=1, exit_code=0)),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\x0d" + b'{"type":"\xc3("}',
        b"\0\0\xea\x65" + b'{"x":' + 60_000 * b"[",
    ],
    ids=["length", "json", "other way", "http", "text", "depth"],
)
def test_r15_who_speaks_otherwise_is_given_up(
    ends: tuple[socket.socket, socket.socket], garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_wire, "MAX_MESSAGE_BYTES", 1 << 20)
    receiver = wire_of(ends[1])
    ends[0].sendall(bytes_of(*MESSAGES) + garbage)
    assert receiver.receive() == MESSAGES
    assert isinstance(receiver.failure, ProtocolError)
    assert receiver.failure.remedy
    assert receiver.receive() == []


class EndlessPeer:
    """A connection over which a peer sends without end; up to 64 MiB, so that a test ends."""

    def __init__(self, data: bytes) -> None:
        self.num_read = 0
        self._data = data

    def setblocking(self, flag: bool) -> None: ...

    def recv(self, size: int) -> bytes:
        if self.num_read >= 64 << 20:
            raise BlockingIOError
        begin = self.num_read % len(self._data)
        piece = (self._data * (2 + size // len(self._data)))[begin : begin + size]
        self.num_read += len(piece)
        return piece


def test_r15_a_peer_that_sends_without_end_does_not_hold_the_receiver_up() -> None:
    peer = EndlessPeer(bytes_of(Heartbeat()))
    receiver = wire_of(peer)  # type: ignore[arg-type]  # as much of a socket as it takes
    assert receiver.receive()
    assert peer.num_read <= agent_wire.RECEIVE_BYTES + (1 << 16)
    assert receiver.failure is None
    assert receiver.receive(), "the rest comes with the next calls"


def test_r15_a_message_that_is_too_long_is_refused_before_it_has_come() -> None:
    peer = EndlessPeer((1 << 24).to_bytes(4, "big") + bytes(60))
    receiver: AgentWire[ToAgent] = AgentWire(peer, ToAgent, max_bytes=1 << 16)  # type: ignore[arg-type]
    assert receiver.receive() == []
    assert isinstance(receiver.failure, ProtocolError)
    assert peer.num_read <= 1 << 16


def test_r15_an_unknown_word_of_a_peer_cannot_steer_a_terminal(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    word = b'{"type":"\\u001b[2J"}'
    ends[0].sendall(len(word).to_bytes(4, "big") + word)
    receiver = wire_of(ends[1])
    receiver.receive()
    assert receiver.failure is not None
    assert receiver.failure.message.isprintable()


def test_a_closed_wire_has_no_descriptor(ends: tuple[socket.socket, socket.socket]) -> None:
    wire = wire_of(ends[0])
    wire.close()
    wire.close()
    assert wire.fileno() == -1
    assert wire.receive() == []
