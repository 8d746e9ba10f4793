"""TLS between processes of a cluster: version 1.3, both sides known, and each only in its own place."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from clusters import WAIT_S, Cluster
from penstock.errors import CertificateError, LinkClosedError, PenstockError, ProtocolError, WrongClusterError
from penstock.trust import certificates
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import rank_role
from penstock.trust.tls import (
    NO_CERTIFICATE,
    CertifiedDialler,
    CertifiedPeer,
    join_server_context,
    link_client_context,
    link_server_context,
    peer_certificate,
    peer_name,
    refusal,
    require_peer,
    token_client_context,
    under_tls,
)
from streams import reset, tcp_pair


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head")


Ends = tuple[socket.socket | OSError, socket.socket | OSError]


@contextmanager
def connected(
    server_context: ssl.SSLContext, client: Callable[[socket.socket], socket.socket]
) -> Iterator[Ends]:
    """Both sides after their handshakes, or what each of them ended with."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        results: list[ssl.SSLSocket | OSError] = []

        def accept() -> None:
            accepted, _ = listener.accept()
            accepted.settimeout(WAIT_S)
            try:
                results.append(server_context.wrap_socket(accepted, server_side=True))
            except OSError as error:
                accepted.close()
                results.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        plain = socket.create_connection(listener.getsockname(), timeout=WAIT_S)
        reached: socket.socket | OSError
        try:
            reached = client(plain)
        except OSError as error:
            plain.close()
            reached = error
        thread.join(WAIT_S)
        try:
            yield results[0], reached
        finally:
            for side in (results[0], reached):
                if isinstance(side, socket.socket):
                    side.close()


