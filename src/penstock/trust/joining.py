"""Joins a worker to its head: the first time with a token, and from then on with the certificate that it got.

credentials = join_with_token(address, token, host="desk", version=…, path=…)     once
head = rejoin(address, credentials, version=…, path=…)                            at every connection
head.connection                                                                   mutual TLS 1.3
connection = connect_for_weights(address, credentials, head.name)                 a second connection
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.config.hosts import SAME_VERSION
from penstock.errors import (
    CertificateError,
    LinkClosedError,
    PeerError,
    PenstockError,
    ProtocolError,
    WaitTimeoutError,
)
from penstock.trust.admission import CERTIFICATE_REVOKED
from penstock.trust.cancellation import hold_nothing
from penstock.trust.conversation import Conversation
from penstock.trust.credentials import Credentials
from penstock.trust.door import shown_address
from penstock.trust.join_token import JoinToken
from penstock.trust.peer_names import HEAD_ROLE, PeerName
from penstock.trust.tls import (
    WEIGHTS_PROTOCOL,
    CertifiedDialler,
    link_client_context,
    peer_name,
    refusal,
    token_client_context,
    under_tls,
    weights_client_context,
)
from penstock.trust.worker_join import (
    CertificateClaim,
    CertificateVisit,
    Claim,
    TokenClaim,
    TokenVisit,
    WorkerJoin,
)

Address = tuple[str, int]
Hold = Callable[[socket.socket], None]  # such as `Cancellation.add`: gets each socket before a wait at it
TIMEOUT_S = 10.0  # for a whole join
REFUSED_BY_HEAD = "refused_by_head"  # code of a refusal in TLS by a head that has proved itself


class JoinedHead:
    """The head as a worker knows it after the worker has joined.

    Attributes:
        connection: the connection to the head, which blocks; the caller closes it.
        name: name of the head's process.
        credentials: credentials of this worker from now on; new ones if it was time to renew them.
        address: address and port at which the head was joined.
    """

    def __init__(
        self, connection: ssl.SSLSocket, name: PeerName, credentials: Credentials, address: Address
    ) -> None:
        self.connection = connection
        self.name = name
        self.credentials = credentials
        self.address = address


def join_with_token(
    address: Address,
    token: JoinToken,
    *,
    host: str,
    version: str,
    path: Path,
    timeout_s: float = TIMEOUT_S,
    hold: Hold = hold_nothing,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Credentials:
    """Get a certificate for this host, and keep it in a private file.

    Args:
        address: host name or IP address of the head, and port.
        token: the join token.
        host: name that this worker wants for its host.
        version: version of Penstock.
        path: path of the file for the credentials.
        timeout_s: seconds for the whole join.
        hold: gets the sockets of this call, so that another thread can end it.
        clock: monotonic seconds.
        wall_clock: Unix time.

    Raises:
        JoinError: the head, or this worker, refuses; the type says why (`penstock.errors`).
        PeerError: the head cannot be reached, does not answer in time, or is not the head of a cluster.
        UsageError: the file cannot be written, or the library is missing.
    """
    claim = TokenClaim(token, host, version)
    keep = _keeping(path)
    with _joined(address, token_client_context(), claim, keep, timeout_s, clock, wall_clock, hold) as head:
        head.connection.close()
    return head.credentials


def visit(
    address: Address,
    claim: TokenVisit | CertificateVisit,
    context: ssl.SSLContext,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> JoinedHead:
    """Connect to the head to look whether this host could join; nothing is kept, and no token is used up.

    Args:
        context: `token_client_context` with a token, `link_client_context` with a certificate.

    Raises:
        As `join_with_token`.
    """
    with _joined(address, context, claim, _keep_nothing, timeout_s, clock, wall_clock) as head:
        head.connection.settimeout(None)
    return head


def rejoin(
    address: Address,
    credentials: Credentials,
    *,
    version: str,
    path: Path,
    timeout_s: float = TIMEOUT_S,
    hold: Hold = hold_nothing,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    claimed: type[CertificateClaim] = CertificateClaim,
) -> JoinedHead:
    """Connect to the head with the certificate of this host.

    Args:
        credentials: credentials of this worker.
        version: version of Penstock.
        path: path of the file that keeps the credentials; it is written if they are renewed.
        claimed: how the worker proves itself; `KeptCertificateClaim` renews nothing.
        timeout_s, hold, clock, wall_clock: as in `join_with_token`.

    Raises:
        As `join_with_token`; CertificateError if the certificate is revoked or expired (`needs_token`).
    """
    claim = claimed(credentials, version, wall_clock())
    context = link_client_context(credentials)
    keep = _keeping(path, kept=[credentials])
    with _joined(address, context, claim, keep, timeout_s, clock, wall_clock, hold) as head:
        head.connection.settimeout(None)
    return head


def needs_token(error: PeerError) -> bool:
    """Return whether the head has proved itself and no longer accepts the certificate of this host.

    All other errors of `rejoin` can come from anybody on the network, or pass by themselves.
    """
    return error.code in (CERTIFICATE_REVOKED, REFUSED_BY_HEAD)


def connect_for_weights(
    address: Address,
    credentials: Credentials,
    head: PeerName,
    *,
    timeout_s: float = TIMEOUT_S,
    hold: Hold = hold_nothing,
    clock: Callable[[], float] = time.monotonic,
) -> ssl.SSLSocket:
    """Open one more connection to the head, over which this host fetches weights.

    Args:
        address: host name or IP address of the head, and port.
        credentials: credentials of this worker.
        head: name of the head that this host has joined.
        timeout_s, hold, clock: as in `join_with_token`.

    Returns:
        A connection that blocks; the caller closes it.

    Raises:
        JoinError: the head, or this worker, refuses.
        PeerError: the head cannot be reached, does not answer in time, or gives no weights.
    """
    deadline = clock() + timeout_s
    with _explained(address), contextlib.ExitStack() as at_failure:
        connection = _secured(address, weights_client_context(credentials), deadline, clock, hold)
        at_failure.callback(connection.close)
        if connection.selected_alpn_protocol() != WEIGHTS_PROTOCOL:
            raise ProtocolError(
                "the head does not serve weights to workers of this version.",
                remedy=SAME_VERSION,
                code="no_weights",
            )
        converse(connection, CertifiedDialler(connection, {head}), deadline, clock)
        connection.settimeout(None)
        at_failure.pop_all()
    return connection


def _keeping(path: Path, kept: Sequence[Credentials] = ()) -> Callable[[Credentials], None]:
    """Return a function that saves credentials in a file, except those in `kept`, which are there already.

    A host can therefore come back with its credentials even if the disk is full.
    """
    return lambda credentials: None if credentials in kept else credentials.save(path)


def _keep_nothing(credentials: Credentials) -> None:
    """Do nothing: a visit leaves nothing behind."""


@contextlib.contextmanager
def _joined(
    address: Address,
    context: ssl.SSLContext,
    claim: Claim,
    keep: Callable[[Credentials], None],
    timeout_s: float,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    hold: Hold = hold_nothing,
) -> Iterator[JoinedHead]:
    """Connect and join; the connection is closed if this fails, or the `with` block does."""
    deadline = clock() + timeout_s
    kept: list[Credentials] = []

    def store(credentials: Credentials) -> None:
        keep(credentials)
        kept.append(credentials)

    with _explained(address), contextlib.ExitStack() as at_failure:
        connection = _secured(address, context, deadline, clock, hold)
        at_failure.callback(connection.close)
        certificate = connection.getpeercert(binary_form=True)
        if certificate is None:  # no version of TLS lets a server have none
            raise ProtocolError("the head showed no certificate.", code="tls_failed")
        conversation = WorkerJoin(claim, certificate, store, wall_clock())
        proved = peer_name(connection)  # read now: after an alert TLS does not know its peer any more
        try:
            converse(connection, conversation, deadline, clock)
        except ssl.SSLError as error:
            raise _refusal_after_handshake(proved, error) from error
        yield JoinedHead(connection, conversation.head, kept[-1], address)
        at_failure.pop_all()


def _secured(
    address: Address, context: ssl.SSLContext, deadline: float, clock: Callable[[], float], hold: Hold
) -> ssl.SSLSocket:
    """Connect and do the handshake of TLS."""
    plain = _connected(address, deadline, clock, hold)
    with contextlib.ExitStack() as at_failure:
        at_failure.callback(plain.close)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = under_tls(context, plain)
        at_failure.callback(connection.close)
        hold(connection)
        connection.settimeout(_left_s(deadline, clock))
        connection.do_handshake()
        at_failure.pop_all()
    return connection


def _connected(address: Address, deadline: float, clock: Callable[[], float], hold: Hold) -> socket.socket:
    """Connect to the first of a name's addresses that answers; each gets a share of the time that is left."""
    places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for num_left in range(len(places), 0, -1):
        family, kind, protocol, _, place = places[-num_left]
        with contextlib.ExitStack() as at_failure:
            try:
                dialling = at_failure.enter_context(socket.socket(family, kind, protocol))
                dialling.settimeout(_left_s(deadline, clock) / num_left)
                hold(dialling)
                dialling.connect(place)
            except OSError:
                if num_left == 1:
                    raise
            else:
                at_failure.pop_all()
                return dialling
    raise OSError("the name has no address")


