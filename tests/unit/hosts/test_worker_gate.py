"""Where workers come in: with a certificate and a first word, and not otherwise."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusters import HEAD_HOST, VERSION, Cluster
from fakes import FakeClock
from penstock.errors import CertificateError, JoinError, PeerError, ProtocolError, WrongClusterError
from penstock.hosts import agent_wire, worker_gate
from penstock.hosts.agent_messages import AgentHello, AskResources, Heartbeat, ToAgent
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.resources import HostResources
from penstock.hosts.worker_gate import JoinedWorker, WorkerGate
from penstock.trust import tls
from penstock.trust.joining import Address, connect_for_weights, join_with_token, rejoin
from penstock.trust.worker_door import worker_door

WAIT_S = 30.0
HELLO = AgentHello(resources=HostResources(num_cpus=2, free_bytes=1, num_gpus=0, name="desk"), kinds=["tls"])


class Gate:
    def __init__(self, directory: Path) -> None:
        self.cluster, self._directory = Cluster(directory / "head"), directory
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = listener.getsockname()

        def make_door(on_refused: Any) -> Any:
            cluster = self.cluster
            return worker_door(
                listener, cluster.identity, cluster.book, cluster.connected, HEAD_HOST, VERSION, on_refused
            )

        self.fetching: queue.SimpleQueue[tuple[socket.socket, str]] = queue.SimpleQueue()
        self.clock = FakeClock()
        self.gate = WorkerGate(
            make_door,
            self.cluster.connected,
            lambda *given: self.fetching.put(given),
            clock=self.clock,
        )

    def join(self) -> AgentWire[ToAgent]:
        """Let `desk` join, as far as its first word."""
        path = self._directory / "desk"
        self.credentials = join_with_token(
            self.address, self.cluster.token, host="desk", version=VERSION, path=path
        )
        head = rejoin(self.address, self.credentials, version=VERSION, path=path)
        self.head = head.name
        return AgentWire(head.connection, ToAgent)

    def fetch(self) -> socket.socket:
        """Open a connection for weights, as `desk`."""
        return connect_for_weights(self.address, self.credentials, self.head)

    def close(self) -> None:
        """Close the gate, and the connections for weights that a test has not taken."""
        self.gate.close()
        while not self.fetching.empty():
            connection, _ = self.fetching.get()
            connection.close()

    def await_news(self) -> None:
        assert select.select([self.gate], [], [], WAIT_S)[0]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.close()


def test_g1_a_worker_that_has_said_hello_is_handed_over_with_its_wire(gate: Gate) -> None:
    wire = gate.join()
    wire.send(HELLO)
    gate.await_news()
    (joined,) = gate.gate.take()
    assert isinstance(joined, JoinedWorker)
    assert (joined.host, joined.hello, joined.local_address) == ("desk", HELLO, "127.0.0.1")
    joined.wire.send(AskResources())
    while not (received := wire.receive()):
        select.select([wire], [], [], WAIT_S)
    assert received == [AskResources()]
    assert gate.gate.take() == []
    joined.wire.close()
    wire.close()


@pytest.mark.parametrize("says", ["another word", "nothing", "it leaves"])
def test_g1_who_does_not_say_hello_is_sent_away_and_may_come_back(
    gate: Gate, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_gate, "HELLO_S", 0.0 if says == "nothing" else WAIT_S)
    wire = gate.join()
    if says == "another word":
        wire.send(Heartbeat())
    elif says == "it leaves":
        wire.close()
    gate.await_news()
    assert gate.gate.take() == []
    ((address, error),) = gate.gate.take_refused()
    assert address.startswith("127.0.0.1:")
    assert error.message
    gate.cluster.connected.enter("desk")  # the name is free again
    wire.close()


def test_r15_strangers_are_reported_and_nobody_is_handed_over(gate: Gate) -> None:
    with socket.create_connection(gate.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        gate.await_news()
    assert gate.gate.take() == []
    ((_, error),) = gate.gate.take_refused()
    assert "does not speak TLS" in error.message


def test_g1_a_worker_that_has_joined_opens_connections_for_weights_beside_its_wire(gate: Gate) -> None:
    wire = gate.join()
    with gate.fetch() as ours:
        theirs, host = gate.fetching.get(timeout=WAIT_S)
        assert host == "desk"
        theirs.settimeout(WAIT_S)
        ours.sendall(b"names")
        assert theirs.recv(5) == b"names"
        theirs.close()
    assert gate.gate.take() == []
    wire.close()


@pytest.mark.parametrize(
    ("why", "error"),
    [
        ("it has left", JoinError),
        ("it is revoked", CertificateError),
        ("it is a rank", ProtocolError),
        ("it is of another cluster", WrongClusterError),
    ],
)
def test_r15_nobody_else_gets_weights(gate: Gate, tmp_path: Path, why: str, error: type[PeerError]) -> None:
    wire = gate.join()
    if why == "it has left":
        gate.gate.leave("desk")
    elif why == "it is revoked":
        gate.cluster.book.revoke_host("desk")
    elif why == "it is a rank":
        gate.credentials = gate.cluster.link_credentials("desk", "rank-1", 3)
    else:
        other = Cluster(tmp_path / "other").joined()
        gate.credentials = msgspec.structs.replace(other, authority_pem=gate.credentials.authority_pem)
    with pytest.raises(PeerError):
        gate.fetch().close()
    gate.await_news()
    ((_, refused),) = gate.gate.take_refused()
    assert type(refused) is error
    assert gate.fetching.empty()
    wire.close()


def test_r15_a_worker_gives_no_name_of_a_tensor_to_another_head(gate: Gate) -> None:
    gate.join().close()
    gate.head = gate.cluster.name("desk")
    with pytest.raises(CertificateError, match="the peer is head of tower"):
        gate.fetch()


def test_a_head_that_knows_nothing_of_weights_is_told_apart(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = gate.join()
    monkeypatch.setattr(tls, "WEIGHTS_PROTOCOL", "penstock-weights/9")
    with pytest.raises(ProtocolError, match="does not serve weights") as caught:
        gate.fetch()
    assert caught.value.code == "no_weights"
    wire.close()


def test_r15_of_many_strangers_some_are_reported_and_of_the_others_the_number(gate: Gate) -> None:
    num_strangers = worker_gate.REFUSED_AT_ONCE + 5
    for _ in range(num_strangers):
        with socket.create_connection(gate.address, timeout=WAIT_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1 << 10):
                    pass
    assert len(gate.gate.take_refused()) == worker_gate.REFUSED_AT_ONCE
    assert gate.gate.take_left_out() == 0, "that is said once a second"
    gate.gate.take()
    gate.clock.advance(1.0)
    gate.await_news()
    assert gate.gate.take_left_out() == 5
    assert gate.gate.take_refused() == []


def test_r15_a_connection_that_cannot_be_served_does_not_end_the_gate(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = gate.join()

    def give(connection: socket.socket, host: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(gate.gate, "_give_weights", give)
    with gate.fetch() as ours:
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"", "it is closed"
    gate.await_news()
    ((_, error),) = gate.gate.take_refused()
    assert "the head cannot serve it: RuntimeError: can't start new thread" in error.message
    gate.gate.take()
    wire.send(HELLO)
    gate.await_news()
    (joined,) = gate.gate.take()
    assert joined.host == "desk"
    joined.wire.close()
    wire.close()


def test_r15_a_worker_whose_connection_cannot_be_served_may_come_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(host: str, connection: socket.socket, address: str) -> None:
        raise MemoryError

    monkeypatch.setattr(gate.gate, "_begin", begin)
    wire = gate.join()
    gate.await_news()
    assert len(gate.gate.take_refused()) == 1
    gate.cluster.connected.enter("desk")  # the name is free again
    wire.close()


def test_r15_a_first_word_has_a_bounded_length(gate: Gate) -> None:
    wire = gate.join()
    wire.send(msgspec.structs.replace(HELLO, talk="t" * 100_000))
    gate.await_news()
    assert gate.gate.take() == []
    ((_, error),) = gate.gate.take_refused()
    assert f"more than {agent_wire.MAX_HELLO_BYTES}" in error.message
    wire.close()


def test_g1_bytes_that_tls_keeps_are_received_with_the_others(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = gate.join()
    wire.send(HELLO)
    gate.await_news()
    (joined,) = gate.gate.take()
    monkeypatch.setattr(agent_wire, "RECEIVE_BYTES", 1)
    monkeypatch.setattr(agent_wire, "_READ_BYTES", 4)
    joined.wire.send(AskResources())  # one record: what is left of it makes no descriptor readable
    assert select.select([wire], [], [], WAIT_S)[0]
    received: list[object] = wire.receive()
    while not received and select.select([wire], [], [], 0.0)[0]:
        received = wire.receive()  # a record of TLS itself came first
    assert received == [AskResources()]
    joined.wire.close()
    wire.close()
