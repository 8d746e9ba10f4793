"""Joining over 127.0.0.1, from a token to a mutual connection: real sockets, and a thread for the head."""

from __future__ import annotations

import io
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusters import HEAD_HOST, VERSION, WAIT_S, Cluster, answering, served
from penstock.errors import (
    CertificateError,
    JoinError,
    JoinTokenError,
    LinkClosedError,
    NameTakenError,
    OtherVersionError,
    PenstockError,
    ProtocolError,
    UsageError,
    WaitTimeoutError,
    WrongClusterError,
)
from penstock.trust.certificates import HOST_LIFE_S, new_key, signing_request
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import JoinedHead, join_with_token, rejoin
from penstock.trust.tls import join_server_context


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head", max_joins=2)


class Desk:
    """A worker with its state directory."""

    def __init__(self, directory: Path, host: str = "desk", version: str = VERSION) -> None:
        self.path = directory / host / "credentials"
        self._host, self._version = host, version

    def join(self, address: tuple[str, int], token: JoinToken) -> Credentials:
        return join_with_token(
            address, token, host=self._host, version=self._version, path=self.path, timeout_s=WAIT_S
        )

    def rejoin(self, address: tuple[str, int]) -> JoinedHead:
        credentials = Credentials.load(self.path)
        return rejoin(address, credentials, version=self._version, path=self.path, timeout_s=WAIT_S)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_r15_from_a_token_to_a_connection_that_both_sides_have_proved(cluster: Cluster, desk: Desk) -> None:
    with served(cluster) as door:
        desk.join(door.address, cluster.token)
        head = desk.rejoin(door.address)
        door.await_news(lambda: door.entered == ["desk"])
        with head.connection:
            assert head.name == cluster.name(HEAD_HOST, "head")
            assert head.connection.version() == "TLSv1.3"
            theirs = door.connections[-1]
            theirs.setblocking(True)
            theirs.settimeout(WAIT_S)
            theirs.sendall(b"from the head")
            assert head.connection.recv(100) == b"from the head"
            head.connection.sendall(b"from the worker")
            assert theirs.recv(100) == b"from the worker"
    assert door.refused == []


def test_r15_a_worker_comes_back_to_a_head_that_was_started_again(
    cluster: Cluster, desk: Desk, tmp_path: Path
) -> None:
    with served(cluster) as door:
        desk.join(door.address, cluster.token)
        desk.rejoin(door.address).connection.close()
    cluster.book.revoke_all_tokens()
    with served(Cluster(tmp_path / "head")) as door:
        desk.rejoin(door.address).connection.close()
        door.await_news(lambda: door.entered == ["desk"])


@contextmanager
def refused(
    cluster: Cluster, error: type[PenstockError], version: str = VERSION
) -> Iterator[tuple[str, int]]:
    """The block ends with an error, and the head reports the same one; both go on."""
    with served(cluster, version) as door:
        with pytest.raises(error) as caught:
            yield door.address
        door.await_news(lambda: len(door.refused) == 1)
        assert str(door.refused[0]) == str(caught.value)
        assert cluster.token.text() not in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 64, "a..b"])
def test_r15_a_name_that_no_resolver_takes_is_named(cluster: Cluster, desk: Desk, name: str) -> None:
    with pytest.raises(LinkClosedError, match=f"the head at {name}:7700 cannot be reached: .*label"):
        desk.join((name, 7700), cluster.token)


def test_r15_a_wrong_token_is_refused_on_both_sides(cluster: Cluster, desk: Desk) -> None:
    with refused(cluster, JoinTokenError) as address:
        desk.join(address, JoinToken.new(cluster.identity.public_key))
    assert not desk.path.exists()


def test_r15_an_expired_token_is_refused_on_both_sides(cluster: Cluster, desk: Desk) -> None:
    cluster.wall_clock.seconds += 3600
    with refused(cluster, JoinTokenError) as address:
        desk.join(address, cluster.token)


def test_r15_a_used_token_is_refused_on_both_sides(cluster: Cluster, tmp_path: Path) -> None:
    cluster.joined("one")
    cluster.joined("two")
    with refused(cluster, JoinTokenError) as address:
        Desk(tmp_path, "three").join(address, cluster.token)


