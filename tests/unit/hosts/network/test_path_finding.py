"""The best way between two hosts is found once, kept and used, and spoken of when it falls away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import LinkClosedError
from penstock.hosts.network.interfaces import AddressPair, HostAddress, Medium
from penstock.hosts.network.link_choice import MeasuredPair
from penstock.hosts.network.link_measuring import MEASURING_S, StreamSpeed
from penstock.hosts.network.measuring_door import ListeningPlace
from penstock.hosts.network.path_finding import PathFinder, pairs_to_connect
from penstock.hosts.network.routes import DEFAULT_ROUTES, Route
from penstock.hosts.network.scout import Dead, Listening, Survey, WayToTry
from penstock.trust.peer_names import AGENT_ROLE, PeerName

MBIT = 1e6 / 8


def address(interface: str, text: str, medium: Medium = Medium.WIRED) -> HostAddress:
    return HostAddress(address=text, prefix=24, interface=interface, medium=medium, mtu=1500)


class World:
    """What wires can do: their speed in Mbit/s by the address that is dialled; 0 and none: no answer."""

    def __init__(self) -> None:
        self.mbit: dict[str, float] = {}
        self.seconds: list[float] = []  # of each way that was tried, in order


class StandInScout:
    """A host with interfaces, whose wires are numbers. Implements `Scout`."""

    def __init__(self, world: World, host: str, *addresses: HostAddress) -> None:
        self.host = host
        self.addresses = list(addresses)
        self.only = ""
        self.is_there = True
        self.happened: list[str] = []
        self._world = world

    @property
    def peer(self) -> PeerName:
        return PeerName(cluster="0" * 32, host=self.host, role=AGENT_ROLE)

    def listen(self, peer: PeerName) -> Listening:
        if not self.is_there:
            raise LinkClosedError(f"the host {self.host} is lost.")
        self.happened.append(f"listens for {peer.host}")
        places = [ListeningPlace(one, 7701 + number) for number, one in enumerate(self.addresses)]
        return Listening(places=places, only=self.only)

    def survey(self, peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        found = Survey(open=[], dead=[])
        for way in ways:
            self._world.seconds.append(way.seconds)
            pair = way.targets[0].pair
            mbit = self._world.mbit.get(pair.other.address, 0.0)
            if mbit:
                measured = mbit if way.seconds else 0.001  # what is seen in passing means nothing
                found.open.append(MeasuredPair(pair=pair, speed=speed(measured), mtu=1500, measured_at=1.7e9))
            else:
                found.dead.append(Dead(pair, "no answer"))
        return found

    def rest(self) -> None:
        self.happened.append("rests")


def speed(mbit: float) -> StreamSpeed:
    return StreamSpeed(round_trip_s=0.0002, bytes_per_s_out=mbit * MBIT, bytes_per_s_in=2 * mbit * MBIT)


class Hosts:
    """Two hosts with a cable and Wi-Fi, and the head that looks for ways between them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "ways"
        self.world = World()
        self.desk = StandInScout(
            self.world, "desk", address("eth0", "10.0.0.1"), address("wlan0", "10.0.1.1", Medium.WIRELESS)
        )
        self.tower = StandInScout(
            self.world, "tower", address("enp3", "10.0.0.2"), address("wlp4", "10.0.1.2", Medium.WIRELESS)
        )
        self.set_speeds(940, 87)
        self.told: list[str] = []
        self.restart()

    def set_speeds(self, cable: float, wireless: float) -> None:
        """In both directions; 0: nobody answers."""
        for host in ("1", "2"):
            self.world.mbit |= {f"10.0.0.{host}": cable, f"10.0.1.{host}": wireless}

    def find(self) -> list[str]:
        """Look for ways; what was told."""
        self.told.clear()
        self.world.seconds.clear()
        self.finder.find(self.tower, self.desk)
        return list(self.told)

    def restart(self) -> None:
        """The head begins anew, with what it has kept."""
        self.finder = PathFinder(
            self.directory, self.told.append, lambda text: self.told.append(f"warning: {text}")
        )


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_g1_the_fastest_way_is_used_and_one_line_says_which(hosts: Hosts) -> None:
    assert hosts.find() == [
        "links between desk and tower use eth0 (10.0.0.1) to enp3 (10.0.0.2): "
        "1.9 Gbit/s there, 940 Mbit/s back, round trip 0.20 ms"
    ]
    assert hosts.finder.between("tower", "desk") == Route(
        listener="tower", listen_address="10.0.0.2", dial_address="10.0.0.2", dial_from="10.0.0.1"
    )
    assert hosts.finder.between("desk", "tower") == Route(
        listener="desk", listen_address="10.0.0.1", dial_address="10.0.0.1", dial_from="10.0.0.2"
    )
    (link,) = hosts.finder.links()
    assert (link.hosts, link.interfaces) == (("desk", "tower"), ("eth0", "enp3"))
    assert (link.bytes_per_s("desk"), link.bytes_per_s("tower")) == (1880 * MBIT, 940 * MBIT)


