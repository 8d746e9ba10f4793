"""The challenge of links in plain text: both sides have the key of the epoch; nothing can be played back."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import hand_over, talk
from penstock.errors import CertificateError, LinkClosedError, PenstockError, ProtocolError
from penstock.trust.challenge import OPENING, AcceptedChallenge, DialledChallenge, new_epoch_key
from penstock.trust.peer_names import PeerName, rank_role

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def rank(number: int, epoch: int = 4) -> PeerName:
    return PeerName(cluster="0" * 32, host="desk", role=rank_role(number), epoch=epoch)


FIRST, SECOND = rank(0), rank(1)


def dialled(key: bytes = KEY, own: PeerName = FIRST, peer: PeerName = SECOND) -> DialledChallenge:
    return DialledChallenge(key, own, peer)


def accepted(key: bytes = KEY, own: PeerName = SECOND, *expected: PeerName) -> AcceptedChallenge:
    return AcceptedChallenge(key, own, expected or (rank(0),))


def feed(side: DialledChallenge | AcceptedChallenge, data: bytes) -> None:
    while data and side.wanted:
        size = min(side.wanted, len(data))
        side.receive(data[:size])
        data = data[size:]


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_r15_two_ranks_with_the_key_know_each_other(chunk: int) -> None:
    dialler, accepter = dialled(), accepted(KEY, rank(1), rank(0), rank(2))
    talk(dialler, accepter, chunk)
    assert (dialler.wanted, accepter.wanted) == (0, 0)
    assert (dialler.peer, accepter.peer) == (rank(1), rank(0))


def test_r15_a_dialler_without_the_key_is_refused() -> None:
    accepter = accepted()
    feed(accepter, dialled(OTHER_KEY).take_outgoing())
    accepter.take_outgoing()
    with pytest.raises(CertificateError, match="does not have the key"):
        feed(accepter, bytes(32))


def test_r15_an_accepter_without_the_key_is_refused() -> None:
    with pytest.raises(CertificateError, match="does not have the key") as caught:
        talk(dialled(), accepted(OTHER_KEY))
    assert caught.value.code == "wrong_epoch_key"


def test_r15_who_is_not_expected_is_refused() -> None:
    for own in (rank(2), rank(0, epoch=3)):
        accepter = accepted()
        with pytest.raises(CertificateError, match="unexpected process"):
            talk(dialled(KEY, own), accepter)
        assert accepter.take_outgoing() == b""


def test_r15_who_reaches_another_rank_than_it_wants_notices() -> None:
    with pytest.raises(CertificateError):
        talk(dialled(KEY, rank(0), rank(2)), accepted())


def test_r15_what_was_said_once_cannot_be_played_back() -> None:
    dialler, accepter = dialled(), accepted()
    opening = dialler.take_outgoing()
    feed(accepter, opening)
    answer = accepter.take_outgoing()
    feed(dialler, answer)
    proof = dialler.take_outgoing()
    again = accepted()
    feed(again, opening)
    with pytest.raises(CertificateError):
        feed(again, proof)
    with pytest.raises(CertificateError):
        feed(dialled(), answer)


def test_r15_a_side_cannot_be_answered_with_its_own_words() -> None:
    """A peer without the key that sends back what it gets, or lets a second connection answer."""
    accepter = accepted()
    feed(accepter, dialled().take_outgoing())
    own_words = accepter.take_outgoing()
    with pytest.raises(CertificateError):
        feed(accepter, own_words[32:])


def test_plain_text_at_another_door_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="does not accept links in plain text") as caught:
        feed(accepted(), b"\x16\x03\x01" + bytes(100))
    assert "--insecure-links" in caught.value.remedy


@pytest.mark.parametrize("length", [0, 257, 65535])
def test_a_name_that_is_empty_or_too_long_is_refused_before_it_comes(length: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        feed(accepted(), OPENING + bytes(32) + length.to_bytes(2, "big"))
    assert caught.value.code == "too_long"


def test_an_end_at_any_place_is_typed() -> None:
    for side in (dialled(), accepted()):
        with pytest.raises(LinkClosedError):
            side.end_of_stream()
        side.abandon()
        assert side.wanted == 0


def test_keys_of_epochs_differ() -> None:
    assert len(new_epoch_key()) == 32
    assert new_epoch_key() != new_epoch_key()


@settings(deadline=None, max_examples=150, derandomize=True)
@given(turn=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_r15_one_changed_bit_opens_nothing(turn: int, place: float, bit: int) -> None:
    dialler, accepter = dialled(), accepted()
    for number, (sender, receiver) in enumerate(
        [(dialler, accepter), (accepter, dialler), (dialler, accepter)]
    ):
        data = bytearray(sender.take_outgoing())
        if number == turn and data:
            data[int(place * len(data))] ^= 1 << bit
        try:
            feed(receiver, bytes(data))
        except PenstockError:
            break
    assert not hasattr(accepter, "peer")


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.binary(max_size=400), begins=st.booleans())
def test_r15_garbage_is_one_typed_error_or_a_wait(data: bytes, begins: bool) -> None:
    for side in (dialled(), accepted()):
        with contextlib.suppress(PenstockError):
            feed(side, (OPENING if begins else b"") + data)
        assert not hasattr(side, "peer") or isinstance(side, DialledChallenge)


def test_nothing_is_left_to_carry_when_all_is_said() -> None:
    dialler, accepter = dialled(), accepted()
    talk(dialler, accepter)
    assert hand_over(dialler, accepter) == hand_over(accepter, dialler) == 0
