"""Which kind of connection two hosts agree on, and who owns what of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from penstock.errors import PeerError
from penstock.hosts.connections import Connection, Place
from penstock.hosts.connections import connect as connect_places
from penstock.hosts.local import LocalHost
from penstock.hosts.network.routes import Route
from penstock.hosts.rank_host import BulkNeed, ChannelNeed, LinkNeed, MeetingNeed, Need, PlanNeed, RankHost
from penstock.process.config import HostLink
from penstock.process.endpoints import MeetingHandle, RingHandle, SocketHandle, SocketListener
from stand_in_hosts import StandInHost

LINK = LinkNeed(frame_bytes=64, num_frames=2)
MakeHost = Callable[..., StandInHost]


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    made: list[StandInHost] = []

    def make(name: str, *kinds: str) -> StandInHost:
        made.append(StandInHost(name, *kinds))
        return made[-1]

    yield make
    for host in made:
        host.close()


def connect(need: Need, *hosts: RankHost) -> Connection:
    """Of processes `rank-0` and so on at these hosts, in epoch 5; the first accepts."""
    places = [Place(host, f"rank-{number}") for number, host in enumerate(hosts)]
    return connect_places(need, 5, *places)


def test_the_accepting_hosts_first_choice_that_the_other_offers_is_taken(make_host: MakeHost) -> None:
    attic, cellar = make_host("attic", "wire", "tcp", "pigeon"), make_host("cellar", "pigeon", "tcp")
    connection = connect(LINK, attic, cellar)
    assert [kind for kind, _ in (*attic.made, *cellar.made)] == ["tcp", "tcp"]
    assert connection.joining == [connection.accepting], "the invitation of the accepting end"


def test_hosts_without_a_common_kind_are_refused_by_name(make_host: MakeHost) -> None:
    attic, cellar = make_host("attic", "wire"), make_host("cellar")
    with pytest.raises(PeerError) as caught:
        connect(LINK, attic, cellar)
    words = "between attic and cellar: attic offers wire to cellar; cellar offers none to attic."
    assert words in caught.value.message
    assert caught.value.remedy
    assert attic.made == cellar.made == []


def test_a_refusal_names_each_offer_once(make_host: MakeHost) -> None:
    attic, cellar, shed = (
        make_host("attic", "wire"),
        make_host("cellar", "wire", "tcp"),
        make_host("shed", "tcp"),
    )
    with pytest.raises(PeerError) as caught:
        connect(MeetingNeed(num_ranks=5), attic, cellar, cellar, shed, shed)
    assert caught.value.message.endswith(
        "between attic and cellar, shed: attic offers wire to cellar; attic offers wire to shed; "
        "cellar offers wire, tcp to attic; shed offers tcp to attic."
    )


def test_a_ring_does_not_reach_another_host(make_host: MakeHost) -> None:
    with pytest.raises(PeerError, match="this host offers none"):
        connect(LINK, LocalHost(), make_host("cellar", "ring"))


def test_what_was_accepted_is_closed_when_a_host_cannot_join(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    attic, cellar = make_host("attic", "tcp"), make_host("cellar", "tcp")

    def fail(*given: object) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(cellar, "join", fail)
    with pytest.raises(OSError, match="no descriptors"):
        connect(MeetingNeed(num_ranks=3), attic, attic, cellar)
    assert [end.happened for _, end in attic.made] == [["close"], ["close"]]


class Way:
    """A way on which one host can be reached. Implements `Routes`."""

    def __init__(self, listener: str) -> None:
        self.listener = listener

    def between(self, accepting: str, joining: str) -> Route:
        return Route(
            listener=self.listener, listen_address="fe80::1", dial_address="fe80::1%eth7", dial_from="fe80::2"
        )

    def links(self) -> list[HostLink]:
        return []

    def is_settled(self, names: object) -> bool:
        """It is known."""
        return True

    def review(self, occasion: object, names: object) -> bool:
        """It stays."""
        return True


def test_g1_a_connection_takes_the_way_that_is_known(make_host: MakeHost) -> None:
    attic, cellar = make_host("attic", "tcp"), make_host("cellar", "tcp")
    places = [Place(attic, "rank-0"), Place(cellar, "rank-1")]
    connect_places(LINK, 5, *places, routes=Way("attic"))
    (listening,), (dialling,) = attic.parties, cellar.parties
    assert (listening.address, listening.peer_address, listening.is_swapped) == ("fe80::1", "", False)
    assert (dialling.address, dialling.peer_address, dialling.is_swapped) == (
        "fe80::2",
        "fe80::1%eth7",
        False,
    )


def test_g1_a_host_that_cannot_be_reached_dials_though_it_should_accept(make_host: MakeHost) -> None:
    attic, cellar = make_host("attic", "tcp"), make_host("cellar", "tcp")
    places = [Place(attic, "rank-0"), Place(cellar, "rank-1")]
    connection = connect_places(LINK, 5, *places, routes=Way("cellar"))
    (dialling,), (listening,) = attic.parties, cellar.parties
    assert (listening.address, listening.is_swapped, listening.peer) == ("fe80::1", True, "rank-0")
    assert (dialling.address, dialling.peer_address, dialling.is_swapped) == ("fe80::2", "fe80::1%eth7", True)
    ((_, accepted),), ((_, invited),) = attic.made, cellar.made
    assert accepted.endpoint == invited.invitation, "attic joins what cellar has accepted"
    connection.end()
    assert accepted.happened == invited.happened == ["end"]


def test_g1_what_a_reached_host_has_made_is_closed_when_the_other_cannot_dial(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    attic, cellar = make_host("attic", "tcp"), make_host("cellar", "tcp")

    def fail(*given: object) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(attic, "join", fail)
    with pytest.raises(OSError, match="no descriptors"):
        connect_places(LINK, 5, Place(attic, "rank-0"), Place(cellar, "rank-1"), routes=Way("cellar"))
    assert [end.happened for _, end in cellar.made] == [["close"]]


def test_within_a_host_no_way_matters(make_host: MakeHost) -> None:
    attic = make_host("attic", "ring")
    connect_places(LINK, 5, Place(attic, "rank-0"), Place(attic, "rank-1"), routes=Way("attic"))
    assert {(parties.address, parties.is_swapped) for parties in attic.parties} == {("", False)}


@pytest.mark.parametrize(
    ("need", "kinds"),
    [
        (LINK, (RingHandle, RingHandle)),
        (ChannelNeed(num_messages=2, num_rows=2), (RingHandle, RingHandle)),
        (BulkNeed(), (RingHandle, RingHandle)),
        (PlanNeed(), (SocketListener, SocketHandle)),
        (MeetingNeed(num_ranks=2), (MeetingHandle, MeetingHandle)),
    ],
)
@pytest.mark.parametrize("last", ["end", "close"])
def test_r6_a_local_connection_leaves_no_descriptor(need: Need, kinds: tuple[type, type], last: str) -> None:
    host, before = LocalHost(), set(os.listdir("/proc/self/fd"))
    connection = connect(need, host, host)
    assert (type(connection.accepting), type(connection.joining[0])) == kinds
    connection.delivered()
    getattr(connection, last)()
    assert set(os.listdir("/proc/self/fd")) == before
