"""Where workers come in: with a certificate and a first word, and not otherwise."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import HEAD_HOST, VERSION, Cluster
from penstock.hosts import worker_gate
from penstock.hosts.agent_messages import AgentHello, AskResources, Heartbeat, ToAgent
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.resources import HostResources
from penstock.hosts.worker_gate import JoinedWorker, WorkerGate
from penstock.trust.joining import Address, join_with_token, rejoin
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

        self.gate = WorkerGate(make_door, self.cluster.connected)

    def join(self) -> AgentWire[ToAgent]:
        """Let `desk` join, as far as its first word."""
        path = self._directory / "desk"
        credentials = join_with_token(
            self.address, self.cluster.token, host="desk", version=VERSION, path=path
        )
        head = rejoin(self.address, credentials, version=VERSION, path=path)
        return AgentWire(head.connection, ToAgent)

    def await_news(self) -> None:
        assert select.select([self.gate], [], [], WAIT_S)[0]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.gate.close()


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