def test_r15_a_revoked_token_is_refused_on_both_sides(cluster: Cluster, desk: Desk) -> None:
    cluster.book.revoke_all_tokens()
    with refused(cluster, JoinTokenError) as address:
        desk.join(address, cluster.token)


def test_a_name_that_is_in_use_is_refused_on_both_sides(cluster: Cluster, desk: Desk) -> None:
    cluster.connected.enter("desk")
    with refused(cluster, NameTakenError) as address:
        desk.join(address, cluster.token)


def test_another_version_is_refused_on_both_sides(cluster: Cluster, desk: Desk) -> None:
    with refused(cluster, OtherVersionError, version="0.2.0") as address:
        desk.join(address, cluster.token)


def test_r15_a_stolen_certificate_is_refused_once_it_is_revoked(cluster: Cluster, desk: Desk) -> None:
    cluster.joined("other")
    with served(cluster) as door:
        desk.join(door.address, cluster.token)
    cluster.book.revoke_host("desk")
    with refused(cluster, CertificateError) as address:
        desk.rejoin(address)


def test_r15_an_expired_certificate_is_refused_on_both_sides(cluster: Cluster, desk: Desk) -> None:
    cluster.wall_clock.seconds -= 5 * HOST_LIFE_S
    key = new_key()
    certificate = cluster.identity.sign_host(signing_request(key), "desk")
    authority = cluster.identity.certificate_pem
    Credentials(key_pem=key, certificate_pem=certificate, authority_pem=authority).save(desk.path)
    cluster.wall_clock.seconds += 5 * HOST_LIFE_S
    with served(cluster) as door:
        with pytest.raises(CertificateError, match="refused our certificate") as caught:
            desk.rejoin(door.address)
        door.await_news(lambda: len(door.refused) == 1)
        assert door.refused[0].code == "certificate_expired"
    assert "clocks" in caught.value.remedy


def test_r15_a_head_that_runs_for_longer_than_its_certificate_is_valid_lets_workers_in(
    cluster: Cluster, desk: Desk
) -> None:
    """OpenSSL looks at the real clock, and the head starts some years ago."""
    cluster.wall_clock.seconds -= 5 * HOST_LIFE_S
    with served(cluster) as door:
        cluster.wall_clock.seconds += 5 * HOST_LIFE_S
        cluster.book.allow(cluster.token, 1, 6 * HOST_LIFE_S)
        desk.join(door.address, cluster.token)
        desk.rejoin(door.address).connection.close()
        door.await_news(lambda: door.entered == ["desk"])


def test_r15_a_head_of_another_cluster_gets_no_word(cluster: Cluster, desk: Desk, tmp_path: Path) -> None:
    with served(Cluster(tmp_path / "other")) as door:
        with pytest.raises(WrongClusterError, match="nothing was sent"):
            desk.join(door.address, cluster.token)
        door.await_news(lambda: len(door.refused) == 1)
        assert isinstance(door.refused[0], JoinError)


def test_r15_a_certificate_of_another_cluster_gets_nowhere(
    cluster: Cluster, desk: Desk, tmp_path: Path
) -> None:
    with served(cluster) as door:
        desk.join(door.address, cluster.token)
    with served(Cluster(tmp_path / "other")) as door:
        with pytest.raises(WrongClusterError):
            desk.rejoin(door.address)
        door.await_news(lambda: len(door.refused) == 1)
        assert isinstance(door.refused[0], WrongClusterError)


def test_r15_another_worker_cannot_pass_for_the_head(cluster: Cluster, desk: Desk, tmp_path: Path) -> None:
    """It has a certificate of the cluster, good for servers too."""
    with served(cluster) as door:
        desk.join(door.address, cluster.token)
    rogue = Cluster(tmp_path / "head")
    own = cluster.joined("rogue")
    rogue.identity.head_credentials = lambda host: own  # type: ignore[method-assign]
    with served(rogue) as door, pytest.raises(WrongClusterError):
        desk.rejoin(door.address)


