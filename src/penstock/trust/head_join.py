"""The head's side of the join protocol, without sockets and clocks (diagram: `trust.join_messages`).

A worker with a token gets a certificate, and connects again with it. A worker with a certificate is let in.
The proof of its token authenticates the first one, and the TLS handshake the second.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable

import msgspec

from penstock.errors import JoinError, NameTakenError, PenstockError, describe
from penstock.trust import certificates
from penstock.trust.admission import AdmissionBook, Seat
from penstock.trust.conversation import Welcoming
from penstock.trust.identity import ClusterIdentity
from penstock.trust.join_messages import (
    NONCE_BYTES,
    NOT_JOINED,
    PROOF_BYTES,
    PROTOCOL,
    Frame,
    Hello,
    JoinRequest,
    Kind,
    MessageReader,
    RejoinRequest,
    Welcome,
    decode,
    framed,
    garbage,
    other_protocol,
    other_version,
    proof,
)
from penstock.trust.peer_names import AGENT_ROLE, VISITOR_ROLE, PeerName, require_host_name
from penstock.trust.tls import NO_CERTIFICATE, PeerCertificate

NOBODY = PeerName(cluster="", host="", role="")


class ConnectedHosts:
    """The names of hosts that are in use: of the head, of connected workers, and of workers that join now.

    Thread-safe.

    Args:
        own: name of the head's host.
    """

    def __init__(self, own: str) -> None:
        self._names = {own}
        self._mutex = threading.Lock()

    def enter(self, host: str) -> None:
        """Take a name.

        Raises:
            NameTakenError: the name is in use.
        """
        with self._mutex:
            if host in self._names:
                raise NameTakenError(
                    f"a host called {host} is already in the cluster.",
                    remedy="Choose another --name; a worker that has just lost its connection can try again.",
                )
            self._names.add(host)

    def require(self, host: str) -> None:
        """Raise an error if a host is not in the cluster now.

        Raises:
            JoinError: the host's worker has not joined, or the connection to it is lost.
        """
        with self._mutex:
            if host not in self._names:
                raise JoinError(
                    f"the host {host} asks for weights but has not joined.",
                    remedy="Start its worker; then it joins.",
                    code=NOT_JOINED,
                )

    def leave(self, host: str) -> None:
        """Give a name back, since the connection to the worker of that name is gone."""
        with self._mutex:
            self._names.discard(host)


class HeadDesk(msgspec.Struct, frozen=True, kw_only=True):
    """The head's data for every conversation with a worker.

    Attributes:
        identity: signs certificates.
        book: knows tokens and accepted certificates.
        connected: names of hosts that are in use.
        certificate: the head's certificate (DER), as its TLS handshake shows it.
        version: version of Penstock; the worker's must be the same.
    """

    identity: ClusterIdentity
    book: AdmissionBook
    connected: ConnectedHosts
    certificate: bytes
    version: str


class HeadJoin:
    """The head's side of joining one worker. Implements `Conversation`.

    Args:
        desk: the head's data.
        peer: the worker's certificate, or `NO_CERTIFICATE`.

    Attributes:
        host: name of the worker's host; "" until the worker has joined.
        is_connected: the worker has joined with its certificate. The connection then goes on, and the name
            of the host stays taken until `ConnectedHosts.leave`. A worker that has joined with a token
            closes the connection, and connects again with its certificate.
        serial: serial number of the certificate that a connected worker has from now on; 0 before.
        visitor: name of a host that only looks whether it could join, whose connection goes on; for all
            others `NOBODY`.
    """

    def __init__(self, desk: HeadDesk, peer: PeerCertificate) -> None:
        self.host = ""
        self.is_connected = False
        self.serial = 0
        self.visitor = NOBODY
        self._desk = desk
        self._peer = peer
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._reader = MessageReader()
        self._await: Callable[[Frame], None] | None = self._take_request
        self._store: Callable[[], None] = _nothing
        self._release: Callable[[], None] = _nothing
        hello = Hello(version=desk.version, authority=desk.identity.certificate_pem, nonce=self._nonce)
        self._outgoing = framed(Kind.HELLO, desk.identity.public_key + msgspec.msgpack.encode(hello))

    @property
    def wanted(self) -> int:
        return 0 if self._await is None else self._reader.wanted

    def take_outgoing(self) -> bytes:
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def receive(self, data: bytes) -> None:
        assert self._await is not None, "the conversation has ended"
        try:
            frame = self._reader.feed(data)
            if frame is not None:
                if frame.protocol != PROTOCOL or frame.kind == Kind.OTHER_VERSION:
                    raise other_protocol(frame.protocol)
                self._await(frame)
        except PenstockError as error:
            self.abandon()
            self._outgoing += framed(Kind.REFUSED, msgspec.msgpack.encode(describe(error)))
            raise

    def end_of_stream(self) -> None:
        self.abandon()
        raise JoinError(
            "a worker disconnected before it had joined.",
            remedy="The worker's own message gives the reason; its token may be for another cluster.",
        )

    def abandon(self) -> None:
        self._await = None
        release, self._release = self._release, _nothing
        release()

    def _take_request(self, frame: Frame) -> None:
        if frame.kind == Kind.JOIN and self._peer is NO_CERTIFICATE:
            self._join(frame.body[:PROOF_BYTES], frame.body[PROOF_BYTES:])
        elif frame.kind == Kind.REJOIN and self._peer is not NO_CERTIFICATE:
            self._rejoin(frame.body)
        elif frame.kind == Kind.VISIT and self._peer is NO_CERTIFICATE:
            self._visit(frame.body[:PROOF_BYTES], frame.body[PROOF_BYTES:])
        elif frame.kind == Kind.VISIT:
            self._visit_again(frame.body)
        else:
            raise garbage()

    def _proved_request(self, given: bytes, body: bytes) -> tuple[Seat, JoinRequest]:
        """Check the proof of a request, and then read the request; before that, the body is only hashed."""
        desk = self._desk

        def is_proved_by(key: bytes) -> bool:
            return hmac.compare_digest(proof(key, desk.certificate, self._nonce, body), given)

        seat = desk.book.reserve(is_proved_by)
        self._release = lambda: desk.book.cancel(seat)
        request = decode(body, JoinRequest)
        self._require_version(request.version)
        require_host_name(request.host)
        return seat, request

    def _join(self, given: bytes, body: bytes) -> None:
        desk = self._desk
        seat, request = self._proved_request(given, body)
        desk.connected.enter(request.host)
        self._release = lambda: self._give_back(seat, request.host)
        certificate = desk.identity.sign_host(request.request, request.host)
        serial = certificates.read_certificate(certificate)[0]

        def store() -> None:
            desk.book.commit(seat, request.host, serial)
            self.host = request.host
            desk.connected.leave(request.host)  # the worker connects again, with its certificate

        self._welcome(certificate, store)

    def _visit(self, given: bytes, body: bytes) -> None:
        """Give a host that has the token a certificate for measurements of the network, and nothing else."""
        desk = self._desk
        seat, request = self._proved_request(given, body)
        desk.book.cancel(seat)  # a visit does not count as a use of the token
        name = PeerName(cluster=desk.identity.name, host=request.host, role=VISITOR_ROLE)

        def store() -> None:
            self.visitor = name

        self._welcome(desk.identity.sign_link(request.request, name), store)

    def _visit_again(self, body: bytes) -> None:
        """Let a host that has joined before be measured with the certificate that it has."""
        name = _known_agent(self._desk, self._peer)
        self._require_version(decode(body, RejoinRequest).version)

        def store() -> None:
            self.visitor = name

        self._welcome(b"", store)

    def _give_back(self, seat: Seat, host: str) -> None:
        self._desk.book.cancel(seat)
        self._desk.connected.leave(host)

    def _rejoin(self, body: bytes) -> None:
        desk, name = self._desk, _known_agent(self._desk, self._peer)
        request = decode(body, RejoinRequest)
        self._require_version(request.version)
        desk.connected.enter(name.host)
        self._release = lambda: desk.connected.leave(name.host)
        serial, renewed = self._peer.serial, b""
        if request.request:
            renewed = desk.identity.sign_host(request.request, name.host)
            serial = certificates.read_certificate(renewed)[0]
            desk.book.offer(name.host, self._peer.serial, serial)

        def store() -> None:
            desk.book.renew(name.host, self._peer.serial, serial)
            self.host, self.serial = name.host, serial
            self.is_connected = True

        self._welcome(renewed, store)

    def _require_version(self, theirs: str) -> None:
        if theirs != self._desk.version:
            raise other_version(theirs, self._desk.version)

    def _welcome(self, certificate: bytes, store: Callable[[], None]) -> None:
        self._outgoing += framed(Kind.WELCOME, msgspec.msgpack.encode(Welcome(certificate=certificate)))
        self._store = store
        self._await = self._take_stored

    def _take_stored(self, frame: Frame) -> None:
        if frame.kind != Kind.STORED or frame.body:
            raise garbage()
        self._store()
        if not self.is_connected:
            self._release = _nothing
        # If a connected worker cannot be sent DONE, the door calls `abandon`, which releases its host's name.
        self._await = None
        self._outgoing += framed(Kind.DONE)


class WeightsVisit(Welcoming):
    """The head's side of a connection over which a joined worker fetches weights. Implements `Conversation`.

    Args:
        desk: the head's data.
        peer: the worker's certificate.

    Attributes:
        host: name of the worker's host.

    Raises:
        JoinError: the worker has not joined, or its certificate is revoked.
        ProtocolError: the peer is not a worker of this cluster.
    """

    is_connected = False  # this is not the connection of an agent

    def __init__(self, desk: HeadDesk, peer: PeerCertificate) -> None:
        super().__init__()
        self.host = _known_agent(desk, peer).host
        desk.connected.require(self.host)


HeadConversation = HeadJoin | WeightsVisit


def _known_agent(desk: HeadDesk, peer: PeerCertificate) -> PeerName:
    """Return the name in the certificate of a worker that has joined before; raise an error for others."""
    name = peer.name
    if name.role != AGENT_ROLE or name.cluster != desk.identity.name:
        raise garbage()
    desk.book.require_known(name.host, peer.serial)
    return name


def _nothing() -> None:
    """Do nothing: there is nothing to release."""
