"""The worker's side of the join protocol, without sockets and clocks (diagram: `trust.join_messages`).

The worker sends nothing before it knows that the head has the cluster's key. A *claim* is the way in which it
then proves itself: a token at its first join (`TokenClaim`), and later its certificate (`CertificateClaim`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.errors import (
    ErrorInfo,
    LinkClosedError,
    PenstockError,
    WrongClusterError,
    error_from_info,
)
from penstock.trust import certificates
from penstock.trust.credentials import Credentials
from penstock.trust.join_messages import (
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
    proof,
)
from penstock.trust.join_token import JoinToken
from penstock.trust.peer_names import AGENT_ROLE, HEAD_ROLE, VISITOR_ROLE, PeerName, require_host_name


class Claim(Protocol):
    """The claim of a worker: how it recognises its head, and how it proves itself to the head."""

    def is_of_cluster(self, public_key: bytes) -> bool:
        """Return whether this key (DER) of the head's cluster is that of the cluster to join."""
        ...

    def request(self, hello: Hello, head_certificate: bytes) -> bytes:
        """Return the message that answers the head's first one."""
        ...

    def credentials(self, hello: Hello, certificate: bytes) -> Credentials:
        """Return the credentials that the worker has from now on.

        Args:
            hello: the first message of the head.
            certificate: the certificate (PEM) from the head; empty if none was requested.
        """
        ...

    def host(self) -> str:
        """Return the name of the worker's host."""
        ...

    def role(self) -> str:
        """Return the role that the certificate of the worker has, or will have."""
        ...


class TokenClaim:
    """The claim of a worker that has a token.

    Raises:
        UsageError: the name cannot be that of a host, or the library `cryptography` is missing.
    """

    def __init__(self, token: JoinToken, host: str, version: str) -> None:
        require_host_name(host)
        self._token = token
        self._host = host
        self._version = version
        self._key = certificates.new_key()

    def is_of_cluster(self, public_key: bytes) -> bool:
        return self._token.is_pin_of(public_key)

    def request(self, hello: Hello, head_certificate: bytes) -> bytes:
        return framed(Kind.JOIN, self._proved_request(hello, head_certificate))

    def credentials(self, hello: Hello, certificate: bytes) -> Credentials:
        return Credentials(key_pem=self._key, certificate_pem=certificate, authority_pem=hello.authority)

    def host(self) -> str:
        return self._host

    def role(self) -> str:
        return AGENT_ROLE

    def _proved_request(self, hello: Hello, head_certificate: bytes) -> bytes:
        request = certificates.signing_request(self._key)
        body = msgspec.msgpack.encode(JoinRequest(version=self._version, host=self._host, request=request))
        return proof(self._token.proof_key(), head_certificate, hello.nonce, body) + body


class TokenVisit(TokenClaim):
    """The claim of a host that has a token, and only looks whether it could join."""

    def request(self, hello: Hello, head_certificate: bytes) -> bytes:
        return framed(Kind.VISIT, self._proved_request(hello, head_certificate))

    def role(self) -> str:
        return VISITOR_ROLE


class CertificateClaim:
    """The claim of a worker that has a certificate.

    In the second half of the certificate's life the worker requests a newer one.

    Args:
        credentials: credentials of the worker.
        version: version of Penstock.
        now: Unix time (seconds since 1970).
    """

    def __init__(self, credentials: Credentials, version: str, now: float) -> None:
        self._credentials = credentials
        self._version = version
        _, self._name, _ = certificates.read_certificate(credentials.certificate_pem)
        self._new_key = certificates.new_key() if self._is_to_be_renewed(now) else b""

    def is_of_cluster(self, public_key: bytes) -> bool:
        return certificates.certified_key(self._credentials.authority_pem) == public_key

    def request(self, hello: Hello, head_certificate: bytes) -> bytes:
        request = certificates.signing_request(self._new_key) if self._new_key else b""
        return framed(
            Kind.REJOIN, msgspec.msgpack.encode(RejoinRequest(version=self._version, request=request))
        )

    def credentials(self, hello: Hello, certificate: bytes) -> Credentials:
        if not self._new_key:
            return self._credentials
        return msgspec.structs.replace(self._credentials, key_pem=self._new_key, certificate_pem=certificate)

    def host(self) -> str:
        return self._name.host

    def role(self) -> str:
        return AGENT_ROLE

    def _is_to_be_renewed(self, now: float) -> bool:
        return not certificates.is_fresh(self._credentials.certificate_pem, now)


