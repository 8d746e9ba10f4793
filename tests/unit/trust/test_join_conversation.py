"""The join protocol as two machines without sockets: what is let in, and everything that is not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import HEAD_HOST, VERSION, Cluster, hand_over, seen_by_head, talk
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
    WrongClusterError,
)
from penstock.trust import certificates, join_messages
from penstock.trust.credentials import Credentials
from penstock.trust.head_join import HeadJoin
from penstock.trust.join_messages import HEADER, MAX_BYTES, PROTOCOL, Kind, MessageReader, framed, proof
from penstock.trust.join_token import JoinToken
from penstock.trust.tls import NO_CERTIFICATE, PeerCertificate, own_certificate_der
from penstock.trust.worker_join import (
    CertificateClaim,
    CertificateVisit,
    KeptCertificateClaim,
    TokenClaim,
    WorkerJoin,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "head", max_joins=2)


def back(cluster: Cluster, credentials: Credentials, version: str = VERSION) -> WorkerJoin:
    claim = CertificateClaim(credentials, version, cluster.wall_clock())
    return cluster.worker_join(claim)


# --- what is let in -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_r15_a_worker_with_the_token_gets_a_certificate(cluster: Cluster, chunk: int) -> None:
    kept: list[Credentials] = []
    head, worker = (
        cluster.head_join(),
        cluster.worker_join(TokenClaim(cluster.token, "desk", VERSION), kept.append),
    )
    talk(head, worker, chunk)
    assert (head.wanted, worker.wanted) == (0, 0)
    assert (head.host, head.is_connected) == ("desk", False)
    assert worker.head == cluster.name(HEAD_HOST, "head")
    (credentials,) = kept
    assert certificates.is_pair(credentials.key_pem, credentials.certificate_pem)
    assert certificates.read_certificate(credentials.certificate_pem)[1] == cluster.name("desk")
    assert credentials.authority_pem == cluster.identity.certificate_pem
    assert cluster.book.hosts() == ["desk"]


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_r15_a_worker_comes_back_with_its_certificate(cluster: Cluster, chunk: int) -> None:
    credentials = cluster.joined("desk")
    head, worker = cluster.head_join(seen_by_head(credentials)), back(cluster, credentials)
    talk(head, worker, chunk)
    assert (head.wanted, worker.wanted) == (0, 0)
    assert (head.host, head.is_connected) == ("desk", True)


def test_r15_a_worker_comes_back_to_a_restarted_head_when_its_token_is_no_more(
    cluster: Cluster,
) -> None:
    credentials = cluster.joined("desk")
    cluster.book.revoke_all_tokens()
    restarted = Cluster(cluster.directory)
    head = restarted.head_join(seen_by_head(credentials))
    talk(head, back(restarted, credentials))
    assert head.is_connected


def test_a_certificate_is_renewed_in_the_second_half_of_its_life(cluster: Cluster) -> None:
    first = cluster.joined("desk")
    cluster.wall_clock.seconds += certificates.HOST_LIFE_S * 0.49
    kept: list[Credentials] = []
    for expected in (0, 1):
        head = cluster.head_join(seen_by_head(first))
        claim = CertificateClaim(first, VERSION, cluster.wall_clock())
        talk(head, cluster.worker_join(claim, kept.append))
        cluster.connected.leave("desk")
        assert sum(credentials != first for credentials in kept) == expected
        cluster.wall_clock.seconds += certificates.HOST_LIFE_S * 0.02
    second = kept[-1]
    assert second.key_pem != first.key_pem
    talk(cluster.head_join(seen_by_head(second)), back(cluster, second))
    with pytest.raises(CertificateError):
        talk(cluster.head_join(seen_by_head(first)), back(cluster, first))


def test_a_key_is_made_only_for_a_certificate_that_is_requested(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials, made = cluster.joined("desk"), list[bytes]()
    monkeypatch.setattr(certificates, "new_key", lambda: made.append(b"key") or b"key")  # type: ignore[func-returns-value]
    cluster.wall_clock.seconds += certificates.HOST_LIFE_S * 0.6
    for claimed, num_made in ((KeptCertificateClaim, 0), (CertificateVisit, 0), (CertificateClaim, 1)):
        claimed(credentials, VERSION, cluster.wall_clock())
        assert len(made) == num_made, claimed.__name__


def test_a_renewal_that_breaks_off_leaves_a_way_back_with_either_certificate(cluster: Cluster) -> None:
    first = cluster.joined("desk")
    cluster.wall_clock.seconds += certificates.HOST_LIFE_S * 0.6
    kept: list[Credentials] = []
    head = cluster.head_join(seen_by_head(first))
    worker = cluster.worker_join(CertificateClaim(first, VERSION, cluster.wall_clock()), kept.append)
    hand_over(head, worker)
    hand_over(worker, head)
    hand_over(head, worker)  # it has stored it, and cannot say so any more
    with pytest.raises(JoinError):
        head.end_of_stream()
    for credentials in (first, kept[-1]):
        cluster.book.require_known("desk", seen_by_head(credentials).serial)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_r15_a_host_that_is_revoked_while_it_joins_again_is_not_let_in(
    cluster: Cluster, is_renewed: bool
) -> None:
    credentials = cluster.joined("desk")
    cluster.wall_clock.seconds += certificates.HOST_LIFE_S * (0.6 if is_renewed else 0.0)
    head, worker = cluster.head_join(seen_by_head(credentials)), back(cluster, credentials)
    hand_over(head, worker)
    hand_over(worker, head)  # its certificate is good, so far
    cluster.book.revoke_host("desk")
    with pytest.raises(CertificateError) as caught:
        talk(head, worker)
    assert caught.value.code == "certificate_revoked"
    with pytest.raises(CertificateError):
        hand_over(head, worker)  # the worker hears it too
    assert cluster.book.hosts() == []
    assert not head.is_connected
    cluster.connected.enter("desk")  # the name is free


def test_r15_a_name_is_free_again_if_the_last_word_of_a_join_cannot_be_sent(cluster: Cluster) -> None:
    credentials = cluster.joined("desk")
    head, worker = cluster.head_join(seen_by_head(credentials)), back(cluster, credentials)
    for sender, receiver in [(head, worker), (worker, head)] * 2:
        hand_over(sender, receiver)
    assert (head.wanted, head.is_connected) == (0, True)
    head.abandon()  # as the door does when the connection breaks before DONE has left
    talk(cluster.head_join(seen_by_head(credentials)), back(cluster, credentials))


# --- what is not ----------------------------------------------------------------------------------


def refused(
    cluster: Cluster, worker: WorkerJoin, error: type[PenstockError], peer: PeerCertificate = NO_CERTIFICATE
) -> PenstockError:
    """Both sides end with the same error, and the head has given everything back."""
    desk = cluster.head_join(peer)
    with pytest.raises(error) as at_head:
        talk(desk, worker)
    with pytest.raises(error) as at_worker:
        hand_over(desk, worker)
    assert str(at_head.value) == str(at_worker.value)
    assert at_head.value.code == at_worker.value.code
    assert (desk.wanted, worker.wanted) == (0, 0)
    assert cluster.token.text() not in str(at_head.value)
    return at_head.value


def test_r15_a_wrong_token_is_refused(cluster: Cluster) -> None:
    wrong = JoinToken.new(cluster.identity.public_key)
    error = refused(cluster, cluster.token_join(token=wrong), JoinTokenError)
    assert error.code == "wrong_token"
    assert cluster.book.hosts() == []


def test_r15_an_expired_token_is_refused(cluster: Cluster) -> None:
    cluster.wall_clock.seconds += 3600
    assert refused(cluster, cluster.token_join(), JoinTokenError).code == "token_expired"


def test_r15_a_used_token_is_refused(cluster: Cluster) -> None:
    cluster.joined("one")
    cluster.joined("two")
    assert refused(cluster, cluster.token_join("three"), JoinTokenError).code == "token_used_up"


def test_r15_a_revoked_token_is_refused(cluster: Cluster) -> None:
    cluster.book.revoke_all_tokens()
    assert refused(cluster, cluster.token_join(), JoinTokenError).code == "token_revoked"


@pytest.mark.parametrize("host", ["desk", HEAD_HOST])
def test_a_name_that_is_in_use_is_refused_and_costs_no_use_of_the_token(cluster: Cluster, host: str) -> None:
    if host != HEAD_HOST:
        cluster.connected.enter(host)
    refused(cluster, cluster.token_join(host), NameTakenError)
    cluster.joined("one")
    cluster.joined("two")


def test_two_workers_of_one_name_that_join_at_once_do_not_both_get_in(cluster: Cluster) -> None:
    first, worker = cluster.head_join(), cluster.token_join("desk")
    hand_over(first, worker)
    hand_over(worker, first)
    refused(cluster, cluster.token_join("desk"), NameTakenError)
    talk(first, worker)
    assert first.host == "desk"


def test_a_certificate_that_is_connected_already_is_refused(cluster: Cluster) -> None:
    credentials = cluster.joined("desk")
    peer = seen_by_head(credentials)
    talk(cluster.head_join(peer), back(cluster, credentials))
    refused(cluster, back(cluster, credentials), NameTakenError, peer=peer)
    cluster.connected.leave("desk")
    talk(cluster.head_join(peer), back(cluster, credentials))


def test_r15_a_stolen_certificate_is_refused_once_it_is_revoked(cluster: Cluster) -> None:
    credentials = cluster.joined("desk")
    cluster.book.revoke_host("desk")
    error = refused(cluster, back(cluster, credentials), CertificateError, peer=seen_by_head(credentials))
    assert error.code == "certificate_revoked"
    own = cluster.joined("desk")  # the owner joins with the token, and the thief stays outside
    talk(cluster.head_join(seen_by_head(own)), back(cluster, own))
    cluster.connected.leave("desk")
    refused(cluster, back(cluster, credentials), CertificateError, peer=seen_by_head(credentials))


def test_r15_another_penstock_is_refused_by_name_on_both_sides(cluster: Cluster) -> None:
    old = cluster.worker_join(TokenClaim(cluster.token, "desk", "0.0.9"))
    error = refused(cluster, old, OtherVersionError)
    assert "'0.0.9'" in str(error)
    assert f"'{VERSION}'" in str(error)
    credentials = cluster.joined("desk")
    refused(cluster, back(cluster, credentials, "9.9"), OtherVersionError, peer=seen_by_head(credentials))
    cluster.joined("other")  # no use of the token is lost


def test_an_old_worker_is_refused_by_name(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    head, worker = cluster.head_join(), cluster.token_join()
    hand_over(head, worker)
    request = bytearray(worker.take_outgoing())
    request[:2] = (7).to_bytes(2, "big")
    with pytest.raises(OtherVersionError, match="version 7 of the join protocol, but this host version 1"):
        head.receive(bytes(request[: HEADER.size])) or head.receive(bytes(request[HEADER.size :]))
    assert hand_refusal(head) == "OtherVersionError"


def hand_refusal(head: object) -> str:
    """The kind of error that the head sends."""
    outgoing = head.take_outgoing()  # type: ignore[attr-defined]
    frame = feed_all(MessageReader(), outgoing)[-1]
    assert frame.kind == Kind.REFUSED
    return str(msgspec.msgpack.decode(frame.body)["kind"])


def feed_all(reader: MessageReader, data: bytes) -> list[join_messages.Frame]:
    frames = []
    while data:
        size = min(reader.wanted, len(data))
        frame = reader.feed(data[:size])
        data = data[size:]
        if frame is not None:
            frames.append(frame)
    return frames


def test_a_newer_head_is_refused_by_name_and_told_so(cluster: Cluster) -> None:
    head, worker = cluster.head_join(), cluster.token_join()
    hello = bytearray(head.take_outgoing())
    hello[:2] = (2).to_bytes(2, "big")
    with pytest.raises(OtherVersionError, match="version 2 of the join protocol"):
        feed(worker, bytes(hello))
    with pytest.raises(OtherVersionError):
        hand_over(worker, head)


def feed(conversation: object, data: bytes) -> None:
    """Hand over bytes as they are wanted, and leave what is not wanted any more."""
    while data and conversation.wanted:  # type: ignore[attr-defined]
        size = min(conversation.wanted, len(data))  # type: ignore[attr-defined]
        conversation.receive(data[:size])  # type: ignore[attr-defined]
        data = data[size:]


# --- whom the worker trusts -----------------------------------------------------------------------


def test_r15_a_worker_says_nothing_to_a_head_of_another_cluster(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(tmp_path / "other")
    worker = other.worker_join(TokenClaim(cluster.token, "desk", VERSION))
    with pytest.raises(WrongClusterError, match="nothing was sent"):
        hand_over(other.head_join(), worker)
    assert worker.take_outgoing() == b""


def test_r15_a_worker_sees_who_sits_in_between(cluster: Cluster, tmp_path: Path) -> None:
    """It passes on what the head says, over a TLS connection with a certificate of its own."""
    other = Cluster(tmp_path / "other")
    for certificate in (other.certificate, own_certificate_der(cluster.joined("neighbour"))):
        claim = TokenClaim(cluster.token, "desk", VERSION)
        worker = WorkerJoin(claim, certificate, lambda _: None, cluster.wall_clock())
        with pytest.raises(WrongClusterError):
            hand_over(cluster.head_join(), worker)
        assert worker.take_outgoing() == b""


def test_r15_a_proof_is_for_one_connection(cluster: Cluster) -> None:
    """Played back to another connection of the same head, it proves nothing."""
    first, worker = cluster.head_join(), cluster.token_join()
    hand_over(first, worker)
    request = worker.take_outgoing()
    second = cluster.head_join()
    with pytest.raises(JoinTokenError):
        feed(second, request)
    feed(first, request)
    assert first.host == ""


def test_r15_a_proof_is_for_one_certificate_of_the_head() -> None:
    parts = (b"certificate", b"nonce", b"body")
    made = proof(b"key", *parts)
    changed = [
        (b"certificaten", b"once", b"body"),
        (b"x", b"nonce", b"body"),
        (b"certificate", b"nonce", b"bod"),
    ]
    assert all(proof(b"key", *other) != made for other in changed)
    assert proof(b"other", *parts) != made


def test_r15_the_head_reads_nothing_of_a_request_without_a_proof(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("penstock.trust.head_join.decode", read)
    head = cluster.head_join()
    with pytest.raises(JoinTokenError):
        feed(head, framed(Kind.JOIN, bytes(32) + b"\xc1 not msgpack"))


def test_r15_the_worker_reads_nothing_of_a_head_that_is_not_known(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("penstock.trust.worker_join.decode", read)
    with pytest.raises(WrongClusterError):
        hand_over(Cluster(tmp_path / "other").head_join(), cluster.token_join())


def test_r15_a_rank_cannot_come_in_place_of_an_agent(cluster: Cluster) -> None:
    rank = cluster.link_credentials("desk", "rank-1", 3)
    refused(cluster, back(cluster, rank), ProtocolError, peer=seen_by_head(rank))


def test_a_worker_with_a_certificate_does_not_use_a_token(cluster: Cluster) -> None:
    credentials = cluster.joined("desk")
    refused(cluster, cluster.token_join("other"), ProtocolError, peer=seen_by_head(credentials))


def test_without_a_certificate_nobody_comes_back(cluster: Cluster) -> None:
    credentials = cluster.joined("desk")
    refused(cluster, back(cluster, credentials), ProtocolError)


def test_a_certificate_of_another_key_or_name_is_not_stored(cluster: Cluster) -> None:
    head, worker = cluster.head_join(), cluster.token_join("desk")
    hand_over(head, worker)
    worker.take_outgoing()
    other = cluster.identity.sign_host(certificates.signing_request(certificates.new_key()), "desk")
    welcome = msgspec.msgpack.encode(join_messages.Welcome(certificate=other))
    with pytest.raises(ProtocolError):
        feed(worker, framed(Kind.WELCOME, welcome))


def test_a_certificate_that_cannot_be_stored_is_not_counted(cluster: Cluster) -> None:
    def full(_: Credentials) -> None:
        raise UsageError("the disk is full.")

    head = cluster.head_join()
    worker = cluster.worker_join(TokenClaim(cluster.token, "desk", VERSION), full)
    with pytest.raises(UsageError):
        talk(head, worker)
    with pytest.raises(JoinError):
        head.end_of_stream()
    assert cluster.book.hosts() == []
    cluster.joined("desk")
    cluster.joined("two")


def test_a_bad_host_name_is_refused_at_the_worker_already(cluster: Cluster) -> None:
    with pytest.raises(UsageError):
        TokenClaim(cluster.token, "a b", VERSION)


# --- the end at every place -----------------------------------------------------------------------


@pytest.mark.parametrize("num_turns", range(4))
def test_an_end_of_the_stream_at_any_place_gives_everything_back(cluster: Cluster, num_turns: int) -> None:
    head, worker = cluster.head_join(), cluster.token_join("desk")
    turns: Iterator[Callable[[], int]] = iter(
        [lambda: hand_over(head, worker), lambda: hand_over(worker, head)] * 2
    )
    for _ in range(num_turns):
        next(turns)()
    with pytest.raises(JoinError, match="disconnected before it had joined"):
        head.end_of_stream()
    with pytest.raises(LinkClosedError, match="before the worker had joined"):
        worker.end_of_stream()
    assert (head.wanted, worker.wanted) == (0, 0)
    assert cluster.book.hosts() == []
    cluster.connected.enter("desk")
    cluster.connected.leave("desk")
    cluster.joined("one")
    cluster.joined("two")


# --- garbage, truncated, reordered, too long ------------------------------------------------------


def test_a_message_that_is_too_long_is_refused_before_it_comes() -> None:
    reader = MessageReader()
    with pytest.raises(ProtocolError) as caught:
        reader.feed(HEADER.pack(PROTOCOL, Kind.JOIN, MAX_BYTES))
    assert caught.value.code == "too_long"


def test_all_messages_together_are_bounded() -> None:
    reader = MessageReader(max_bytes=2 * HEADER.size + 3)
    assert len(feed_all(reader, framed(Kind.DONE, b"abc") + framed(Kind.DONE))) == 2
    with pytest.raises(ProtocolError):
        feed_all(reader, framed(Kind.DONE))


@pytest.mark.parametrize("side", ["head", "worker"])
@pytest.mark.parametrize("kind", list(Kind))
def test_a_message_at_a_wrong_place_is_refused(cluster: Cluster, side: str, kind: Kind) -> None:
    """The first word of the other side, and the second, are of one kind each."""
    body = msgspec.msgpack.encode({"kind": "PenstockError", "message": "no."})
    for num_before in (0, 1):
        head, worker = cluster.head_join(), cluster.token_join("desk")
        hello = head.take_outgoing()
        if side == "worker":
            if num_before:
                feed(worker, hello)
            with pytest.raises(PenstockError):
                feed(worker, framed(kind, body))
        else:
            if num_before:
                feed(worker, hello)
                hand_over(worker, head)
            with pytest.raises(PenstockError):
                feed(head, framed(kind, body))
        head.abandon()
    assert cluster.book.hosts() == []
    cluster.joined("one")
    cluster.joined("two")


TURNS = [0, 1, 2, 3, 4]  # HELLO, JOIN, WELCOME, STORED, DONE


def at_turn(cluster: Cluster, turn: int) -> tuple[HeadJoin, WorkerJoin, bytes, HeadJoin | WorkerJoin]:
    """Both sides, the message that is due, and who awaits it."""
    head, worker = cluster.head_join(), cluster.token_join("desk")
    for number in range(turn):
        hand_over(*((head, worker), (worker, head))[number % 2])
    sender, receiver = ((head, worker), (worker, head))[turn % 2]
    return head, worker, sender.take_outgoing(), receiver


def end_both(head: HeadJoin, worker: WorkerJoin) -> None:
    for side in (head, worker):
        if side.wanted:
            with pytest.raises(PenstockError):
                side.end_of_stream()


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_r15_a_message_that_ends_early_lets_nobody_in(tmp_path: Path, turn: int, part: float) -> None:
    cluster = Cluster(tmp_path / "head")
    head, worker, message, receiver = at_turn(cluster, turn)
    feed(receiver, message[: int(part * len(message))])
    assert receiver.wanted
    end_both(head, worker)
    is_counted = turn == 4  # the head has said DONE, which is lost: the worker has its certificate
    assert cluster.book.hosts() == (["desk"] if is_counted else [])


@pytest.mark.parametrize("turn", TURNS)
def test_r15_a_message_that_is_too_long_is_refused_at_any_place(tmp_path: Path, turn: int) -> None:
    cluster = Cluster(tmp_path / "head")
    head, worker, message, receiver = at_turn(cluster, turn)
    with pytest.raises(ProtocolError) as caught:
        feed(receiver, HEADER.pack(PROTOCOL, message[2], 1 << 31))
    assert caught.value.code == "too_long"
    end_both(head, worker)


@pytest.mark.parametrize("turn", TURNS)
def test_r15_a_message_that_comes_twice_lets_nobody_in_twice(tmp_path: Path, turn: int) -> None:
    """All is said after the last one, and what follows is not read. Before, the other kind is refused."""
    cluster = Cluster(tmp_path / "head")
    head, worker, message, receiver = at_turn(cluster, turn)
    feed(receiver, message)
    if receiver.wanted:
        with pytest.raises(PenstockError):
            feed(receiver, message)
    end_both(head, worker)
    assert cluster.book.hosts() == (["desk"] if turn >= 3 else [])


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as directory:
        yield Cluster(Path(directory) / "head", max_joins=1)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    data=st.binary(max_size=300), kind=st.sampled_from(Kind), is_framed=st.booleans(), turn=st.integers(0, 3)
)
def test_r15_garbage_at_any_place_is_one_typed_error(
    fuzzed: Cluster, data: bytes, kind: Kind, is_framed: bool, turn: int
) -> None:
    """Whatever arrives, at either side and after any message: a `PenstockError`, or a wait for more."""
    head, worker = fuzzed.head_join(), fuzzed.token_join("desk")
    sides = [(head, worker), (worker, head)] * 2
    for sender, receiver in sides[:turn]:
        hand_over(sender, receiver)
    _, receiver = sides[turn]
    try:
        feed(receiver, framed(kind, data) if is_framed else data)
    except PenstockError:
        assert receiver.wanted == 0
    head.abandon()
    worker.abandon()
    is_last_word = turn == 3 and is_framed and kind == Kind.STORED and not data
    if not is_last_word:
        assert fuzzed.book.hosts() == []
    fuzzed.connected.enter("desk")
    fuzzed.connected.leave("desk")


@settings(deadline=None, max_examples=120, derandomize=True)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), turn=st.integers(0, 2))
def test_r15_one_changed_bit_is_never_let_in(fuzzed: Cluster, place: float, bit: int, turn: int) -> None:
    """TLS would see it first; the messages bear it too."""
    head, worker = fuzzed.head_join(), fuzzed.token_join("desk")
    for number, (sender, receiver) in enumerate([(head, worker), (worker, head), (head, worker)]):
        data = bytearray(sender.take_outgoing())
        if number == turn:
            data[int(place * len(data))] ^= 1 << bit
        try:
            feed(receiver, bytes(data))
        except PenstockError:
            break
    assert fuzzed.book.hosts() == []
    assert head.host == ""
    head.abandon()
    worker.abandon()
    fuzzed.connected.enter("desk")
    fuzzed.connected.leave("desk")
