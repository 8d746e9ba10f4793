"""A host that only looks whether it could join: it proves the same, and neither joins nor uses a token up."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusters import VERSION, Cluster, hand_over, seen_by_head, talk
from penstock.errors import CertificateError, JoinTokenError, OtherVersionError, ProtocolError
from penstock.trust import certificates
from penstock.trust.certificates import HOST_LIFE_S
from penstock.trust.credentials import Credentials
from penstock.trust.head_join import NOBODY
from penstock.trust.join_token import JoinToken
from penstock.trust.peer_names import VISITOR_ROLE
from penstock.trust.worker_join import CertificateClaim, CertificateVisit, TokenVisit, WorkerJoin


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head")


def visit(cluster: Cluster, kept: list[Credentials], token: JoinToken | None = None) -> WorkerJoin:
    return cluster.worker_join(TokenVisit(token or cluster.token, "desk", VERSION), kept.append)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_r15_a_visitor_gets_a_certificate_for_visits_alone(cluster: Cluster, chunk: int) -> None:
    kept: list[Credentials] = []
    head = cluster.head_join()
    talk(head, visit(cluster, kept), chunk)
    assert head.visitor == cluster.name("desk", VISITOR_ROLE)
    assert (head.host, head.is_connected) == ("", False)
    (credentials,) = kept
    assert certificates.read_certificate(credentials.certificate_pem)[1] == head.visitor
    for claim in (CertificateClaim, CertificateVisit):
        again = cluster.worker_join(claim(credentials, VERSION, cluster.wall_clock()))
        with pytest.raises(ProtocolError):
            talk(cluster.head_join(seen_by_head(credentials)), again)


def test_r15_a_visit_uses_no_token_and_no_name(cluster: Cluster) -> None:
    for _ in range(3):
        talk(cluster.head_join(), visit(cluster, []))
    half = cluster.head_join()
    begun = visit(cluster, [])
    hand_over(half, begun)
    hand_over(begun, half)  # a visit that is going on
    cluster.joined("desk")
    assert cluster.book.hosts() == ["desk"]
    with pytest.raises(JoinTokenError, match="used up"):
        talk(cluster.head_join(), visit(cluster, []))


def test_r15_a_visitor_with_a_wrong_token_or_version_is_refused(cluster: Cluster) -> None:
    head = cluster.head_join()
    with pytest.raises(JoinTokenError):
        talk(head, visit(cluster, [], JoinToken.new(cluster.identity.public_key)))
    assert head.visitor == NOBODY
    with pytest.raises(OtherVersionError):
        talk(cluster.head_join(version="9.9.9"), visit(cluster, []))


def test_r15_a_worker_visits_with_its_certificate_until_it_is_revoked(cluster: Cluster) -> None:
    credentials = cluster.joined("desk")
    cluster.connected.enter("desk")  # it serves
    cluster.wall_clock.seconds += 0.6 * HOST_LIFE_S  # and would be given a newer one
    kept: list[Credentials] = []

    def again() -> WorkerJoin:
        return cluster.worker_join(CertificateVisit(credentials, VERSION, cluster.wall_clock()), kept.append)

    head = cluster.head_join(seen_by_head(credentials))
    talk(head, again())
    assert head.visitor == cluster.name("desk")
    assert (head.is_connected, kept) == (False, [credentials])
    cluster.book.revoke_host("desk")
    with pytest.raises(CertificateError, match="revoked"):
        talk(cluster.head_join(seen_by_head(credentials)), again())