# --- heads that are none --------------------------------------------------------------------------


def test_a_server_without_tls_is_named_so(cluster: Cluster, desk: Desk) -> None:
    def http(accepted: socket.socket) -> None:
        accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        accepted.recv(1 << 16)

    with answering(http) as address, pytest.raises(ProtocolError) as caught:
        desk.join(address, cluster.token)
    assert caught.value.code == "not_tls"


def test_a_server_that_hangs_up_is_named_so(cluster: Cluster, desk: Desk) -> None:
    with answering(lambda accepted: None) as address, pytest.raises(LinkClosedError):
        desk.join(address, cluster.token)


def test_a_server_that_says_nothing_is_left_in_time(cluster: Cluster, desk: Desk) -> None:
    """The clock of the worker passes its deadline when the handshake is over."""
    ticks = iter([0.0, 0.0, 0.0, 11.0])  # to begin, connect, greet and join
    with served(cluster) as door, pytest.raises(WaitTimeoutError, match="did not answer in time"):
        join_with_token(
            door.address,
            cluster.token,
            host="desk",
            version=VERSION,
            path=desk.path,
            timeout_s=10,
            clock=lambda: next(ticks),
        )


def test_where_nobody_listens_the_head_is_missing(cluster: Cluster, desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(LinkClosedError, match=r"no program listens at 127\.0\.0\.1"):
        desk.join(address, cluster.token)


def test_r15_nothing_is_said_to_a_tls_server_that_speaks_otherwise(cluster: Cluster, desk: Desk) -> None:
    context = join_server_context(cluster.head_credentials)
    heard: list[bytes] = []

    def garbage(accepted: socket.socket) -> None:
        with context.wrap_socket(accepted, server_side=True) as connection:
            connection.sendall(b"\x00" * 64)
            heard.append(connection.recv(100))

    with answering(garbage) as address, pytest.raises(ProtocolError) as caught:
        desk.join(address, cluster.token)
    assert caught.value.code == "garbage"
    assert heard == [b""]


# --- what must never be seen ----------------------------------------------------------------------


def test_r15_the_token_is_in_no_log_error_or_file_but_its_own(
    cluster: Cluster, desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = io.StringIO()
    with served(cluster) as door:
        desk.join(door.address, cluster.token)
        with pytest.raises(PenstockError) as caught:
            desk.join(door.address, JoinToken.new(b"another key"))
        print(repr(cluster.token), caught.value, caught.getrepr(style="short"), file=seen)
    seen.write(caplog.text)
    text = seen.getvalue().encode() + b"".join(
        path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
    secret = cluster.token.text().replace("-", "")[1:27]  # 130 bits
    assert secret.encode() not in text.replace(b"-", b"")
    assert cluster.token._secret not in text


def test_a_worker_that_cannot_keep_its_certificate_costs_no_use(cluster: Cluster, tmp_path: Path) -> None:
    bad = Desk(tmp_path, "desk")
    bad.path.parent.mkdir(mode=0o755)
    with served(cluster) as door:
        with pytest.raises(UsageError, match="other users have access"):
            bad.join(door.address, cluster.token)
        door.await_news(lambda: len(door.refused) == 1)
        bad.path.parent.chmod(0o700)
        bad.join(door.address, cluster.token)
        Desk(tmp_path, "other").join(door.address, cluster.token)
    assert cluster.book.hosts() == ["desk", "other"]


def test_workers_join_beside_peers_that_do_not(cluster: Cluster, tmp_path: Path) -> None:
    with served(cluster) as door:
        strangers = [socket.create_connection(door.address, timeout=WAIT_S) for _ in range(20)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(b"\x16\x03\x01"[: number % 4])
        for host in ("one", "two"):
            Desk(tmp_path, host).join(door.address, cluster.token)
        for stranger in strangers:
            stranger.close()
    assert cluster.book.hosts() == ["one", "two"]


def test_a_certificate_in_the_handshake_is_asked_for_and_not_forced(cluster: Cluster) -> None:
    assert join_server_context(cluster.head_credentials).verify_mode == ssl.CERT_OPTIONAL
