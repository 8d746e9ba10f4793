"""The TLS between the processes of a cluster: version 1.3 only, and a check of the peer's name.

Only the authority of the cluster is trusted. There are no session tickets, so that every connection proves
both sides anew. OpenSSL checks the chain of certificates and their dates. It does not check which process of
the cluster the peer is: callers do that with `require_peer`, before they use a connection.

    connection = under_tls(link_client_context(credentials), sock)
    connection.do_handshake()
    require_peer(connection, {expected})

Used by the head and the agents when workers join, and by the carriers between hosts. It uses Python's own
`ssl`, and not `cryptography`.
"""

from __future__ import annotations

import os
import socket
import ssl
import traceback
from collections.abc import Collection

import msgspec

from penstock.config.hosts import SAME_VERSION
from penstock.errors import (
    CertificateError,
    JoinError,
    LinkClosedError,
    PeerError,
    ProtocolError,
    WrongClusterError,
)
from penstock.trust.conversation import Welcomed, Welcoming
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName


class PeerCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """The name and serial number in the peer's certificate, which the handshake has checked."""

    name: PeerName
    serial: int


NO_CERTIFICATE = PeerCertificate(name=PeerName(cluster="", host="", role=""), serial=0)


WEIGHTS_PROTOCOL = "penstock-weights/1"  # in ALPN: a worker that connects to fetch weights offers it


def join_server_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context with which the head accepts workers, with or without a certificate.

    A worker that connects to fetch weights says so in the handshake (`WEIGHTS_PROTOCOL`).
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.set_alpn_protocols([WEIGHTS_PROTOCOL])
    _load(context, credentials)
    return context


def token_client_context() -> ssl.SSLContext:
    """Return the context with which a worker without a certificate connects.

    OpenSSL checks nothing here, since the worker does not have the authority's certificate. `WorkerJoin`
    checks the head against the pin of the token before the worker sends anything.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_NONE
    return context


def link_server_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context with which a process accepts connections; both sides show a certificate."""
    return _mutual_context(ssl.PROTOCOL_TLS_SERVER, credentials)


def link_client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context with which a process connects to another; both sides show a certificate."""
    return _mutual_context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def weights_client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the context with which a worker connects to fetch weights: as for links, with ALPN."""
    context = link_client_context(credentials)
    context.set_alpn_protocols([WEIGHTS_PROTOCOL])
    return context


def under_tls(context: ssl.SSLContext, connected: socket.socket, *, is_server: bool = False) -> ssl.SSLSocket:
    """Return a TLS connection before its handshake, which takes over the socket `connected`.

    Raises:
        OSError: the peer has already reset the connection, which is then closed.
    """
    try:
        return context.wrap_socket(connected, server_side=is_server, do_handshake_on_connect=False)
    except OSError as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            half_made = frame.f_locals.get("self")
            if isinstance(half_made, ssl.SSLSocket):  # Python (3.11) leaves it open, and nobody else has it
                half_made.close()
        connected.close()
        raise


def peer_certificate(connection: ssl.SSLSocket) -> PeerCertificate:
    """Return the peer's name and serial, after the handshake; `NO_CERTIFICATE` if the peer showed none.

    Raises:
        CertificateError: the certificate carries no name of a cluster.
    """
    fields = connection.getpeercert()
    if not fields:
        return NO_CERTIFICATE
    try:
        (found,) = msgspec.convert(fields.get("subjectAltName"), tuple[tuple[str, str]])  # exactly one
        return PeerCertificate(name=PeerName.parse(found[1]), serial=int(str(fields["serialNumber"]), 16))
    except (msgspec.ValidationError, ValueError, KeyError) as error:
        raise CertificateError("the certificate of the peer does not name a cluster.") from error


def peer_name(connection: ssl.SSLSocket) -> PeerName:
    """Return the name of the peer, after the handshake of a mutual connection.

    Raises:
        CertificateError: the peer's certificate has no name of a cluster.
    """
    return peer_certificate(connection).name


def require_peer(connection: ssl.SSLSocket, expected: Collection[PeerName]) -> PeerName:
    """Return which of the expected processes the peer is; to be called before the connection is used.

    Raises:
        CertificateError: the peer is another process, such as a rank of an epoch that is over, or of an
            earlier run of the head.
    """
    name = peer_name(connection)
    if name not in expected:
        wanted = " or ".join(sorted(map(_shown, expected)))
        is_of_other_run = any(name == msgspec.structs.replace(each, run=name.run) for each in expected)
        run = " of another run of the head" if is_of_other_run else ""
        raise CertificateError(
            f"the peer is {_shown(name)}{run}, where {wanted} was expected.",
            remedy="If a worker was started twice, end one of them.",
            code="unexpected_peer",
        )
    return name


