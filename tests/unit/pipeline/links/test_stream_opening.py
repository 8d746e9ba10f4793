"""How streams between hosts come about: who dials, who accepts, who is sent away, and what they say."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest

from carriers import ANY_PORT, Secured, challenged, plain_text, stream, tls
from fakes import FakeClock
from hand_core import Crew
from link_peers import LinkPeers
from penstock.errors import (
    CertificateError,
    JoinError,
    LinkClosedError,
    PeerError,
    ProtocolError,
    WaitTimeoutError,
)
from penstock.hosts.rank_host import PlanNeed
from penstock.hosts.remote_host import SILENCE_LIMIT_S
from penstock.hosts.stream_ends import DiallingEnd, StreamEnd, StreamInvitation
from penstock.pipeline.links import stream_opening, stream_security
from penstock.pipeline.links.channel import PolledChannel
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.pipeline.links.stream import Interruption, Stream
from penstock.process.endpoints import Certified, DialledStream, PlainText, StreamSecurity, StreamSide
from penstock.process.link_ports import listen_in_range
from penstock.process.readiness import await_readable
from penstock.trust.credentials import Credentials
from penstock.trust.door import Door, DoorLimits
from streams import channel_handle, connected_path, end_event, reset, tcp_pair

NAME = "core - stage 1"
LONG_S = 30.0


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(closing: ExitStack, *ends: StreamEnd) -> list[PolledChannel]:
    channels = [open_channel(end.endpoint, NAME) for end in ends]
    for channel in channels:
        closing.callback(channel.close)
    return channels


def failure_of(channel: PolledChannel) -> PeerError:
    with pytest.raises(PeerError, match=NAME) as caught:
        channel.recv(LONG_S)
    return caught.value


def assert_they_meet(one: PolledChannel, other: PolledChannel) -> None:
    one.send(b"plan", LONG_S)
    assert other.recv(LONG_S) == b"plan"
    other.send(b"result", LONG_S)
    assert one.recv(LONG_S) == b"result"


def has_ipv6() -> bool:
    try:
        listen_in_range("::1", ANY_PORT).close()
    except (OSError, PeerError, ValueError):
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost"])
@pytest.mark.parametrize("secured", [plain_text, challenged, tls])
@pytest.mark.parametrize("joining_dials", [True, False])
def test_g1_addresses_of_both_kinds_and_names_can_be_dialled(
    closing: ExitStack, host: str, secured: Any, joining_dials: bool
) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    ends = stream(PlanNeed(), closing, secured, host=host, joining_dials=joining_dials)
    assert_they_meet(*opened(closing, *ends))


def test_g1_a_stream_is_dialled_from_the_address_of_its_way(closing: ExitStack) -> None:
    listener = closing.enter_context(listen_in_range("127.0.0.2", ANY_PORT))
    invitation = StreamInvitation(host="127.0.0.2", port=listener.getsockname()[1])
    end = DiallingEnd(PlanNeed(), invitation, own_address="127.0.0.9")
    closing.callback(end.close)
    opened(closing, end)
    listener.settimeout(LONG_S)
    accepted, address = listener.accept()
    accepted.close()
    assert address[0] == "127.0.0.9"


def test_g1_a_way_that_is_dead_ends_its_streams_after_the_heartbeat_would(closing: ExitStack) -> None:
    ours, theirs = tcp_pair()
    closing.callback(theirs.close)
    interruption = Interruption(end_event(closing))
    closing.callback(interruption.close)
    closing.callback(Stream(ours, interruption).close)
    idle_s, every_s, count = (
        ours.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert SILENCE_LIMIT_S < idle_s + every_s * count <= 2 * SILENCE_LIMIT_S
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_g1_a_way_that_dies_while_the_other_end_loads_is_noticed_as_soon(closing: ExitStack) -> None:
    """The dialling end waits for the first word of the other one, for up to an hour."""
    ours, theirs = tcp_pair()
    closing.callback(theirs.close)
    asks = []

    def wait(fd: int, events: int) -> None:
        asks.append(ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        raise TimeoutError

    with pytest.raises(TimeoutError):
        stream_security.secured(ours, stream_security.proof_of(PlainText(), "dialler"), wait)
    assert asks == [1]


def test_g1_either_end_may_be_opened_first_and_neither_waits_for_the_other(closing: ExitStack) -> None:
    """The other rank may load its weights for an hour."""
    for first in (0, 1):
        ends = stream(PlanNeed(), closing, tls)
        (early,) = opened(closing, ends[first])
        early.send(b"sent before anybody was there", 0.0)
        assert early.recv(0.01) is None
        (late,) = opened(closing, ends[1 - first])
        assert late.recv(LONG_S) == b"sent before anybody was there"


def test_g1_an_endpoint_may_be_closed_once_it_is_open(closing: ExitStack) -> None:
    with ExitStack() as of_ends:
        ends = stream(PlanNeed(), of_ends, tls)
        channels = opened(closing, *ends)
    assert_they_meet(*channels)


def test_g1_a_port_where_nobody_listens_is_named_with_a_remedy(closing: ExitStack) -> None:
    listener = listen_in_range("127.0.0.1", ANY_PORT)
    port = listener.getsockname()[1]
    listener.close()
    end = DiallingEnd(PlanNeed(), StreamInvitation(host="127.0.0.1", port=port))
    closing.callback(end.close)
    error = failure_of(*opened(closing, end))
    assert isinstance(error, LinkClosedError)
    assert f"127.0.0.1 port {port} cannot be reached: connection refused" in error.message
    assert "--link-ports" in error.remedy


def test_g1_a_host_that_does_not_answer_is_named_by_the_deadline(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that drops: the queue of a listener is full, and the kernel answers nobody."""
    monkeypatch.setattr(stream_opening, "CONNECT_TIMEOUT_S", 0.05)
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(3):
        filling = closing.enter_context(socket.socket())
        filling.setblocking(False)
        filling.connect_ex(listener.getsockname())
    end = DiallingEnd(PlanNeed(), StreamInvitation(host="127.0.0.1", port=listener.getsockname()[1]))
    closing.callback(end.close)
    assert "cannot be reached: no answer within" in failure_of(*opened(closing, end)).message


