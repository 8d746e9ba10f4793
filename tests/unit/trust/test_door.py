"""The door: what a peer may cost before it has proved itself, and that nobody holds up the others."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from clusters import HEAD_HOST, VERSION, WAIT_S, Cluster, SetClock
from descriptors import no_descriptor_left
from penstock.errors import JoinError, PeerError, PenstockError, ProtocolError, WaitTimeoutError
from penstock.process.readiness import await_readable
from penstock.trust.certificates import HOST_LIFE_S
from penstock.trust.challenge import AcceptedChallenge, DialledChallenge
from penstock.trust.credentials import Credentials
from penstock.trust.door import Door, DoorLimits, Entered, shown_address
from penstock.trust.head_join import HeadJoin
from penstock.trust.joining import converse
from penstock.trust.peer_names import PeerName, rank_role
from penstock.trust.tls import own_certificate_der, token_client_context, under_tls
from penstock.trust.worker_door import worker_door
from penstock.trust.worker_join import TokenClaim, WorkerJoin


class DoorOfTests:
    """A door for workers that the test serves by hand, with a clock of its own."""

    def __init__(self, cluster: Cluster, limits: DoorLimits) -> None:
        self.refused: list[PenstockError] = []
        self.clock = SetClock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._clients: list[socket.socket] = []
        self.door = worker_door(
            self._listener,
            cluster.identity,
            cluster.book,
            cluster.connected,
            HEAD_HOST,
            VERSION,
            lambda _, error: self.refused.append(error),
            limits,
            self.clock,
        )

    def connect(self) -> socket.socket:
        client = socket.create_connection(self._listener.getsockname(), timeout=WAIT_S)
        self._clients.append(client)
        return client

    def serve_until(self, num_visitors: int, num_refused: int = 0) -> list[Entered[HeadJoin]]:
        entered: list[Entered[HeadJoin]] = []
        for _ in range(1000):
            entered += self.door.serve(0.05)
            if self.door.num_visitors == num_visitors and len(self.refused) >= num_refused:
                return entered
        raise AssertionError(f"{self.door.num_visitors} visitors, {self.refused}")

    def close(self) -> None:
        self.door.close()
        for client in self._clients:
            client.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head")


@pytest.fixture
def limits() -> DoorLimits:
    return DoorLimits()


@pytest.fixture
def made(cluster: Cluster, limits: DoorLimits) -> Iterator[DoorOfTests]:
    door = DoorOfTests(cluster, limits)
    yield door
    door.close()


def is_closed(client: socket.socket) -> bool:
    """Whether the other side has closed the connection, once all that it sent is read."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def test_r16_a_door_without_a_descriptor_for_its_next_peer_rests_until_there_may_be_one(
    made: DoorOfTests,
) -> None:
    """The peer waits in the kernel's queue, so the listener is readable all the time."""
    made.connect()
    with no_descriptor_left():
        made.door.serve(WAIT_S)
        assert await_readable([made.door], 0.0) == []
        assert 0.0 < made.door.patience_s() <= 1.0
    made.clock.seconds += made.door.patience_s()
    made.serve_until(num_visitors=1)


def test_the_limits_are_those_that_are_promised() -> None:
    assert DoorLimits() == DoorLimits(max_peers=64, max_bytes=16384, timeout_s=5.0)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x00\xc8"])
def test_r15_who_says_too_little_is_sent_away_in_time(made: DoorOfTests, sent: bytes) -> None:
    client = made.connect()
    client.sendall(sent)
    made.serve_until(1)
    made.clock.seconds = 4.99
    made.serve_until(1)
    made.clock.seconds = 5.0
    made.serve_until(0, num_refused=1)
    assert is_closed(client)
    assert isinstance(made.refused[0], WaitTimeoutError)
    assert "within 5 s" in str(made.refused[0])