class CertifiedDialler(Welcomed):
    """The side of a link that has connected; after its handshake it waits for the welcome.

    Implements `Conversation`. With TLS 1.3 the handshake of this side ends before the other side has checked
    the certificate of this side.

    Args:
        connection: the connection after its handshake.
        expected: names that the peer may have.

    Attributes:
        peer: the name of the peer.

    Raises:
        CertificateError: the peer has another name.
    """

    def __init__(self, connection: ssl.SSLSocket, expected: Collection[PeerName]) -> None:
        super().__init__()
        self.peer = require_peer(connection, expected)


class CertifiedPeer(Welcoming):
    """The side of a link that has accepted the connection; after its handshake it sends the welcome.

    Implements `Conversation`. The certificate proves the peer, which sends nothing here. Arguments,
    attributes and errors are those of `CertifiedDialler`.
    """

    def __init__(self, connection: ssl.SSLSocket, expected: Collection[PeerName]) -> None:
        super().__init__()
        self.peer = require_peer(connection, expected)


def own_certificate_der(credentials: Credentials) -> bytes:
    """Return the certificate of a process as DER, as its peers see it."""
    return ssl.PEM_cert_to_DER_cert(credentials.certificate_pem.decode("ascii"))


def refusal_of_certificate(error: ssl.SSLError) -> JoinError | None:
    """Return the peer's refusal of our certificate, if the error is one; it may come after the handshake."""
    if error.reason in _OTHER_AUTHORITY:
        return WrongClusterError("the other side belongs to another cluster and refused our certificate.")
    if error.reason in _BAD_CERTIFICATE:
        return CertificateError("the other side refused our certificate.", remedy=_CLOCKS)
    return None


def refusal(error: OSError) -> PeerError:
    """Return the error for a user about a failed handshake or a broken connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return LinkClosedError("the other side closed the connection during the TLS handshake.")
    if not isinstance(error, ssl.SSLError):
        return LinkClosedError(f"the connection is broken: {error.strerror or error}.")
    reason = error.reason or type(error).__name__
    if reason in _NOT_TLS:
        return ProtocolError(
            "the other side does not speak TLS.",
            remedy="Check that the port is the one printed by the head, and that no proxy is in between.",
            code="not_tls",
        )
    return refusal_of_certificate(error) or ProtocolError(
        f"the TLS handshake failed: {reason.replace('_', ' ').lower()}.",
        remedy=SAME_VERSION,
        code="tls_failed",
    )


_CLOCKS = (
    "Check the clocks of both hosts, which may differ by at most two days; then join again with a token."
)
_NOT_TLS = frozenset(
    {
        *("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG"),
        *("RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "BAD_RECORD_TYPE", "UNKNOWN_PROTOCOL"),
        *("RECORD_TOO_SMALL", "ENCRYPTED_LENGTH_TOO_LONG"),
    }
)
_OTHER_AUTHORITY = frozenset({"TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR"})
_BAD_CERTIFICATE = frozenset(
    {
        *("SSLV3_ALERT_BAD_CERTIFICATE", "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
        *("SSLV3_ALERT_CERTIFICATE_REVOKED", "SSLV3_ALERT_CERTIFICATE_UNKNOWN"),
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        *("TLSV13_ALERT_CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    }
)
_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_CERT_…


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names are those of processes: `require_peer`
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _mutual_context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = _context(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    _load(context, credentials)
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Load key, certificate and authority into a context.

    OpenSSL reads keys from files only, so the key is put into a file in memory that has no name.
    """
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=credentials.authority_pem.decode("ascii"))
    with os.fdopen(os.memfd_create("penstock-key", os.MFD_CLOEXEC), "wb") as file:
        file.write(credentials.key_pem + credentials.certificate_pem)
        file.flush()
        try:
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except ssl.SSLError as error:
            raise CertificateError("the credentials of this process are damaged.") from error


def _distrust(error: ssl.SSLCertVerificationError) -> JoinError:
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        return CertificateError(
            "the certificate of the peer is not valid at this host's time.",
            remedy=_CLOCKS,
            code="certificate_expired",
        )
    return WrongClusterError(
        f"the peer is not in this cluster: {error.verify_message}.",
        remedy="Check the address; if the head has lost its state directory, join again with its new token.",
    )


def _shown(name: PeerName) -> str:
    epoch = f" in epoch {name.epoch}" if name.epoch or name.run else ""
    return f"{name.role} of {name.host}{epoch}"
