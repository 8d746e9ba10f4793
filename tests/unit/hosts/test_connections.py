"""Which kind of connection two hosts agree on, and who owns what of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from penstock.errors import PeerError
from penstock.hosts.connections import Connection, Place
from penstock.hosts.connections import connect as connect_places
from penstock.hosts.local import LocalHost
from penstock.hosts.rank_host import ChannelNeed, LinkNeed, MeetingNeed, Need, PlanNeed, RankHost
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
    with pytest.raises(PeerError, match="attic and cellar: attic offers wire; cellar offers none") as caught:
        connect(LINK, attic, cellar)
    assert caught.value.remedy
    assert attic.made == cellar.made == []


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


@pytest.mark.parametrize(
    ("need", "kinds"),
    [
        (LINK, (RingHandle, RingHandle)),
        (ChannelNeed(num_messages=2, num_rows=2), (RingHandle, RingHandle)),
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