def test_r15_who_stays_silent_after_the_handshake_is_sent_away_in_time(
    made: DoorOfTests, cluster: Cluster
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = token_client_context().wrap_bio(incoming, outgoing)
    client = made.connect()
    for _ in range(3):
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            client.sendall(outgoing.read())
            made.serve_until(1)
            incoming.write(client.recv(1 << 16))
    client.sendall(outgoing.read())
    made.serve_until(1)
    made.clock.seconds = 5.0
    made.serve_until(0, num_refused=1)
    assert isinstance(made.refused[0], WaitTimeoutError)
    cluster.connected.enter("desk")


def test_r15_a_renewal_of_the_heads_certificate_disturbs_no_worker_that_joins_meanwhile(
    made: DoorOfTests, cluster: Cluster
) -> None:
    """Its proof is for the certificate that it was shown; the next peer is shown the new one."""
    cluster.book.allow(cluster.token, 1, HOST_LIFE_S)
    kept: list[Credentials] = []

    def join(client: socket.socket) -> None:
        with under_tls(token_client_context(), client) as tls:
            tls.do_handshake()
            certificate = tls.getpeercert(binary_form=True)
            assert certificate == cluster.certificate
            claim = TokenClaim(cluster.token, "desk", VERSION)
            conversation = WorkerJoin(claim, certificate, kept.append, cluster.wall_clock())
            converse(tls, conversation, time.monotonic() + WAIT_S)

    client = made.connect()
    made.serve_until(1)
    cluster.wall_clock.seconds += 0.6 * HOST_LIFE_S
    made.connect()
    made.serve_until(2)
    assert own_certificate_der(cluster.identity.head_credentials(HEAD_HOST)) != cluster.certificate
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, client)
        (entered,) = made.serve_until(1)
        joining.result(WAIT_S)
    assert entered.conversation.host == "desk"
    entered.connection.close()
    assert len(kept) == 1
    assert made.refused == []


def test_r15_time_runs_from_the_first_moment_and_not_from_the_last_byte(made: DoorOfTests) -> None:
    client = made.connect()
    for number, byte in enumerate(b"\x16\x03\x01\x00\xc8"):
        client.sendall(bytes([byte]))
        made.clock.seconds = float(number)
        made.serve_until(1)
    made.clock.seconds = 5.0
    made.serve_until(0, num_refused=1)


@pytest.mark.parametrize("limits", [DoorLimits(max_peers=3)])
def test_r15_more_peers_than_the_limit_wait_outside(made: DoorOfTests) -> None:
    clients = [made.connect() for _ in range(5)]
    made.serve_until(3)
    assert [made.door.serve(0) for _ in range(5)] == [[]] * 5
    assert made.door.num_visitors == 3
    clients[0].close()
    made.serve_until(3, num_refused=1)
    made.clock.seconds = 5.0
    made.door.serve(0)
    made.serve_until(1, num_refused=4)


def test_r15_sixty_four_peers_may_be_at_the_door(made: DoorOfTests) -> None:
    for _ in range(70):
        made.connect()
    made.serve_until(64)
    made.door.serve(0)
    assert made.door.num_visitors == 64
    made.clock.seconds = 5.0
    made.door.serve(0)
    made.serve_until(6, num_refused=64)


def test_r15_who_sends_too_much_is_sent_away_at_once(made: DoorOfTests) -> None:
    """A handshake message of 100 KiB, which OpenSSL would collect."""
    client = made.connect()
    record = b"\x16\x03\x01\x40\x00" + b"\x01\x01\x90\x00" + bytes((1 << 14) - 4)
    client.sendall(record)
    client.sendall(record[:5])
    made.serve_until(0, num_refused=1)
    error = made.refused[0]
    assert isinstance(error, ProtocolError)
    assert is_closed(client)


@pytest.mark.parametrize("limits", [DoorLimits(max_bytes=200)])
def test_r15_bytes_are_counted_in_the_handshake(made: DoorOfTests) -> None:
    client = made.connect()
    client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(190))
    made.serve_until(0, num_refused=1)
    assert made.refused[0].code == "too_long"
    assert "the limit is 200" in str(made.refused[0])


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not_tls"),
        (b"hello, is anybody there?\n", "not_tls"),
        (bytes(100), "not_tls"),
    ],
)
def test_r15_plain_tcp_is_refused_by_name(made: DoorOfTests, sent: bytes, code: str) -> None:
    client = made.connect()
    client.sendall(sent)
    made.serve_until(0, num_refused=1)
    assert made.refused[0].code == code
    assert is_closed(client)


