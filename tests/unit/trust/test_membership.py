"""When a worker believes that it needs a token once more, and when it keeps its certificate and goes on."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from clusters import Cluster, answering, served
from descriptors import no_descriptor_left
from penstock.config.hosts import own_version
from penstock.errors import (
    CertificateError,
    JoinError,
    JoinTokenError,
    LinkClosedError,
    OtherVersionError,
    PeerError,
    UsageError,
    WrongClusterError,
)
from penstock.trust import admission, credentials, membership
from penstock.trust.cancellation import Cancellation
from penstock.trust.certificates import HOST_LIFE_S, new_key, read_certificate, signing_request
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address
from penstock.trust.membership import Membership
from penstock.trust.token_prompt import NO_TOKEN, GivenTokens, Tokens

ALERTS = {48: WrongClusterError, 44: CertificateError, 45: CertificateError}  # unknown_ca, revoked, expired


class Prompt:
    """A user at a terminal who types a token. Implements `Tokens`."""

    def __init__(self, *tokens: JoinToken) -> None:
        self.typed = list(tokens)

    def at_hand(self) -> JoinToken | None:
        return None

    def ask(self, cancellation: Cancellation) -> JoinToken:
        assert self.typed, "nobody is to be asked"
        return self.typed.pop()


class Desk:
    """A worker with its state directory, and the lines that it has said."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "desk" / "credentials"
        self.said: list[str] = []

    def membership(self, tokens: Tokens) -> Membership:
        return Membership("desk", self.path, tokens, self.said.append)

    def join(self, address: Address, tokens: Tokens) -> None:
        self.membership(tokens).join(address, Cancellation()).connection.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head", max_joins=2)


@pytest.fixture
def desk(tmp_path: Path, cluster: Cluster) -> Desk:
    """Has joined."""
    made = Desk(tmp_path)
    with served(cluster, own_version()) as door:
        made.join(door.address, Prompt(cluster.token))
        door.await_news(lambda: door.entered == ["desk"])
    cluster.connected.leave("desk")
    return made