def test_g1_a_name_that_nobody_knows_is_named(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    end = DiallingEnd(PlanNeed(), StreamInvitation(host="nowhere.invalid", port=1))
    closing.callback(end.close)
    error = failure_of(*opened(closing, end))
    assert "the address of nowhere.invalid cannot be found" in error.message
    assert error.remedy


def test_g1_a_look_up_of_a_name_does_not_hold_up_a_close(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, released = threading.Event(), threading.Event()

    def slow(*_: object, flags: int = 0, **__: object) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name")
        looking.set()
        assert released.wait(LONG_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    end = DiallingEnd(PlanNeed(), StreamInvitation(host="slow.invalid", port=1))
    closing.callback(end.close)
    (channel,) = opened(closing, end)
    assert looking.wait(LONG_S)
    channel.close()
    released.set()
    for thread in threading.enumerate():
        if thread.name == "look-up slow.invalid":
            thread.join(LONG_S)


def test_g1_the_second_address_of_a_name_is_tried(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = stream(PlanNeed(), closing)
    way = ends[0].endpoint.path.way
    assert isinstance(way, DialledStream)
    free = listen_in_range("127.0.0.1", ANY_PORT)
    nobody = free.getsockname()
    free.close()
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, nobody), (*kind, ("127.0.0.1", way.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert_they_meet(*opened(closing, *ends))


def test_g1_a_dialler_that_never_comes_is_missed_at_the_deadline(closing: ExitStack) -> None:
    ends = stream(PlanNeed(), closing, open_timeout_s=0.02)
    error = failure_of(*opened(closing, ends[1]))
    assert isinstance(error, WaitTimeoutError)
    assert "no connection came to port" in error.message


def test_g1_who_dials_after_the_other_end_has_come_is_refused(closing: ExitStack) -> None:
    ends = stream(PlanNeed(), closing)
    channels = opened(closing, *ends)
    assert_they_meet(*channels)
    way = ends[0].endpoint.path.way
    assert isinstance(way, DialledStream)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((way.host, way.port))


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(2000), os.urandom(500)])
@pytest.mark.parametrize("secured", [challenged, tls])
def test_r15_a_stranger_is_sent_away_and_the_wait_goes_on(
    closing: ExitStack, secured: Any, says: bytes
) -> None:
    joining, accepting = stream(PlanNeed(), closing, secured)
    (channel,) = opened(closing, accepting)
    way = joining.endpoint.path.way
    assert isinstance(way, DialledStream)
    with (
        socket.create_connection((way.host, way.port), LONG_S) as stranger,
        contextlib.suppress(OSError),  # it may have been sent away meanwhile
    ):
        stranger.sendall(says)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):  # an alert, or nothing
            pass
    (other,) = opened(closing, joining)
    assert_they_meet(channel, other)


def test_r15_a_stranger_that_says_nothing_costs_its_time_and_no_more(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(stream_opening, "LIMITS", DoorLimits(timeout_s=0.02))
    monkeypatch.setattr(stream_opening, "Door", partial(Door, clock=clock))
    joining, accepting = stream(PlanNeed(), closing, tls)
    (channel,) = opened(closing, accepting)
    way = joining.endpoint.path.way
    assert isinstance(way, DialledStream)
    stranger = closing.enter_context(socket.create_connection((way.host, way.port)))
    while not await_readable([stranger], 0.02):  # it may not have been let in when the clock goes on
        clock.advance(0.02)
    assert stranger.recv(1) == b""
    (other,) = opened(closing, joining)  # which has as long as it takes: the clock stands still
    assert_they_meet(channel, other)


def other_name(closing: ExitStack) -> Secured:
    """The end that accepts is somebody of the cluster, but not who is expected."""
    peers = closing.enter_context(LinkPeers(("rank-0", "rank-7")))
    return peers.certified(0, peers.named(1, role="rank-1")), peers.certified(1)


def other_epoch(closing: ExitStack) -> Secured:
    peers = closing.enter_context(LinkPeers())
    return peers.certified(0, peers.named(1, epoch=4)), peers.certified(1)


def other_host(closing: ExitStack) -> Secured:
    peers = closing.enter_context(LinkPeers())
    return peers.certified(0, peers.named(1, host="host-2")), peers.certified(1)


def other_authority(closing: ExitStack) -> Secured:
    peers, others = (closing.enter_context(LinkPeers()) for _ in range(2))
    return peers.certified(0), others.certified(1)


def other_epoch_key(closing: ExitStack) -> Secured:
    peers, others = (closing.enter_context(LinkPeers()) for _ in range(2))
    of_accepter = others.challenged(1)
    own, peer = peers.named(1).uri, peers.named(0).uri
    return peers.challenged(0), msgspec.structs.replace(of_accepter, own=own, peer=peer)


@pytest.mark.parametrize(
    ("secured", "told"),
    [
        (
            other_name,
            "the peer is rank-7 of host-1 in epoch 3, where rank-1 of host-1 in epoch 3 was expected",
        ),
        (other_epoch, "where rank-1 of host-1 in epoch 4 was expected"),
        (other_host, "where rank-1 of host-2 in epoch 3 was expected"),
        (other_authority, "the peer is not in this cluster"),
        (other_epoch_key, "does not have the key of this epoch"),
    ],
)
def test_r15_a_peer_that_proves_something_else_is_refused_by_the_dialler(
    closing: ExitStack, secured: Any, told: str
) -> None:
    joining, accepting = stream(PlanNeed(), closing, secured)
    dialler, _ = opened(closing, joining, accepting)
    error = failure_of(dialler)
    assert isinstance(error, JoinError)
    assert error.message.startswith(f"channel {NAME}: ")
    assert told in error.message
    assert error.remedy


def dialled_and_accepted(
    closing: ExitStack, of_dialler: StreamSecurity, of_accepter: StreamSecurity
) -> list[PolledChannel]:
    channels = []
    ends: list[tuple[StreamSide, StreamSecurity]] = [("dialler", of_dialler), ("accepter", of_accepter)]
    for taken, (side, security) in zip(tcp_pair(), ends, strict=True):
        path = connected_path(taken, end_event(closing), side=side, security=security)
        channels.append(open_channel(channel_handle(path), NAME))
        closing.callback(channels[-1].close)
        taken.close()
    return channels


def test_r15_a_dialler_with_another_certificate_is_refused_and_both_sides_know(closing: ExitStack) -> None:
    peers = closing.enter_context(LinkPeers())
    wanted = peers.named(0, role="rank-9")
    dialler, accepter = dialled_and_accepted(closing, peers.certified(0), peers.certified(1, wanted))
    error = failure_of(accepter)
    assert "the peer is rank-0 of host-0 in epoch 3, where rank-9 of host-0" in error.message
    assert error.code == "unexpected_peer"
    accepter.close()
    assert isinstance(failure_of(dialler), LinkClosedError | ProtocolError)


def test_r15_a_link_in_plain_text_needs_the_key_of_the_epoch(closing: ExitStack) -> None:
    peers = closing.enter_context(LinkPeers())
    bare = Credentials(key_pem=b"", certificate_pem=b"", authority_pem=b"").to_memory()
    closing.callback(os.close, bare)
    security = msgspec.structs.replace(peers.challenged(0), credentials_fd=bare)
    with pytest.raises(CertificateError, match="lack the key of the epoch") as caught:
        opened(closing, stream(PlanNeed(), closing, lambda _: (security, peers.challenged(1)))[0])
    assert "--insecure-links" in caught.value.remedy


@pytest.mark.parametrize("says", ["tls", "challenged"])
def test_r15_plain_text_and_tls_do_not_meet_and_the_remedy_says_why(closing: ExitStack, says: str) -> None:
    peers = closing.enter_context(LinkPeers())
    kinds = {"tls": peers.certified, "challenged": peers.challenged}
    other = kinds["challenged" if says == "tls" else "tls"]
    dialler, accepter = dialled_and_accepted(closing, kinds[says](0), other(1))  # type: ignore[operator]
    error = failure_of(accepter)
    accepter.close()
    assert isinstance(error, ProtocolError)
    assert "plain text" in error.message or "does not speak TLS" in error.message
    failure_of(dialler)


def test_r15_who_was_sent_away_is_named_when_nobody_else_comes(closing: ExitStack) -> None:
    joining, accepting = stream(PlanNeed(), closing, tls, open_timeout_s=1.0)
    way = joining.endpoint.path.way
    assert isinstance(way, DialledStream)
    stranger = closing.enter_context(socket.create_connection((way.host, way.port)))
    stranger.sendall(bytes(100))
    (channel,) = opened(closing, accepting)
    told = r"The last refused connection, from 127\.0\.0\.1:\d+: the other side does not speak TLS"
    assert re.search(told, failure_of(channel).message)


def test_r15_credentials_that_cannot_be_used_are_refused_at_once(closing: ExitStack) -> None:
    empty = os.memfd_create("nothing")
    closing.callback(os.close, empty)
    security = Certified(credentials_fd=empty, peer=closing.enter_context(LinkPeers()).named(1).uri)
    threads = set(threading.enumerate())
    for side in (0, 1):
        with pytest.raises(ProtocolError, match="credentials passed to this process are damaged"):
            opened(closing, stream(PlanNeed(), closing, lambda _: (security, security))[side])
    assert set(threading.enumerate()) <= threads


def test_r15_a_peer_of_no_cluster_cannot_be_expected(closing: ExitStack) -> None:
    security = msgspec.structs.replace(closing.enter_context(LinkPeers()).certified(0), peer="rank-1")
    with pytest.raises(ProtocolError, match="'rank-1' is not the name of a process of a cluster"):
        opened(closing, stream(PlanNeed(), closing, lambda _: (security, security))[0])


@pytest.mark.parametrize("ends_by", ["close", "reset", "garbage"])
def test_r15_a_handshake_that_breaks_off_is_a_typed_error(closing: ExitStack, ends_by: str) -> None:
    wire, taken = tcp_pair()
    path = connected_path(taken, end_event(closing), side="dialler", security=tls(closing)[0])
    channel = open_channel(channel_handle(path), NAME)
    closing.callback(channel.close)
    closing.callback(wire.close)
    taken.close()
    assert wire.recv(1 << 16)
    if ends_by == "garbage":
        wire.sendall(bytes(500))
    elif ends_by == "reset":
        reset(wire)
    else:
        wire.close()
    failure_of(channel)


def test_r15_a_handshake_that_never_ends_does(closing: ExitStack) -> None:
    wire, taken = tcp_pair()
    security = tls(closing)[1]
    path = connected_path(taken, end_event(closing), security=security, open_timeout_s=0.02)
    channel = open_channel(channel_handle(path), NAME)
    closing.callback(channel.close)
    closing.callback(wire.close)
    taken.close()
    assert isinstance(failure_of(channel), WaitTimeoutError)


def test_crew_of_ends_that_are_closed_while_they_meet(closing: ExitStack) -> None:
    """Whatever the moment of a close, nobody hangs."""
    for _ in range(20):
        with ExitStack() as each:
            channels = opened(each, *stream(PlanNeed(), each, tls))
            crew = Crew()
            for channel in channels:
                crew.start(channel.close)
            crew.join()
