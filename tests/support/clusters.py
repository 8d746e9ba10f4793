"""A head's identity, book and token in a directory of a test, with clocks that the test sets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from penstock.errors import PenstockError
from penstock.trust import certificates
from penstock.trust.admission import AdmissionBook
from penstock.trust.conversation import Conversation
from penstock.trust.credentials import Credentials
from penstock.trust.door import DEFAULT_LIMITS, Door, DoorLimits
from penstock.trust.head_join import ConnectedHosts, HeadConversation, HeadDesk, HeadJoin
from penstock.trust.identity import ClusterIdentity
from penstock.trust.join_token import JoinToken
from penstock.trust.peer_names import AGENT_ROLE, PeerName
from penstock.trust.tls import NO_CERTIFICATE, PeerCertificate, own_certificate_der
from penstock.trust.worker_door import worker_door
from penstock.trust.worker_join import Claim, TokenClaim, WorkerJoin

VERSION = "0.1.0"
HEAD_HOST = "tower"
WAIT_S = 30.0  # at most, for what takes milliseconds


class SetClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


class Cluster:
    """A head as the trust between hosts sees it.

    Args:
        directory: of its state; another `Cluster` of the same directory is the head after a restart.
        max_joins: of its token.
    """

    def __init__(self, directory: Path, max_joins: int = 1, life_s: float = 3600.0) -> None:
        self.directory = directory
        self.wall_clock = SetClock(time.time())  # OpenSSL compares dates with the real time
        self.identity = ClusterIdentity.open(directory, self.wall_clock)
        self.token = JoinToken.new(self.identity.public_key)
        self.book = AdmissionBook(directory, self.wall_clock)
        self.book.allow(self.token, max_joins, life_s)
        self.connected = ConnectedHosts(HEAD_HOST)
        self.head_credentials = self.identity.head_credentials(HEAD_HOST)
        self.certificate = own_certificate_der(self.head_credentials)

    def desk(self, version: str = VERSION) -> HeadDesk:
        return HeadDesk(
            identity=self.identity,
            book=self.book,
            connected=self.connected,
            certificate=self.certificate,
            version=version,
        )

    def head_join(self, peer: PeerCertificate = NO_CERTIFICATE, version: str = VERSION) -> HeadJoin:
        return HeadJoin(self.desk(version), peer)

    def worker_join(self, claim: Claim, store: Callable[[Credentials], None] = lambda _: None) -> WorkerJoin:
        return WorkerJoin(claim, self.certificate, store, self.wall_clock())

    def token_join(self, host: str = "desk", token: JoinToken | None = None) -> WorkerJoin:
        return self.worker_join(TokenClaim(token or self.token, host, VERSION))

    def joined(self, host: str = "desk") -> Credentials:
        """Let a host join with the token, and return what it has then."""
        kept: list[Credentials] = []
        talk(self.head_join(), self.worker_join(TokenClaim(self.token, host, VERSION), kept.append))
        return kept[-1]

    def link_credentials(self, host: str, role: str, epoch: int) -> Credentials:
        return self.identity.link_credentials(self.process(host, role, epoch))

    def credentials(self, name: PeerName) -> Credentials:
        """Return a key and a certificate of whatever name."""
        key = certificates.new_key()
        certificate = self.identity.sign_link(certificates.signing_request(key), name)
        authority = self.identity.certificate_pem
        return Credentials(key_pem=key, certificate_pem=certificate, authority_pem=authority)

    def process(self, host: str, role: str, epoch: int) -> PeerName:
        """Return the name of a rank or core in an epoch of this run of the head."""
        return msgspec.structs.replace(self.name(host, role, epoch), run=self.identity.run)

    def name(self, host: str, role: str = AGENT_ROLE, epoch: int = 0) -> PeerName:
        return PeerName(cluster=self.identity.name, host=host, role=role, epoch=epoch)


def seen_by_head(credentials: Credentials) -> PeerCertificate:
    """Return what the TLS handshake tells the head of a worker with these."""
    serial, name, _ = certificates.read_certificate(credentials.certificate_pem)
    return PeerCertificate(name=name, serial=serial)


def hand_over(sender: Conversation, receiver: Conversation, chunk: int = 1 << 20) -> int:
    """Carry what one side has to say to the other, and return how many bytes were carried."""
    data = sender.take_outgoing()
    rest = data
    while rest and receiver.wanted:
        size = min(receiver.wanted, chunk)
        receiver.receive(rest[:size])
        rest = rest[size:]
    return len(data)


def talk(head: Conversation, worker: Conversation, chunk: int = 1 << 20) -> None:
    """Carry bytes both ways until neither side has anything to say.

    Args:
        chunk: the most bytes that are handed over at once.
    """
    while hand_over(head, worker, chunk) + hand_over(worker, head, chunk):
        pass


class ServedDoor:
    """A head's door that a thread serves.

    Attributes:
        address: where it listens.
        refused: why peers were not let in.
        entered: names of the hosts that came in with their certificate, in order.
    """

    def __init__(
        self, door: Door[HeadConversation], address: tuple[str, int], refused: list[PenstockError]
    ) -> None:
        self.address = address
        self.refused = refused
        self.entered: list[str] = []
        self.connections: list[socket.socket] = []
        self._door = door
        self._news = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="door")
        self._thread.start()

    def await_news(self, has_come: Callable[[], bool]) -> None:
        """Wait until the thread has seen something."""
        with self._news:
            assert self._news.wait_for(has_come, WAIT_S)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        self._door.close()
        for connection in self.connections:
            connection.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            came = self._door.serve(0.02)
            with self._news:
                for entered in came:
                    self.connections.append(entered.connection)
                    if entered.conversation.is_connected:
                        self.entered.append(entered.conversation.host)
                self._news.notify_all()


@contextmanager
def served(
    cluster: Cluster, version: str = VERSION, limits: DoorLimits = DEFAULT_LIMITS
) -> Iterator[ServedDoor]:
    """Serve the door of a cluster on a port of 127.0.0.1."""
    refused: list[PenstockError] = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    door = worker_door(
        listener,
        cluster.identity,
        cluster.book,
        cluster.connected,
        HEAD_HOST,
        version,
        lambda _, error: refused.append(error),
        limits,
    )
    made = ServedDoor(door, address, refused)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server on 127.0.0.1 that treats its only client so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as accepted:
                accepted.settimeout(WAIT_S)
                answer(accepted)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            thread.join(WAIT_S)
