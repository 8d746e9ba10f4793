"""Makes a connected socket safe before a link or channel uses it: not at all, or by TLS 1.3.

The seam is `Secure`: another way of making a stream safe is another line of the table. Called by
`pipeline.links.stream_opening`. No torch here.

Both ends of TLS show a certificate that the cluster's authority has signed, and each compares the other's
name with the one that its host has named. The server gives out no session tickets: the end that only writes
would never read them. Of other records after the handshake only a close or an alert can come; neither needs
an answer.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock.errors import ProtocolError
from penstock.process.endpoints import PlainText, StreamSecurity, StreamSide, TlsMaterial, opener_of

Wait = Callable[[int, int], None]  # a descriptor, events of poll(2); raises at the deadline, and at the end


class Secure(Protocol):
    """Makes a stream of a connected socket."""

    def __call__(self, connected: socket.socket, wait: Wait) -> socket.socket:
        """Return the stream, which has the socket from now on.

        Args:
            connected: does not block; the caller closes it if this raises.
            wait: blocks until the socket is ready.

        Raises:
            ProtocolError, OSError: the other end is not the one that is expected, or speaks something else.
        """
        ...


def secure_by(security: StreamSecurity, side: StreamSide) -> Secure:
    """Return what makes streams of this kind.

    Args:
        security: its descriptors are read now, and stay the caller's.
        side: the dialler begins a handshake.

    Raises:
        ProtocolError: this build does not know the kind, or the material cannot be used.
    """
    return opener_of(_KINDS, security, "a stream between hosts")(security, side)


def _secure_plain(security: PlainText, side: StreamSide) -> Secure:
    return lambda connected, wait: connected


def _secure_with_tls(material: TlsMaterial, side: StreamSide) -> Secure:
    return TlsHandshake(tls_context(material, side), side, material.peer_name)


_KINDS: Mapping[type, Callable[[Any, StreamSide], Secure]] = {
    PlainText: _secure_plain,
    TlsMaterial: _secure_with_tls,
}


class TlsHandshake:
    """Wraps sockets with TLS, each for a peer of one name.

    Args:
        context: demands a certificate of the peer.
        peer_name: a DNS name that the certificate must have, letter by letter.
    """

    def __init__(self, context: ssl.SSLContext, side: StreamSide, peer_name: str) -> None:
        self._context, self._side, self._peer_name = context, side, peer_name

    def __call__(self, connected: socket.socket, wait: Wait) -> socket.socket:
        """See `Secure`."""
        wrapped = self._context.wrap_socket(
            connected, server_side=self._side == "accepter", do_handshake_on_connect=False
        )
        try:
            while (wanted := _handshake(wrapped)) != 0:
                wait(wrapped.fileno(), wanted)
            self._check_name(wrapped.getpeercert() or {})
        except BaseException:
            wrapped.close()  # it has taken the descriptor of `connected`
            raise
        return wrapped

    def _check_name(self, certificate: Mapping[str, Any]) -> None:
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
        if self._peer_name not in names:
            raise ProtocolError(
                f"the other end is {', '.join(names) or 'nobody'} by its certificate, not {self._peer_name}.",
                remedy="Let only the workers of this cluster connect to the link ports.",
            )


def _handshake(wrapped: ssl.SSLSocket) -> int:
    """Go on with a handshake; the events that it waits for, 0 when it is done."""
    try:
        wrapped.do_handshake()
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    return 0


def tls_context(material: TlsMaterial, side: StreamSide) -> ssl.SSLContext:
    """Return a context for TLS 1.3 in which both ends show certificates; raises `ProtocolError`."""
    is_server = side == "accepter"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # `TlsHandshake` compares the names of both sides alike
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0
    try:
        context.load_cert_chain(_path(material.certificate_fd), _path(material.key_fd), password=_no_password)
        context.load_verify_locations(_path(material.authority_fd))
    except OSError as error:  # of `ssl`, too
        raise ProtocolError(
            f"the certificate, key or authority of a stream between hosts cannot be used: {error}.",
            remedy="Let the worker join again.",
        ) from error
    return context


def _path(fd: int) -> str:
    """Of an open file, for a library that reads files by their paths: at each use from its beginning."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def _no_password() -> str:
    raise OSError("the key is encrypted")
