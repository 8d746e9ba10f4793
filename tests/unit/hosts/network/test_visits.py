"""A host looks whether it could join: proved by its token or certificate, and it leaves nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import HEAD_HOST, VERSION, Cluster
from penstock.errors import (
    JoinTokenError,
    LinkClosedError,
    OtherVersionError,
    PenstockError,
    ProtocolError,
    WaitTimeoutError,
)
from penstock.hosts.agent_messages import Heartbeat, ToHead
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.network import port_check, visiting
from penstock.hosts.network.interfaces import addresses_beside
from penstock.hosts.network.scout import OwnScout
from penstock.hosts.network.visiting import VisitSettings, visit_head
from penstock.hosts.network.visits import Visits, next_word
from penstock.hosts.worker_gate import WorkerGate
from penstock.process.link_ports import PortRange
from penstock.trust.door import Door
from penstock.trust.head_join import HeadJoin
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import join_with_token
from penstock.trust.peer_names import HEAD_ROLE
from penstock.trust.worker_door import worker_door
from real_servers import free_ports


class Head:
    """A head on 127.0.0.1 that waits for workers, and receives visitors."""

    def __init__(self, directory: Path) -> None:
        self.cluster, self._directory = Cluster(directory / "head"), directory
        (first,) = free_ports(1)
        self.ports, self.own_ports = PortRange(first, first + 3), PortRange(first + 10, first + 13)
        self._listener = socket.create_server(("127.0.0.1", 0))
        visits = Visits(self._scout, self.ports)
        self.gate = WorkerGate(self._door, self.cluster.connected, receive_visitor=visits.receive)

    def visit(self, token: JoinToken | None = None) -> visiting.Visited:
        settings = VisitSettings(
            head=self._listener.getsockname(),
            name="desk",
            credentials=self._directory / "desk",
            ports=self.own_ports,
        )
        return visit_head(settings, lambda: token or self.cluster.token)

    def join(self) -> None:
        join_with_token(
            self._listener.getsockname(),
            self.cluster.token,
            host="desk",
            version=VERSION,
            path=self._directory / "desk",
        )

    def _scout(self, address: str) -> OwnScout:
        peer = self.cluster.name(HEAD_HOST, HEAD_ROLE)
        return OwnScout(peer, self.cluster.head_credentials, self.ports, lambda _: addresses_beside(address))

    def _door(self, on_refused: object) -> Door[HeadJoin]:
        cluster = self.cluster
        return worker_door(
            self._listener,
            cluster.identity,
            cluster.book,
            cluster.connected,
            HEAD_HOST,
            VERSION,
            on_refused,  # type: ignore[arg-type]
        )


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setattr(visiting, "MEASURING_S", 0.0)
    monkeypatch.setattr(visiting, "own_version", lambda: VERSION)
    monkeypatch.setattr(port_check, "MOST_PORTS", 3)
    made = Head(tmp_path)
    yield made
    made.gate.close()


def test_g1_a_visitor_sees_ways_and_ports_both_ways_and_uses_no_token_up(head: Head) -> None:
    for _ in range(2):  # the token is for one worker
        found = head.visit()
        assert (found.name, found.head_name) == ("desk", HEAD_HOST)
        assert [one.pair.own.address for one in found.to_head.open] == ["127.0.0.1"]
        assert [one.pair.own.address for one in found.from_head.open] == ["127.0.0.1"]
        assert found.head.ports
        assert set(found.head.ports) <= set(range(head.ports.first, head.ports.last + 1))
        assert set(found.own.ports) <= set(range(head.own_ports.first, head.own_ports.last + 1))
        assert found.unreached_at_head == found.unreached_here == {}
    assert head.cluster.book.hosts() == []
    head.join()
    assert head.gate.take() == []


def test_g1_a_host_that_has_joined_visits_with_its_certificate(head: Head) -> None:
    head.join()
    head.cluster.book.revoke_all_tokens()
    assert head.visit().to_head.open
    head.cluster.connected.enter("desk")  # a worker runs here, and is not disturbed
    assert head.visit().to_head.open
    head.cluster.book.revoke_host("desk")
    with pytest.raises(PenstockError, match="revoked"):
        head.visit()


def test_r15_a_visitor_without_the_token_sees_nothing(head: Head) -> None:
    with pytest.raises(JoinTokenError):
        head.visit(JoinToken.new(head.cluster.identity.public_key))
    head.join()
    (head._directory / "desk").unlink()
    with pytest.raises(JoinTokenError, match="used up"):
        head.visit()


def test_g1_a_head_of_another_version_is_named(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visiting, "own_version", lambda: "9.9.9")
    with pytest.raises(OtherVersionError, match=r"9\.9\.9"):
        head.visit()


def test_g1_the_other_side_of_a_visit_is_waited_for_and_checked() -> None:
    ours, theirs = socket.socketpair()
    wire, other = AgentWire[ToHead](ours, ToHead), AgentWire[ToHead](theirs, ToHead)
    with pytest.raises(WaitTimeoutError):
        next_word(wire, Heartbeat, 0.0)
    other.send(Heartbeat())
    with pytest.raises(ProtocolError, match="has said Heartbeat"):
        next_word(wire, str, 1e12)
    other.close()
    with pytest.raises(LinkClosedError):
        next_word(wire, Heartbeat, 1e12)
    wire.close()