def test_g1_all_ways_of_two_hosts_are_measured_in_a_second_together(hosts: Hosts) -> None:
    hosts.find()
    assert hosts.world.seconds == [0.0] * 4 + [MEASURING_S / 2] * 2, "tried both ways, and then measured"
    assert hosts.desk.happened == ["listens for tower", "rests"]
    assert hosts.tower.happened == ["listens for desk", "rests"]


def test_g1_a_way_that_leads_nowhere_takes_no_time_from_the_others(hosts: Hosts) -> None:
    hosts.set_speeds(940, 0)
    hosts.find()
    assert hosts.world.seconds == [0.0] * 4 + [MEASURING_S]


def test_g1_a_way_that_cannot_be_measured_is_not_used(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = hosts.tower.survey

    def weak(peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        found = survey(peer, ways)
        return Survey(open=[one for one in found.open if not any(way.seconds for way in ways)], dead=[])

    monkeypatch.setattr(hosts.tower, "survey", weak)
    (warning,) = hosts.find()
    assert "no path for links" in warning


def test_g1_what_was_measured_is_kept_and_ways_are_only_tried(hosts: Hosts) -> None:
    first = hosts.find()
    hosts.restart()
    assert hosts.find() == first
    assert set(hosts.world.seconds) == {0.0}


def test_g1_a_new_address_of_an_interface_is_not_a_new_way(hosts: Hosts) -> None:
    hosts.find()
    hosts.desk.addresses[0] = address("eth0", "10.0.0.7")
    hosts.world.mbit["10.0.0.7"] = 940
    hosts.restart()
    assert "use eth0 (10.0.0.7) to enp3 (10.0.0.2): 1.9 Gbit/s" in hosts.find()[0]
    assert set(hosts.world.seconds) == {0.0}


def test_g1_hosts_are_measured_anew_when_their_interfaces_change(hosts: Hosts) -> None:
    hosts.find()
    hosts.desk.addresses.append(address("eth1", "10.0.2.1"))
    hosts.tower.addresses.append(address("enp5", "10.0.2.2"))
    hosts.world.mbit |= {"10.0.2.1": 9400, "10.0.2.2": 9400}
    hosts.restart()
    assert "use eth1" in hosts.find()[0]
    assert hosts.world.seconds == [0.0] * 6 + [MEASURING_S / 3] * 3


def test_g1_a_way_that_leads_somewhere_again_is_measured(hosts: Hosts) -> None:
    hosts.set_speeds(0, 87)
    assert "use wlan0" in hosts.find()[0]
    hosts.set_speeds(940, 87)
    assert "use eth0" in hosts.find()[0]
    assert MEASURING_S / 2 in hosts.world.seconds


def test_g1_the_path_falls_back_with_a_warning_once(hosts: Hosts) -> None:
    hosts.find()
    hosts.set_speeds(0, 87)
    line, warning = hosts.find()
    assert "use wlan0" in line
    assert "87 Mbit/s back" in line, "as it was measured before"
    assert warning.startswith("warning: The best path to the other host fails (no answer): eth0")
    assert hosts.finder.between("tower", "desk").dial_address == "10.0.1.2"
    assert hosts.find() == []
    hosts.finder.review(["desk", "tower"])
    assert hosts.told == []
    hosts.set_speeds(940, 87)
    hosts.finder.review(["tower", "shelf"])
    assert hosts.told == [], "it is not one of these"
    hosts.finder.review(["desk", "tower", "shelf"])
    assert "use eth0" in hosts.told[0]


def test_g1_a_way_whose_interface_has_gone_is_named(hosts: Hosts) -> None:
    hosts.find()
    del hosts.desk.addresses[0]
    line, warning = hosts.find()
    assert "use wlan0" in line
    assert "fails (an interface has lost its address or carrier): eth0" in warning


def test_g1_a_host_that_has_no_port_leaves_the_other_one_at_rest(hosts: Hosts) -> None:
    hosts.tower.is_there = False
    assert "were not searched" in hosts.find()[0]
    assert hosts.desk.happened == ["listens for tower", "rests"]


def test_g1_a_host_that_cannot_be_reached_dials(hosts: Hosts) -> None:
    del hosts.world.mbit["10.0.0.1"], hosts.world.mbit["10.0.1.1"]
    line, warning = hosts.find()
    assert "use eth0" in line
    assert warning == (
        "warning: desk cannot be reached on this path, so it opens the links itself. To allow links to it, "
        "open its --link-ports in its firewall."
    )
    both = Route(listener="tower", listen_address="10.0.0.2", dial_address="10.0.0.2", dial_from="10.0.0.1")
    assert hosts.finder.between("tower", "desk") == hosts.finder.between("desk", "tower") == both


def test_g1_a_way_that_leads_from_the_other_host_alone_is_measured_from_there(hosts: Hosts) -> None:
    del hosts.world.mbit["10.0.0.1"], hosts.world.mbit["10.0.1.1"]
    hosts.desk.host, hosts.tower.host = "zebra", "tower"  # the order of names is the other one
    line, _ = hosts.find()
    assert "between tower and zebra use enp3 (10.0.0.2) to eth0 (10.0.0.1): 1.9 Gbit/s there" in line
    assert hosts.finder.between("zebra", "tower").listener == "tower"


def test_g1_a_fixed_address_is_used_and_a_faster_way_does_not_stand_idle_in_silence(hosts: Hosts) -> None:
    hosts.desk.only = "10.0.1.1"
    line, warning = hosts.find()
    assert "use wlan0" in line
    assert "A faster path to the other host is idle: eth0 (10.0.0.1)" in warning
    hosts.set_speeds(940, 0)
    (warning,) = hosts.find()
    assert "no path for links between desk and tower was found" in warning
    assert "--address rules out eth0 (10.0.0.1) to enp3 (10.0.0.2), 940 Mbit/s" in warning
    assert hosts.finder.between("tower", "desk") == Route(listener="tower")


def test_g1_hosts_without_a_way_are_told_what_was_tried(hosts: Hosts) -> None:
    hosts.set_speeds(0, 0)
    (warning,) = hosts.find()
    assert "was found (eth0 (10.0.0.1) to enp3 (10.0.0.2): no answer; wlan0" in warning
    assert "--link-ports" in warning
    hosts.desk.addresses = [address("eth0", "fd00::1")]
    (warning,) = hosts.find()
    assert "they have no addresses in a common network" in warning


def test_g1_a_way_that_has_become_slow_is_named_when_it_is_measured_anew(hosts: Hosts) -> None:
    hosts.find()
    hosts.desk.addresses.append(address("eth1", "10.0.2.1"))
    hosts.tower.addresses.append(address("enp5", "10.0.2.2"))
    hosts.set_speeds(94, 87)
    told = hosts.find()
    assert any("carries 94 Mbit/s instead of the measured 940 Mbit/s" in line for line in told)


def test_g1_a_host_that_is_lost_meanwhile_is_said(hosts: Hosts) -> None:
    hosts.find()
    hosts.desk.is_there = False
    assert hosts.find() == ["the paths between desk and tower were not searched: the host desk is lost."]
    assert hosts.finder.between("tower", "desk").dial_address == "10.0.0.2", "what is known stays"


def test_hosts_that_nobody_has_looked_at_listen_as_they_are_asked(hosts: Hosts) -> None:
    assert hosts.finder.between("tower", "attic") == DEFAULT_ROUTES.between("tower", "attic")
    assert DEFAULT_ROUTES.links() == []
    assert DEFAULT_ROUTES.is_settled(["tower", "attic"])
    assert DEFAULT_ROUTES.review(1, ["tower", "attic"])


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        ("h", []),
        ("ha", ["ha"]),
        ("hab", ["ha", "hb", "ab"]),
        ("habcd", ["ha", "hb", "hc", "hd", "ab", "ac", "ad", "bc", "bd", "cd"]),
    ],
)
def test_ways_are_looked_for_where_the_pipe_may_have_connections(names: str, pairs: list[str]) -> None:
    """Without b, a and c are neighbours."""
    assert ["".join(pair) for pair in pairs_to_connect(list(names))] == pairs


def test_pairs_are_the_same_from_both_ends() -> None:
    pair = AddressPair(own=address("eth0", "10.0.0.1"), other=address("eth1", "10.0.0.2"))
    measured = MeasuredPair(pair=pair, speed=speed(100))
    assert measured.flipped.pair.bind_address == "10.0.0.2"
    assert measured.flipped.speed.bytes_per_s_out == measured.speed.bytes_per_s_in
    assert measured.flipped.flipped == measured