@pytest.mark.parametrize(
    "begin", [b"", b"\x16", b"\x16\x03\x01\x00\x40", b"\x16\x03\x01\x00\x40\x01\x00\x00\x3c\x03\x03"]
)
def test_r15_garbage_of_any_kind_is_one_typed_error(made: DoorOfTests, begin: bytes) -> None:
    """Seeded; beside records of TLS that are none. Who says half a record and leaves is refused too."""
    random = Random(len(begin))
    for number in range(1, 16):
        client = made.connect()
        client.sendall(begin + random.randbytes(random.randrange(400)))
        client.shutdown(socket.SHUT_WR)
        made.serve_until(0, num_refused=number)
        assert is_closed(client)
    assert all(isinstance(error, PeerError) for error in made.refused)


def test_r15_an_error_of_ours_with_one_peer_does_not_end_the_door(
    made: DoorOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(connection: socket.socket) -> HeadJoin:
        raise ValueError("a bug")

    monkeypatch.setattr(made.door, "_begin", begin)
    client = made.connect()
    with ThreadPoolExecutor(1) as pool:
        shaken = pool.submit(token_client_context().wrap_socket, client)
        made.serve_until(0, num_refused=1)
        shaken.result(WAIT_S).close()
    assert isinstance(made.refused[0], ProtocolError)
    assert "ValueError" in made.refused[0].message


def test_who_leaves_at_once_is_forgotten(made: DoorOfTests) -> None:
    made.connect().close()
    made.serve_until(0, num_refused=1)


def test_a_closed_door_sends_all_away(made: DoorOfTests) -> None:
    clients = [made.connect() for _ in range(3)]
    made.serve_until(3)
    made.close()
    assert made.door.num_visitors == 0
    assert all(client.fileno() == -1 for client in clients)


def test_one_slow_peer_does_not_hold_up_another(made: DoorOfTests) -> None:
    made.connect()
    made.serve_until(1)
    made.connect().sendall(b"garbage that is refused\n")
    made.serve_until(1, num_refused=1)


# --- a door without TLS ---------------------------------------------------------------------------


def test_a_link_in_plain_text_opens_by_its_challenge() -> None:
    key, names = bytes(32), [PeerName(cluster="0" * 32, host="a", role=rank_role(n), epoch=1) for n in (0, 1)]
    refused: list[PenstockError] = []
    listener = socket.create_server(("127.0.0.1", 0))
    door: Door[AcceptedChallenge] = Door(
        listener,
        lambda accepted: accepted,
        lambda _: AcceptedChallenge(key, names[1], [names[0]]),
        lambda _, error: refused.append(error),
    )
    with socket.create_connection(listener.getsockname(), timeout=WAIT_S) as client:
        challenge = DialledChallenge(key, *names)
        client.sendall(challenge.take_outgoing())
        assert door.serve(WAIT_S) == []
        proof = b""
        while not proof:
            door.serve(0)
            challenge.receive(client.recv(challenge.wanted))
            proof = challenge.take_outgoing()
        client.sendall(proof + b"the first frame")  # by a dialler that does not wait
        entered: list[Entered[AcceptedChallenge]] = []
        while not entered:
            entered = door.serve(WAIT_S)
        challenge.receive(client.recv(challenge.wanted))
        with entered[0].connection as connection:
            assert entered[0].conversation.peer == names[0]
            assert connection.recv(100) == b"the first frame"  # not a byte of it was taken
    with socket.create_connection(listener.getsockname(), timeout=WAIT_S) as client:
        client.sendall(b"\x16\x03\x01" + bytes(100))
        while not refused:
            door.serve(WAIT_S)
    door.close()
    assert refused[0].code == "not_a_link"
    assert not isinstance(refused[0], JoinError)


def test_addresses_are_shown_as_people_write_them() -> None:
    assert shown_address(("10.0.0.1", 77)) == "10.0.0.1:77"
    assert shown_address(("fe80::1", 77, 0, 2)) == "[fe80::1]:77"