class KeptCertificateClaim(CertificateClaim):
    """The claim of a worker that goes on with its certificate, such as while a newer one cannot be stored."""

    def _is_to_be_renewed(self, now: float) -> bool:
        return False


class CertificateVisit(KeptCertificateClaim):
    """The claim of a worker with a certificate that only looks whether it could join; it renews nothing."""

    def request(self, hello: Hello, head_certificate: bytes) -> bytes:
        return framed(Kind.VISIT, msgspec.msgpack.encode(RejoinRequest(version=self._version)))


class WorkerJoin:
    """The worker's side of joining the head. Implements `Conversation`.

    Args:
        claim: how the worker proves itself.
        head_certificate: the head's certificate (DER), as the TLS handshake has shown it.
        store: saves the credentials so that they survive a restart; called before the head counts the join.
        now: Unix time (seconds since 1970).

    Attributes:
        head: name of the head, once it has proved itself.
    """

    def __init__(
        self, claim: Claim, head_certificate: bytes, store: Callable[[Credentials], None], now: float
    ) -> None:
        self.head: PeerName
        self._claim = claim
        self._head_certificate = head_certificate
        self._store = store
        self._now = now
        self._reader = MessageReader()
        self._hello: Hello
        self._await: Callable[[Frame], None] | None = self._take_hello
        self._outgoing = b""

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
                self._await(frame)
        except PenstockError:
            self.abandon()
            raise

    def end_of_stream(self) -> None:
        self.abandon()
        raise LinkClosedError(
            "the head closed the connection before the worker had joined.",
            remedy="The log of the head gives the reason; this worker may be of another cluster.",
        )

    def abandon(self) -> None:
        self._await = None

    def _take_hello(self, frame: Frame) -> None:
        """Check the head by its public key, before anything else of its message is parsed."""
        if frame.kind != Kind.HELLO:
            raise garbage()
        public_key = frame.body[: certificates.PUBLIC_KEY_BYTES]
        if not self._claim.is_of_cluster(public_key):
            raise _wrong_cluster()
        head = certificates.check_signed(self._head_certificate, public_key, self._now)
        if head.role != HEAD_ROLE or head.cluster != certificates.cluster_name(public_key):
            raise _wrong_cluster()  # workers have a certificate of the cluster too, but are not the head
        if frame.protocol != PROTOCOL:
            self._outgoing += framed(Kind.OTHER_VERSION)
            raise other_protocol(frame.protocol)
        hello = decode(frame.body[certificates.PUBLIC_KEY_BYTES :], Hello)
        if certificates.certified_key(hello.authority) != public_key:
            raise garbage()
        self.head, self._hello = head, hello
        self._outgoing += self._claim.request(hello, self._head_certificate)
        self._await = self._take_welcome

    def _take_welcome(self, frame: Frame) -> None:
        self._require(frame, Kind.WELCOME)
        credentials = self._claim.credentials(self._hello, decode(frame.body, Welcome).certificate)
        self._require_own(credentials)
        self._store(credentials)
        self._outgoing += framed(Kind.STORED)
        self._await = self._take_done

    def _take_done(self, frame: Frame) -> None:
        self._require(frame, Kind.DONE)
        self._await = None

    def _require(self, frame: Frame, kind: Kind) -> None:
        if frame.protocol != PROTOCOL:
            raise other_protocol(frame.protocol)
        if frame.kind == Kind.REFUSED:
            raise error_from_info(decode(frame.body, ErrorInfo))
        if frame.kind != kind:
            raise garbage()

    def _require_own(self, credentials: Credentials) -> None:
        """Raise an error for a certificate of another key or name, with which the worker could not rejoin."""
        _, name, _ = certificates.read_certificate(credentials.certificate_pem)
        own = PeerName(cluster=self.head.cluster, host=self._claim.host(), role=self._claim.role())
        if name != own or not certificates.is_pair(credentials.key_pem, credentials.certificate_pem):
            raise garbage()


def _wrong_cluster() -> WrongClusterError:
    return WrongClusterError(
        "the head at this address does not belong to the cluster of the token or certificate, or a third "
        "party intercepts; nothing was sent to it.",
        remedy="Check the address; if the head has lost its state directory, take the new token from it.",
    )
