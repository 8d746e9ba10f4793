"""How streams between hosts come about: who dials, who accepts, who is sent away, and what they say."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from carriers import ANY_PORT, Secured, plain_text, stream, tls
from certificates import PeerCertificates
from hand_core import Crew
from penstock.errors import LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.hosts.rank_host import PlanNeed
from penstock.hosts.stream_ends import DiallingEnd, StreamEnd, StreamInvitation
from penstock.pipeline.links import stream_opening
from penstock.pipeline.links.channel import PolledChannel
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.pipeline.links.stream_security import tls_context
from penstock.process.endpoints import DialledStream, TlsMaterial
from penstock.process.link_ports import listen_in_range
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
@pytest.mark.parametrize("secured", [plain_text, tls])
@pytest.mark.parametrize("joining_dials", [True, False])
def test_g1_addresses_of_both_kinds_and_names_can_be_dialled(
    closing: ExitStack, host: str, secured: Any, joining_dials: bool
) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    ends = stream(PlanNeed(), closing, secured, host=host, joining_dials=joining_dials)
    assert_they_meet(*opened(closing, *ends))


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
    assert "nobody came to port" in error.message


def test_g1_who_dials_after_the_other_end_has_come_is_refused(closing: ExitStack) -> None:
    ends = stream(PlanNeed(), closing)
    channels = opened(closing, *ends)
    assert_they_meet(*channels)
    way = ends[0].endpoint.path.way
    assert isinstance(way, DialledStream)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((way.host, way.port))


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(2000), os.urandom(500)])
def test_r15_a_stranger_is_sent_away_and_the_wait_goes_on(closing: ExitStack, says: bytes) -> None:
    joining, accepting = stream(PlanNeed(), closing, tls)
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
    monkeypatch.setattr(stream_opening, "STRANGER_TIMEOUT_S", 0.02)
    joining, accepting = stream(PlanNeed(), closing, tls)
    (channel,) = opened(closing, accepting)
    way = joining.endpoint.path.way
    assert isinstance(way, DialledStream)
    stranger = closing.enter_context(socket.create_connection((way.host, way.port)))
    stranger.settimeout(LONG_S)
    assert stranger.recv(1) == b""
    monkeypatch.setattr(stream_opening, "STRANGER_TIMEOUT_S", LONG_S)
    (other,) = opened(closing, joining)
    assert_they_meet(channel, other)


def other_name(closing: ExitStack) -> Secured:
    """The end that accepts is somebody of the cluster, but not who is expected."""
    made = closing.enter_context(PeerCertificates("rank-0", "rank-7"))
    return made.material(0, "rank-1"), made.material(1)


def name_within(closing: ExitStack) -> Secured:
    """Names are compared letter by letter: no pattern, no part."""
    made = closing.enter_context(PeerCertificates("rank-0", "*.penstock"))
    return made.material(0, "rank-1.penstock"), made.material(1)


def other_authority(closing: ExitStack) -> Secured:
    made, others = (closing.enter_context(PeerCertificates("rank-0", "rank-1")) for _ in range(2))
    return made.material(0), others.material(1)


@pytest.mark.parametrize("secured", [other_name, name_within, other_authority])
def test_r15_a_peer_with_another_certificate_is_refused_by_the_dialler(
    closing: ExitStack, secured: Any
) -> None:
    joining, accepting = stream(PlanNeed(), closing, secured)
    dialler, _ = opened(closing, joining, accepting)
    error = failure_of(dialler)
    assert isinstance(error, ProtocolError)
    assert "rank-1" in error.message or "certificate verify failed" in error.message
    assert error.remedy


def test_r15_a_dialler_with_another_certificate_is_refused_and_both_sides_know(closing: ExitStack) -> None:
    made = closing.enter_context(PeerCertificates("rank-0", "rank-1"))
    channels = []
    securities = {"dialler": made.material(0), "accepter": made.material(1, "rank-9")}
    for taken, (side, security) in zip(tcp_pair(), securities.items(), strict=True):
        path = connected_path(taken, end_event(closing), side=side, security=security)  # type: ignore
        channels.append(open_channel(channel_handle(path), NAME))
        closing.callback(channels[-1].close)
        taken.close()
    accepter = failure_of(channels[1])
    assert "the other end is rank-0 by its certificate, not rank-9" in accepter.message
    channels[1].close()
    assert isinstance(failure_of(channels[0]), LinkClosedError | ProtocolError)


def test_r15_who_was_sent_away_is_named_when_nobody_else_comes(closing: ExitStack) -> None:
    joining, accepting = stream(PlanNeed(), closing, tls, open_timeout_s=1.0)
    way = joining.endpoint.path.way
    assert isinstance(way, DialledStream)
    stranger = closing.enter_context(socket.create_connection((way.host, way.port)))
    stranger.sendall(bytes(100))
    (channel,) = opened(closing, accepting)
    assert "The last one that was sent away: channel core - stage 1: TLS says" in failure_of(channel).message


def test_r15_tls_is_1_3_and_mutual_without_tickets(closing: ExitStack) -> None:
    for side, material in zip(("dialler", "accepter"), tls(closing), strict=True):
        assert isinstance(material, TlsMaterial)
        context = tls_context(material, side)  # type: ignore[arg-type]
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert side == "dialler" or context.num_tickets == 0


def test_r15_material_that_cannot_be_used_is_refused_at_once(closing: ExitStack) -> None:
    empty = os.memfd_create("nothing")
    closing.callback(os.close, empty)
    material = TlsMaterial(certificate_fd=empty, key_fd=empty, authority_fd=empty, peer_name="x")
    threads = threading.active_count()
    for side in (0, 1):
        with pytest.raises(ProtocolError, match="certificate, key or authority") as caught:
            opened(closing, stream(PlanNeed(), closing, lambda _: (material, material))[side])
        assert caught.value.remedy
    assert threading.active_count() == threads


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