def test_a_connection_that_its_peer_has_reset_is_refused_and_leaves_nothing_open(cluster: Cluster) -> None:
    dialled, accepted = tcp_pair()
    reset(dialled)
    place = accepted.fileno()
    with pytest.raises(ConnectionResetError) as refused:
        under_tls(link_server_context(cluster.head_credentials), accepted, is_server=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(place)  # closed while somebody still has the error, and with it all that was half made
    assert refused.value.__traceback__ is not None


def opened(side: socket.socket | OSError) -> ssl.SSLSocket:
    assert isinstance(side, ssl.SSLSocket), repr(side)
    return side


def link(server: Credentials, client: Credentials) -> AbstractContextManager[Ends]:
    return connected(link_server_context(server), link_client_context(client).wrap_socket)


def test_r15_two_ranks_know_host_rank_and_epoch_of_each_other(cluster: Cluster) -> None:
    one, two = cluster.process("desk", rank_role(0), 4), cluster.process("tower", rank_role(1), 4)
    with link(cluster.identity.link_credentials(one), cluster.identity.link_credentials(two)) as (
        server,
        client,
    ):
        assert opened(server).version() == "TLSv1.3"
        assert peer_name(opened(server)) == two
        assert require_peer(opened(client), {one}) == one
        assert CertifiedPeer(opened(server), [two]).peer == two


@pytest.mark.parametrize(
    ("host", "role", "epoch"),
    [("desk", "rank-0", 3), ("desk", "rank-1", 4), ("other", "rank-0", 4), ("desk", "agent", 0)],
)
def test_r15_a_peer_of_another_host_rank_or_epoch_is_refused(
    cluster: Cluster, host: str, role: str, epoch: int
) -> None:
    expected = cluster.process("desk", rank_role(0), 4)
    client_credentials = cluster.link_credentials("tower", rank_role(1), 4)
    with link(cluster.link_credentials(host, role, epoch), client_credentials) as (_, client):
        with pytest.raises(CertificateError, match="where rank-0 of desk in epoch 4 was expected") as caught:
            require_peer(opened(client), [expected])
        assert caught.value.code == "unexpected_peer"


def test_r15_a_certificate_of_an_earlier_run_of_the_head_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Of the same host, rank and epoch, and signed by the same authority."""
    stolen = cluster.link_credentials("desk", rank_role(1), 0)
    restarted = Cluster(cluster.directory)
    present, own = restarted.process("desk", rank_role(1), 0), restarted.link_credentials("tower", "core", 0)
    with link(own, restarted.link_credentials("desk", rank_role(1), 0)) as (server, _):
        assert CertifiedPeer(opened(server), [present]).peer == present
    with link(own, stolen) as (server, _):
        with pytest.raises(CertificateError, match="in epoch 0 of another run of the head, where") as caught:
            CertifiedPeer(opened(server), [present])
        assert caught.value.code == "unexpected_peer"
    with link(stolen, own) as (_, client), pytest.raises(CertificateError, match="of another run"):
        CertifiedDialler(opened(client), [present])


def test_r15_there_are_no_session_tickets(cluster: Cluster) -> None:
    with link(cluster.link_credentials("a", "rank-0", 1), cluster.link_credentials("b", "rank-1", 1)) as ends:
        server, client = map(opened, ends)
        server.sendall(b"x")
        assert client.recv(1) == b"x"
        assert client.session is None or not client.session.has_ticket
        assert not client.session_reused


def test_r15_a_link_without_a_certificate_is_refused(cluster: Cluster) -> None:
    context = link_server_context(cluster.link_credentials("a", "rank-0", 1))
    with connected(context, token_client_context().wrap_socket) as (server, client):
        assert isinstance(refusal(as_error(server)), CertificateError)
        with pytest.raises(ssl.SSLError) as caught:
            opened(client).recv(1)
        assert isinstance(refusal(caught.value), CertificateError)


def as_error(side: object) -> OSError:
    assert isinstance(side, OSError), repr(side)
    return side


def test_r15_another_cluster_is_refused_on_both_sides(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(tmp_path / "other")
    with link(cluster.link_credentials("a", "rank-0", 1), other.link_credentials("b", "rank-1", 1)) as (
        server,
        client,
    ):
        assert isinstance(refusal(as_error(client)), WrongClusterError)
        assert isinstance(refusal(as_error(server)), WrongClusterError)


def test_r15_a_client_of_another_cluster_learns_of_it(cluster: Cluster, tmp_path: Path) -> None:
    """One that trusts this head, and shows a certificate of its own authority."""
    other = Cluster(tmp_path / "other")
    mine, theirs = other.link_credentials("b", "rank-1", 1), cluster.link_credentials("a", "rank-0", 1)
    context = link_client_context(mine)
    context.load_verify_locations(cadata=theirs.authority_pem.decode())
    with connected(link_server_context(theirs), context.wrap_socket) as (server, client):
        assert isinstance(refusal(as_error(server)), WrongClusterError)
        with pytest.raises(ssl.SSLError) as caught:
            opened(client).recv(1)
        assert isinstance(refusal(caught.value), WrongClusterError)


def test_r15_an_expired_certificate_is_refused_with_a_word_about_clocks(cluster: Cluster) -> None:
    cluster.wall_clock.seconds -= 5 * certificates.HOST_LIFE_S
    old = cluster.link_credentials("a", "rank-0", 1)
    with link(old, old) as (_, client):
        error = refusal(as_error(client))
    assert isinstance(error, CertificateError)
    assert "clocks" in error.remedy


def test_r15_nothing_older_than_tls_1_3_is_spoken(cluster: Cluster) -> None:
    credentials = cluster.link_credentials("a", "rank-0", 1)
    context = link_client_context(credentials)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with connected(link_server_context(credentials), context.wrap_socket) as (server, client):
        assert isinstance(refusal(as_error(server)), ProtocolError)
        assert isinstance(refusal(as_error(client)), ProtocolError)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"penstock link 1\n" * 8]
)
def test_r15_plain_tcp_is_refused_by_name(cluster: Cluster, sent: bytes) -> None:
    def plain(client: socket.socket) -> socket.socket:
        client.sendall(sent)
        return client

    with connected(link_server_context(cluster.link_credentials("a", "rank-0", 1)), plain) as (server, _):
        error = refusal(as_error(server))
    assert isinstance(error, ProtocolError)
    assert error.code == "not_tls"


def test_a_peer_that_leaves_in_the_handshake_is_named_so(cluster: Cluster) -> None:
    def leave(client: socket.socket) -> socket.socket:
        client.shutdown(socket.SHUT_WR)
        return client

    with connected(link_server_context(cluster.link_credentials("a", "rank-0", 1)), leave) as (server, _):
        assert isinstance(refusal(as_error(server)), LinkClosedError)


def test_a_worker_without_a_certificate_reaches_the_join_and_one_with_it_is_known(cluster: Cluster) -> None:
    context = join_server_context(cluster.head_credentials)
    with connected(context, token_client_context().wrap_socket) as (server, _):
        assert peer_certificate(opened(server)) is NO_CERTIFICATE
    credentials = cluster.joined("desk")
    with connected(context, link_client_context(credentials).wrap_socket) as (server, client):
        found = peer_certificate(opened(server))
        assert found.name == cluster.name("desk")
        assert found.serial == certificates.read_certificate(credentials.certificate_pem)[0]
        assert peer_name(opened(client)).role == "head"


def test_damaged_credentials_are_a_typed_error(cluster: Cluster) -> None:
    one, two = cluster.link_credentials("a", "rank-0", 1), cluster.link_credentials("a", "rank-0", 1)
    mixed = Credentials(
        key_pem=one.key_pem, certificate_pem=two.certificate_pem, authority_pem=one.authority_pem
    )
    with pytest.raises(CertificateError):
        link_client_context(mixed)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "Connection reset by peer"), OSError("odd"), BrokenPipeError()]
)
def test_a_broken_connection_is_a_typed_error(error: OSError) -> None:
    assert isinstance(refusal(error), LinkClosedError)
    assert isinstance(refusal(error), PenstockError)
