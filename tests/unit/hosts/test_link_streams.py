"""Streams to other hosts as a host offers them: at which address, and who dials."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from penstock.errors import PeerError
from penstock.hosts.link_streams import TLS, ProvedStreams
from penstock.hosts.rank_host import HostEnd, LinkNeed, Parties
from penstock.hosts.stream_ends import StreamInvitation
from penstock.process.endpoints import DialledStream
from penstock.process.link_ports import PortRange
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName

LINK = LinkNeed(frame_bytes=64, num_frames=2)
PARTIES = Parties(epoch=3, own="rank-1", peer="rank-0", peer_host="tower")
SECRET = Credentials(key_pem=b"key", certificate_pem=b"certificate", authority_pem=b"authority")
INVITATION = StreamInvitation(host="10.0.0.1", port=7701)


class Streams:
    """Of a host that other hosts reach at 127.0.0.1.

    Attributes:
        run_of_head: that its processes belong to.
        issued: names of processes for which credentials were made, in order.
    """

    def __init__(self) -> None:
        self.run_of_head = "0123456789abcdef"
        self.issued: list[PeerName] = []
        self._made: list[ProvedStreams] = []
        self._ends: list[HostEnd] = []

    def accept(self, parties: Parties, fixed_address: str = "") -> HostEnd:
        return self._kept(self.streams(fixed_address).accept(TLS, LINK, parties))

    def join(self, parties: Parties, fixed_address: str = "") -> HostEnd:
        return self._kept(self.streams(fixed_address).join(TLS, LINK, parties, INVITATION))

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for streams in self._made:
            streams.close()

    def _issue(self, name: PeerName) -> Credentials:
        self.issued.append(name)
        return SECRET

    def streams(self, fixed_address: str = "") -> ProvedStreams:
        streams = ProvedStreams(
            "desk",
            "0" * 32,
            lambda: self.run_of_head,
            lambda peer: "127.0.0.1",
            PortRange(0, 0),
            self._issue,
            fixed_address=fixed_address,
        )
        self._made.append(streams)
        return streams

    def _kept(self, end: HostEnd) -> HostEnd:
        self._ends.append(end)
        return end


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    made.close()


def on_way(address: str, peer_address: str = "", *, is_swapped: bool = False) -> Parties:
    return msgspec.structs.replace(PARTIES, address=address, peer_address=peer_address, is_swapped=is_swapped)


def test_g1_a_host_listens_where_the_way_leads_unless_its_user_has_fixed_an_address(streams: Streams) -> None:
    assert streams.accept(PARTIES).invitation.host == "127.0.0.1"
    assert streams.accept(on_way("127.0.0.2")).invitation.host == "127.0.0.2"
    assert streams.accept(on_way("127.0.0.2"), "127.0.0.3").invitation.host == "127.0.0.3"


def test_g1_a_host_dials_along_the_way_or_as_it_is_invited(streams: Streams) -> None:
    assert streams.join(PARTIES).endpoint.path.way == DialledStream(host="10.0.0.1", port=7701)
    along = streams.join(on_way("fe80::2%eth0", "fe80::1%eth0"))
    assert along.endpoint.path.way == DialledStream(
        host="fe80::1%eth0", port=7701, own_address="fe80::2%eth0"
    )


def test_g1_frames_flow_against_the_dialling_where_the_receiver_cannot_be_reached(streams: Streams) -> None:
    assert [end.endpoint.direction for end in (streams.accept(PARTIES), streams.join(PARTIES))] == [
        "in",
        "out",
    ]
    swapped = on_way("127.0.0.1", is_swapped=True)
    assert [end.endpoint.direction for end in (streams.accept(swapped), streams.join(swapped))] == [
        "out",
        "in",
    ]


def test_g1_an_address_that_has_gone_is_an_error_of_the_way(streams: Streams) -> None:
    with pytest.raises(PeerError, match=r"cannot listen for links at 192\.0\.2\.1"):
        streams.accept(on_way("192.0.2.1"))


def test_r15_both_ends_of_a_link_are_named_with_the_run_of_the_head(streams: Streams) -> None:
    made = streams.streams()
    for run in ("0123456789abcdef", "fedcba9876543210", "fedcba9876543210"):
        streams.run_of_head = run
        end = made.join(TLS, LINK, PARTIES, INVITATION)
        assert end.endpoint.path.security.peer == f"penstock://{'0' * 32}/host/tower/rank-0/{run}/3"
        end.close()
    assert [name.uri.rpartition("/host/")[2] for name in streams.issued] == [
        "desk/rank-1/0123456789abcdef/3",
        "desk/rank-1/fedcba9876543210/3",  # the same epoch of another run has credentials of its own
    ]
