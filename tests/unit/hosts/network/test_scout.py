"""A scout listens at link ports, proves who it is, and measures what leads to another host; real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from clusters import HEAD_HOST, Cluster
from fakes import FakeClock
from penstock.errors import PortInUseError, ProtocolError, WaitTimeoutError
from penstock.hosts.network import link_measuring, scout
from penstock.hosts.network.interfaces import AddressPair, HostAddress, Medium, address_named
from penstock.hosts.network.link_measuring import StreamSpeed
from penstock.hosts.network.scout import OwnScout, Survey, Target, WayToTry
from penstock.process.link_ports import PortRange
from penstock.trust.peer_names import HEAD_ROLE

ANY_PORT = PortRange(0, 0)
LOOPBACK = address_named("127.0.0.1")


class Scouts:
    """Of the head, and of a worker of a cluster; both on this machine."""

    def __init__(self, directory: Path) -> None:
        self.cluster = Cluster(directory / "head")
        self.head = self.make(self.cluster, HEAD_HOST, HEAD_ROLE)
        self.desk = self.make(self.cluster, "desk")

    def make(
        self,
        cluster: Cluster,
        host: str,
        role: str = "agent",
        *,
        ports: PortRange = ANY_PORT,
        addresses: tuple[HostAddress, ...] = (LOOPBACK,),
        only: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> OwnScout:
        name = cluster.name(host, role)
        own = cluster.credentials(name)
        return OwnScout(name, lambda: own, ports, lambda _: addresses, only, clock)

    def survey(self, scout: OwnScout, port: int) -> Survey:
        """Let a scout try the way to the head."""
        target = Target(AddressPair(own=LOOPBACK, other=LOOPBACK), port)
        return scout.survey(self.head.peer, [WayToTry(targets=[target], seconds=0.0)])


@pytest.fixture
def scouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scouts]:
    monkeypatch.setattr(link_measuring, "LIMIT_S", 60.0)  # that a slow thread may take
    made = Scouts(tmp_path)
    yield made
    made.head.rest()
    made.desk.rest()


def test_g1_a_way_to_a_host_that_listens_is_measured(scouts: Scouts) -> None:
    (place,) = scouts.head.listen(scouts.desk.peer).places
    assert place.address == LOOPBACK
    for _ in range(2):  # as often as one likes, until it rests
        found = scouts.survey(scouts.desk, place.port)
        assert found.dead == []
        (way,) = found.open
        assert way.speed.round_trip_s > 0
        assert way.mtu >= 16_000
    scouts.head.rest()
    (dead,) = scouts.survey(scouts.desk, place.port).dead
    assert dead.why == "connection refused"


def test_r15_another_host_than_the_expected_one_measures_nothing(scouts: Scouts, tmp_path: Path) -> None:
    (place,) = scouts.head.listen(scouts.desk.peer).places
    for cluster, host in ((scouts.cluster, "attic"), (Cluster(tmp_path / "another"), "desk")):
        stranger = scouts.make(cluster, host)
        peer = msgspec.structs.replace(scouts.head.peer, cluster=cluster.identity.name)
        target = Target(AddressPair(own=LOOPBACK, other=LOOPBACK), place.port)
        found = stranger.survey(peer, [WayToTry(targets=[target], seconds=0.0)])
        assert found.open == []
        assert found.dead[0].why
    assert len(scouts.survey(scouts.desk, place.port).open) == 1


def test_r15_a_host_that_passes_for_another_is_not_measured(scouts: Scouts) -> None:
    attic = scouts.make(scouts.cluster, "attic")
    (place,) = attic.listen(scouts.desk.peer).places
    found = scouts.survey(scouts.desk, place.port)  # which should lead to the head
    assert "the peer is agent of attic, where head of tower was expected" in found.dead[0].why
    attic.rest()


def test_r15_a_scout_knows_no_other_cluster(scouts: Scouts) -> None:
    other = msgspec.structs.replace(scouts.head.peer, cluster="f" * 32)
    with pytest.raises(ProtocolError, match="of one cluster"):
        scouts.desk.listen(other)
    with pytest.raises(ProtocolError, match="of one cluster"):
        scouts.desk.survey(other, [])


def test_g1_the_first_address_of_a_way_that_answers_counts(scouts: Scouts) -> None:
    (place,) = scouts.head.listen(scouts.desk.peer).places
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    pair = AddressPair(own=LOOPBACK, other=LOOPBACK)
    targets = [Target(pair, closed), Target(pair, place.port)]
    found = scouts.desk.survey(scouts.head.peer, [WayToTry(targets=targets, seconds=0.0)])
    assert (len(found.open), found.dead) == (1, [])


def test_g1_ways_that_carry_next_to_nothing_cost_a_good_one_behind_them_nothing(
    scouts: Scouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three ways has three addresses; the first that cannot be measured speaks for its wire."""
    clock, speed = FakeClock(), StreamSpeed(round_trip_s=1e-3, bytes_per_s_out=1e9, bytes_per_s_in=1e9)
    num_stalled = iter(range(3))

    def measure(stream: object, clock_of_scout: object, seconds: float) -> StreamSpeed:
        if next(num_stalled, None) is None:
            return speed
        clock.advance(link_measuring.LIMIT_S)
        raise WaitTimeoutError("Measuring the connection did not end.")

    monkeypatch.setattr(link_measuring, "LIMIT_S", 2.0)
    monkeypatch.setattr(scout, "measure_stream", measure)
    head = scouts.make(scouts.cluster, HEAD_HOST, HEAD_ROLE, clock=clock)
    desk = scouts.make(scouts.cluster, "desk", clock=clock)
    (place,) = head.listen(desk.peer).places
    targets = [Target(AddressPair(own=LOOPBACK, other=LOOPBACK), place.port)] * 3
    found = desk.survey(head.peer, [WayToTry(targets=targets, seconds=1.0)] * 4)
    head.rest()
    assert [one.speed for one in found.open] == [speed]
    assert len(found.dead) == 3


def test_g1_a_host_that_is_measured_is_free_again_before_the_next_way_is_given_up() -> None:
    """On a way that loses large packets the end of the connection does not arrive either."""
    assert link_measuring.ANSWERING_S - link_measuring.LIMIT_S < scout.MEET_S


def test_g1_of_the_interface_with_the_fixed_address_no_other_is_used(scouts: Scouts) -> None:
    another = HostAddress(address="127.0.0.2", prefix=8, interface="lo", medium=Medium.LOOPBACK, mtu=65536)
    fixed = scouts.make(scouts.cluster, "attic", addresses=(LOOPBACK, another), only="127.0.0.2")
    listening = fixed.listen(scouts.desk.peer)
    fixed.rest()
    assert ([place.address for place in listening.places], listening.only) == ([another], "127.0.0.2")


def test_g1_a_host_without_a_free_port_says_so(scouts: Scouts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        full = scouts.make(scouts.cluster, "attic", ports=PortRange(port, port))
        with pytest.raises(PortInUseError, match="all ports"):
            full.listen(scouts.desk.peer)
