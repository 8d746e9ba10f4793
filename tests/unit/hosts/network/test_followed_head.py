"""A head that has another address than before: its workers need no token again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, served
from penstock.config.hosts import own_version
from penstock.errors import (
    CertificateError,
    JoinTokenError,
    LinkClosedError,
    NameTakenError,
    PeerError,
    ProtocolError,
    WaitTimeoutError,
    WrongClusterError,
)
from penstock.hosts.local_process import Descriptor
from penstock.hosts.network.followed_head import FollowedHead
from penstock.hosts.station import WorkerSettings
from penstock.hosts.worker import Worker, credentials_path
from penstock.process.link_ports import PortRange
from penstock.trust.admission import CERTIFICATE_REVOKED
from penstock.trust.cancellation import Cancellation
from penstock.trust.certificates import HOST_LIFE_S, new_key, signing_request
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address, JoinedHead
from penstock.trust.membership import Membership
from penstock.trust.token_prompt import GivenTokens

BEFORE, NOW = ("10.0.0.9", 7700), ("127.0.0.1", 1)  # at port 1 nobody listens


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head", max_joins=2)


@pytest.fixture
def stop() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


def run_worker(directory: Path, token: JoinToken, stop: int) -> None:
    """Run a worker named desk, whose head is not there, so that it ends at once."""
    path = directory / "token"
    path.write_text(token.text())
    path.chmod(0o600)
    settings = WorkerSettings(
        head=NOW,
        name="desk",
        state=directory,
        address="127.0.0.1",
        ports=PortRange(0, 0),
        away_limit_s=1e-9,
    )
    with contextlib.suppress(LinkClosedError):  # raised where it has no certificate
        Worker(settings, GivenTokens(path), lambda _: None, Descriptor(stop)).run()


def has_certificate(directory: Path, address: tuple[str, int]) -> bool:
    return credentials_path(directory, address, "desk").exists()


def test_g1_the_certificate_goes_with_the_head_to_its_new_address(
    cluster: Cluster, tmp_path: Path, stop: int
) -> None:
    joined = cluster.joined("desk")
    joined.save(credentials_path(tmp_path, BEFORE, "desk"))
    (tmp_path / "worker" / "damaged").write_bytes(b"?")
    run_worker(tmp_path, cluster.token, stop)
    assert Credentials.load(credentials_path(tmp_path, NOW, "desk")) == joined
    assert not has_certificate(tmp_path, BEFORE)


@pytest.mark.parametrize("host", ["my_desk", "attic"])
def test_g1_the_certificate_of_another_host_stays(
    cluster: Cluster, tmp_path: Path, stop: int, host: str
) -> None:
    """Hosts may have one state directory, such as in a home that all of them mount."""
    cluster.joined(host).save(credentials_path(tmp_path, BEFORE, host))
    run_worker(tmp_path, cluster.token, stop)
    assert not has_certificate(tmp_path, NOW)
    assert credentials_path(tmp_path, BEFORE, host).exists()


def test_g1_the_certificate_of_another_cluster_stays(cluster: Cluster, tmp_path: Path, stop: int) -> None:
    cluster.joined("desk").save(credentials_path(tmp_path, BEFORE, "desk"))
    run_worker(tmp_path, Cluster(tmp_path / "other").token, stop)
    assert has_certificate(tmp_path, BEFORE)
    assert not has_certificate(tmp_path, NOW)


def test_g1_a_certificate_for_the_address_is_kept(cluster: Cluster, tmp_path: Path, stop: int) -> None:
    for address in (BEFORE, NOW):
        made = cluster.joined("desk")
        made.save(credentials_path(tmp_path, address, "desk"))
        cluster.connected.leave("desk")
    run_worker(tmp_path, cluster.token, stop)
    assert has_certificate(tmp_path, BEFORE)
    assert Credentials.load(credentials_path(tmp_path, NOW, "desk")) == made


@pytest.mark.parametrize("newest", [0, 1])
def test_g1_of_several_certificates_the_newest_goes_with_the_head(
    cluster: Cluster, tmp_path: Path, stop: int, newest: int
) -> None:
    made: list[Credentials] = []
    for place in range(2):
        key, age_s = new_key(), 0.0 if place == newest else 1.1 * HOST_LIFE_S
        cluster.wall_clock.seconds -= age_s
        certificate = cluster.identity.sign_host(signing_request(key), "desk")
        cluster.wall_clock.seconds += age_s
        authority = cluster.identity.certificate_pem
        made.append(Credentials(key_pem=key, certificate_pem=certificate, authority_pem=authority))
        made[place].save(credentials_path(tmp_path, (f"10.0.0.{place}", 7700), "desk"))
    run_worker(tmp_path, cluster.token, stop)
    assert Credentials.load(credentials_path(tmp_path, NOW, "desk")) == made[newest]


def test_g1_a_head_is_joined_where_a_search_finds_it(cluster: Cluster, tmp_path: Path) -> None:
    """And is dialled there from then on, so that no further search is needed."""
    path = credentials_path(tmp_path, BEFORE, "desk")
    cluster.joined("desk").save(path)
    said: list[str] = []
    found: list[Address] = []
    with served(cluster, own_version()) as door:
        membership = Membership("desk", path, GivenTokens(None), said.append)
        head = FollowedHead(membership, NOW, lambda *_: found.pop(), said.append)
        found.append(door.address)
        for num_joined in (1, 2):
            joined = head.join(Cancellation())
            assert joined.address == door.address
            joined.connection.close()
            door.await_news(lambda num_joined=num_joined: door.entered == ["desk"] * num_joined)  # type: ignore[misc]
            cluster.connected.leave("desk")
    assert said == [f"the head has moved to 127.0.0.1:{door.address[1]}"]


class StandInMembership:
    """The membership of a host that cannot join."""

    def __init__(self, error: PeerError, cluster: str = "a" * 32) -> None:
        self.cluster = cluster
        self._error = error

    def join(self, head: Address, cancellation: Cancellation) -> JoinedHead:
        raise self._error


@pytest.mark.parametrize(
    ("error", "is_searched"),
    [
        (LinkClosedError("nothing listens there."), True),
        (WaitTimeoutError("it does not answer."), True),
        (ProtocolError("it does not speak TLS."), True),
        (WrongClusterError("another cluster has this address."), True),
        (CertificateError("an alert, which anybody can send."), True),
        (CertificateError("it is revoked.", code=CERTIFICATE_REVOKED), False),
        (NameTakenError("there is one of this name."), False),
        (JoinTokenError("it is used up."), False),
    ],
)
def test_g1_a_head_that_has_answered_is_not_searched_for(error: PeerError, is_searched: bool) -> None:
    searches: list[str] = []

    def find(cluster: str, known: Address, cancellation: Cancellation) -> Address | None:
        searches.append(cluster)
        return None

    membership: Any = StandInMembership(error)
    with pytest.raises(type(error)):
        FollowedHead(membership, NOW, find, print).join(Cancellation())
    assert bool(searches) is is_searched


def test_g1_a_host_that_has_joined_no_cluster_searches_for_none() -> None:
    membership: Any = StandInMembership(LinkClosedError("nothing listens there."), cluster="")

    def find(*_: object) -> Address | None:
        raise AssertionError("any head would do")

    with pytest.raises(LinkClosedError):
        FollowedHead(membership, NOW, find, print).join(Cancellation())