def alerting(description: int) -> AbstractContextManager[Address]:
    """Somebody on the network who answers the first words of TLS with an alert in plain text."""

    def alert(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        accepted.sendall(bytes([21, 3, 3, 0, 2, 2, description]))
        accepted.recv(1 << 16)

    return answering(alert)


def token_file(directory: Path, token: JoinToken) -> GivenTokens:
    path = directory / "token"
    path.write_text(token.text())
    path.chmod(0o600)
    return GivenTokens(path)


@pytest.mark.parametrize("description", ALERTS)
def test_r15_an_alert_that_anybody_can_send_costs_no_worker_its_certificate(
    desk: Desk, description: int
) -> None:
    with alerting(description) as address:
        membership = desk.membership(Prompt())
        with pytest.raises(JoinError, match="Any host on the network can cause this") as caught:
            membership.join(address, Cancellation())
    assert type(caught.value) is ALERTS[description]
    assert "--join-token-file" in caught.value.remedy
    assert not membership.is_final(caught.value)


@pytest.mark.parametrize("has_file", [False, True])
def test_r15_another_cluster_at_the_address_costs_no_worker_its_certificate(
    desk: Desk, cluster: Cluster, tmp_path: Path, has_file: bool
) -> None:
    """With a token of its own cluster it has no reason to believe the other one either."""
    tokens = token_file(tmp_path, cluster.token) if has_file else Prompt()
    with served(Cluster(tmp_path / "other"), own_version()) as door:
        membership = desk.membership(tokens)
        with pytest.raises(WrongClusterError, match="keeps its certificate") as caught:
            membership.join(door.address, Cancellation())
        assert not membership.is_final(caught.value)
    with served(cluster, own_version()) as door:
        desk.join(door.address, Prompt())


def test_g1_the_token_of_a_head_that_was_set_up_anew_is_taken_from_its_file(
    desk: Desk, tmp_path: Path
) -> None:
    anew = Cluster(tmp_path / "anew")
    tokens = token_file(tmp_path, anew.token)
    with served(anew, own_version()) as door:
        desk.join(door.address, tokens)
        door.await_news(lambda: door.entered == ["desk"])
    anew.connected.leave("desk")
    with served(anew, own_version()) as door:
        desk.join(door.address, Prompt())


def test_r15_with_the_token_of_another_head_a_stranger_is_tried_again(desk: Desk, tmp_path: Path) -> None:
    tokens = token_file(tmp_path, Cluster(tmp_path / "anew").token)
    with served(Cluster(tmp_path / "stranger"), own_version()) as door:
        membership = desk.membership(tokens)
        with pytest.raises(WrongClusterError, match="nothing was sent") as caught:
            membership.join(door.address, Cancellation())
    assert not membership.is_final(caught.value)


def test_r15_a_worker_whose_head_has_revoked_it_asks_for_a_token(desk: Desk, cluster: Cluster) -> None:
    cluster.book.revoke_host("desk")
    with served(cluster, own_version()) as door:
        desk.join(door.address, Prompt(cluster.token))
        door.await_news(lambda: door.entered == ["desk"])
    (line,) = desk.said
    assert "is revoked" in line
    assert line.endswith("A token is needed again.")


def test_r15_a_worker_with_an_expired_certificate_asks_for_a_token(cluster: Cluster, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    cluster.wall_clock.seconds -= 5 * HOST_LIFE_S
    key = new_key()
    certificate = cluster.identity.sign_host(signing_request(key), "desk")
    authority = cluster.identity.certificate_pem
    Credentials(key_pem=key, certificate_pem=certificate, authority_pem=authority).save(desk.path)
    cluster.wall_clock.seconds += 5 * HOST_LIFE_S
    with served(cluster, own_version()) as door:
        desk.join(door.address, Prompt(cluster.token))
        door.await_news(lambda: door.entered == ["desk"])
    assert "refused our certificate" in desk.said[0]


def test_r15_a_revoked_worker_waits_for_the_file_with_its_token(
    desk: Desk, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.book.revoke_host("desk")
    with served(cluster, own_version()) as door:
        membership = desk.membership(GivenTokens(tmp_path / "token"))
        with pytest.raises(JoinError, match="does not exist") as caught:
            membership.join(door.address, Cancellation())
        assert not membership.is_final(caught.value)
        token_file(tmp_path, cluster.token)
        membership.join(door.address, Cancellation()).connection.close()


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (OtherVersionError("other"), True),
        (JoinTokenError("none", code=NO_TOKEN), True),
        (JoinTokenError("used up"), False),
        (LinkClosedError("away"), False),
    ],
)
def test_r15_a_worker_with_a_certificate_ends_only_where_a_user_must_act(
    desk: Desk, error: PeerError, is_final: bool
) -> None:
    assert desk.membership(Prompt()).is_final(error) is is_final


def test_g1_a_host_that_has_never_joined_ends_with_the_first_error(tmp_path: Path) -> None:
    membership = Desk(tmp_path).membership(Prompt())
    assert membership.is_final(LinkClosedError("away"))


def test_r16_a_worker_comes_back_though_neither_disk_has_room(
    desk: Desk, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)  # what is written privately is written so
    with served(cluster, own_version()) as door:
        desk.join(door.address, Prompt())
        door.await_news(lambda: door.entered == ["desk"])


def test_r16_a_host_that_has_no_descriptor_for_its_connection_tries_again(
    desk: Desk, cluster: Cluster
) -> None:
    with served(cluster, own_version()) as door:
        own = desk.membership(Prompt())
        with no_descriptor_left(), pytest.raises(JoinError, match="Too many open files") as raised:
            own.join(door.address, Cancellation())
        assert not own.is_final(raised.value)
        own.join(door.address, Cancellation()).connection.close()
        door.await_news(lambda: door.entered == ["desk"])


def age(desk: Desk, cluster: Cluster) -> None:
    """Give the host a certificate that it had for more than half a year, so that it wants a newer one."""
    present = Credentials.load(desk.path)
    cluster.wall_clock.seconds -= 0.6 * HOST_LIFE_S
    aged = cluster.identity.sign_host(signing_request(present.key_pem), "desk")
    cluster.wall_clock.seconds += 0.6 * HOST_LIFE_S
    serials = [read_certificate(pem)[0] for pem in (present.certificate_pem, aged)]
    cluster.book.renew("desk", *serials)
    msgspec.structs.replace(present, certificate_pem=aged).save(desk.path)


@pytest.mark.parametrize("is_head_full", [False, True])
def test_r16_a_host_whose_certificate_is_old_comes_back_though_a_disk_has_no_room(
    desk: Desk, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_head_full: bool
) -> None:
    age(desk, cluster)
    before = Credentials.load(desk.path)

    def no_room(path: Path, content: bytes) -> None:
        raise UsageError(f"{path} cannot be written: No space left on device.")

    with served(cluster, own_version()) as door, monkeypatch.context() as full:
        full.setattr(admission if is_head_full else credentials, "replace_private", no_room)
        desk.join(door.address, Prompt())
        door.await_news(lambda: door.entered == ["desk"])
    assert "No space left" in desk.said[-1]
    assert Credentials.load(desk.path) == before
    cluster.connected.leave("desk")
    with served(cluster, own_version()) as door:
        own = desk.membership(Prompt())
        own.join(door.address, Cancellation()).connection.close()
    assert Credentials.load(desk.path) != before, "with room it is renewed"


def test_r16_what_a_host_cannot_write_when_it_comes_back_may_pass(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UsageError("the disk is full.", remedy="Make room.")

    monkeypatch.setattr(membership, "rejoin", refuse)
    own = desk.membership(Prompt())
    with pytest.raises(JoinError, match="the disk is full") as raised:
        own.join(("127.0.0.1", 1), Cancellation())
    assert not own.is_final(raised.value)


@pytest.mark.parametrize(
    "trouble",
    [
        UsageError("the disk has no room."),
        OSError(errno.EMFILE, "there is no room"),
        OSError("there is no room"),
    ],
    ids=["disk", "descriptors", "unnumbered"],
)
def test_r16_a_revoked_host_with_a_token_that_has_no_room_for_its_join_tries_again(
    desk: Desk, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise trouble

    cluster.book.revoke_host("desk")
    tokens = token_file(tmp_path, cluster.token)
    with served(cluster, own_version()) as door:
        own = desk.membership(tokens)
        with monkeypatch.context() as full:
            full.setattr(membership, "join_with_token", fail)
            with pytest.raises(JoinError, match="no room") as raised:
                own.join(door.address, Cancellation())
        assert not own.is_final(raised.value)
        own.join(door.address, Cancellation()).connection.close()
        door.await_news(lambda: door.entered == ["desk"])