def _refusal_after_handshake(proved: PeerName, error: ssl.SSLError) -> PeerError:
    """Return the error that the other side means by ending TLS after the handshake.

    In TLS 1.3 a server refuses the certificate of its client after the client's handshake. The server has
    then proved itself, and its alert is encrypted. During the handshake anybody could send an alert.

    Args:
        proved: name of the other side, if the handshake has checked it; else a name without a role.
        error: the error of TLS.
    """
    refused = refusal(error)
    if isinstance(refused, CertificateError) and proved.role == HEAD_ROLE:
        return CertificateError(refused.message, remedy=refused.remedy, code=REFUSED_BY_HEAD)
    return refused


def converse(
    connection: socket.socket,
    conversation: Conversation,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Carry a conversation to its end over a socket that blocks; the timeout of the socket is changed.

    Args:
        deadline: time by `clock` at which the conversation must have ended.

    Raises:
        PenstockError: one side refuses the other.
        TimeoutError, OSError: the deadline has passed, or the connection is broken.
    """
    try:
        while True:
            connection.settimeout(_left_s(deadline, clock))
            connection.sendall(conversation.take_outgoing())
            if not conversation.wanted:
                return
            data = connection.recv(conversation.wanted)
            if data:
                conversation.receive(data)
            else:
                conversation.end_of_stream()
    except PenstockError:
        with contextlib.suppress(OSError):
            connection.sendall(conversation.take_outgoing())
        raise
    finally:
        if conversation.wanted:
            conversation.abandon()


def _left_s(deadline: float, clock: Callable[[], float]) -> float:
    left_s = deadline - clock()
    if left_s <= 0:
        raise TimeoutError
    return left_s


@contextlib.contextmanager
def _explained(address: Address) -> Iterator[None]:
    """Turn errors of sockets in the `with` block into errors that name the head."""
    shown = shown_address(address)
    try:
        yield
    except PenstockError:  # raised as it is; some of these are a TimeoutError too
        raise
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"the head at {shown} did not answer in time.",
            remedy="Check the address, and that the head's firewall has this port open.",
        ) from error
    except ConnectionRefusedError as error:
        raise LinkClosedError(
            f"no program listens at {shown}.", remedy="Start the head first, with --listen-workers."
        ) from error
    except ssl.SSLError as error:
        raise refusal(error) from error
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of DNS has such a part
        raise LinkClosedError(
            f"the head at {shown} cannot be reached: {getattr(error, 'strerror', None) or error}.",
            remedy="Check the address, and that both hosts are on one network.",
        ) from error
