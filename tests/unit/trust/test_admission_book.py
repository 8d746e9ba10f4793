"""The book of tokens and hosts: uses, times, revocations, and what a restart must not forget."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from clusters import SetClock
from penstock.errors import CertificateError, JoinTokenError, UsageError
from penstock.trust.admission import MAX_TOKENS, AdmissionBook
from penstock.trust.join_token import JoinToken

KEY = b"a public key"
NOW = 1_800_000_000.0


class Books:
    """A book and its token, with a clock; `again` is the book after a restart."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = SetClock(NOW)
        self.token = JoinToken.new(KEY)
        self.book = self.again()

    def again(self) -> AdmissionBook:
        return AdmissionBook(self.directory, self.clock)


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path / "head")


def proved_by(token: JoinToken) -> Callable[[bytes], bool]:
    return lambda key: key == token.proof_key()


def joined(book: AdmissionBook, token: JoinToken, host: str, serial: int) -> None:
    book.commit(book.reserve(proved_by(token)), host, serial)


def refusal(book: AdmissionBook, token: JoinToken) -> str | None:
    with pytest.raises(JoinTokenError) as caught:
        book.reserve(proved_by(token))
    return caught.value.code


def test_r15_a_token_is_for_so_many_joins(books: Books) -> None:
    books.book.allow(books.token, max_joins=2)
    joined(books.book, books.token, "one", 1)
    joined(books.book, books.token, "two", 2)
    assert refusal(books.book, books.token) == "token_used_up"
    assert books.book.hosts() == ["one", "two"]


def test_r15_joins_under_way_count_and_a_broken_one_gives_its_use_back(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    seat = books.book.reserve(proved_by(books.token))
    assert refusal(books.book, books.token) == "token_used_up"
    books.book.cancel(seat)
    joined(books.book, books.token, "one", 1)
    books.book.cancel(seat)  # after all: nothing happens
    assert refusal(books.book, books.token) == "token_used_up"


@pytest.mark.parametrize(
    ("age_s", "code"), [(3600.0, "token_expired"), (1e9, "token_expired"), (-301, "token_expired")]
)
def test_r15_a_token_expires(books: Books, age_s: float, code: str) -> None:
    books.book.allow(books.token, max_joins=1, life_s=3600)
    books.clock.seconds = NOW + age_s
    assert refusal(books.book, books.token) == "token_expired"
    with pytest.raises(JoinTokenError, match="3600 s"):
        books.book.require_usable(books.token)


@pytest.mark.parametrize("age_s", [0.0, 3599.9, -299.0])
def test_a_token_lives_for_its_time(books: Books, age_s: float) -> None:
    books.book.allow(books.token, max_joins=1, life_s=3600)
    books.clock.seconds = NOW + age_s
    books.book.require_usable(books.token)
    joined(books.book, books.token, "one", 1)


def test_r15_a_revoked_token_is_refused_and_its_hosts_stay(books: Books) -> None:
    books.book.allow(books.token, max_joins=5)
    joined(books.book, books.token, "one", 1)
    books.book.revoke_all_tokens()
    assert refusal(books.book, books.token) == "token_revoked"
    books.book.require_known("one", 1)


def test_all_tokens_are_revoked_at_once_but_not_later_ones(books: Books) -> None:
    other = JoinToken.new(KEY)
    books.book.allow(books.token, max_joins=1)
    books.book.allow(other, max_joins=1)
    books.book.revoke_all_tokens()
    assert refusal(books.book, books.token) == refusal(books.book, other) == "token_revoked"
    newer = JoinToken.new(KEY)
    books.book.allow(newer, max_joins=1)
    joined(books.book, newer, "one", 1)


def test_a_token_that_is_revoked_while_a_worker_joins_lets_nobody_in(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    seat = books.book.reserve(proved_by(books.token))
    books.again().revoke_all_tokens()
    with pytest.raises(JoinTokenError, match="revoked"):
        books.book.commit(seat, "one", 1)
    assert books.book.hosts() == []


def test_two_heads_of_one_directory_do_not_let_in_more_than_the_token_is_for(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    other = books.again()
    one, two = books.book.reserve(proved_by(books.token)), other.reserve(proved_by(books.token))
    books.book.commit(one, "one", 1)
    with pytest.raises(JoinTokenError, match="used up"):
        other.commit(two, "two", 2)
    assert other.hosts() == ["one"]


def test_r15_an_unknown_token_is_wrong_and_nothing_more_is_said(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    assert refusal(books.book, JoinToken.new(KEY)) == "wrong_token"
    assert refusal(books.book, JoinToken.new(b"another key")) == "wrong_token"


def test_r15_a_restart_does_not_renew_a_token(books: Books) -> None:
    books.book.allow(books.token, max_joins=2, life_s=3600)
    joined(books.book, books.token, "one", 1)
    books.clock.seconds = NOW + 1800
    book = books.again()
    book.allow(books.token, max_joins=2, life_s=3600)
    joined(book, books.token, "two", 2)
    assert refusal(book, books.token) == "token_used_up"
    books.clock.seconds = NOW + 3600
    book = books.again()
    book.allow(books.token, max_joins=9, life_s=3600)
    assert refusal(book, books.token) == "token_expired"
    book.revoke_all_tokens()
    book.allow(books.token, max_joins=9, life_s=36000)
    assert refusal(books.again(), books.token) == "token_revoked"


def test_the_oldest_tokens_are_forgotten(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    for _ in range(MAX_TOKENS):
        books.book.allow(JoinToken.new(KEY), max_joins=1)
    assert refusal(books.book, books.token) == "wrong_token"


# --- certificates ---------------------------------------------------------------------------------


def test_r15_a_revoked_host_is_refused_until_it_joins_anew(books: Books) -> None:
    books.book.allow(books.token, max_joins=2)
    joined(books.book, books.token, "one", 0xAB)
    books.again().require_known("one", 0xAB)
    assert books.book.revoke_host("one")
    assert not books.book.revoke_host("one")
    with pytest.raises(CertificateError, match="revoked") as caught:
        books.again().require_known("one", 0xAB)
    assert caught.value.code == "certificate_revoked"
    joined(books.book, books.token, "one", 0xCD)
    books.book.require_known("one", 0xCD)
    with pytest.raises(CertificateError):
        books.book.require_known("one", 0xAB)


def test_a_certificate_whose_join_was_not_finished_is_refused(books: Books) -> None:
    with pytest.raises(CertificateError):
        books.book.require_known("one", 1)


def test_both_certificates_are_taken_until_a_renewal_is_over(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    joined(books.book, books.token, "one", 1)
    books.book.offer("one", present=1, renewed=2)
    books.book.require_known("one", 1)
    books.book.require_known("one", 2)
    books.book.renew("one", present=1, serial=2)
    with pytest.raises(CertificateError):
        books.book.require_known("one", 1)


def test_r15_a_revocation_outlasts_a_rejoin_that_was_under_way(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    joined(books.book, books.token, "one", 1)
    books.book.offer("one", present=1, renewed=2)
    books.again().revoke_host("one")
    for change in (
        lambda: books.book.offer("one", present=1, renewed=3),
        lambda: books.book.renew("one", present=1, serial=2),
        lambda: books.book.renew("one", present=1, serial=1),
    ):
        with pytest.raises(CertificateError) as caught:
            change()
        assert caught.value.code == "certificate_revoked"
    assert books.book.hosts() == []


# --- the file -------------------------------------------------------------------------------------


def test_the_book_is_private_and_holds_no_token(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    joined(books.book, books.token, "one", 1)
    files = list(books.directory.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    text = "".join(file.read_text() for file in files)
    for part in books.token.text().split("-")[1:]:
        assert part not in text


def test_a_damaged_book_is_refused_and_not_begun_anew(books: Books) -> None:
    books.book.allow(books.token, max_joins=1)
    path = books.directory / "admission.json"
    path.write_bytes(b"{")
    for read in (books.book.hosts, lambda: books.book.reserve(proved_by(books.token))):
        with pytest.raises(UsageError, match="damaged"):
            read()
    assert path.read_bytes() == b"{"


def test_r16_a_book_that_stays_as_it_is_is_not_written(books: Books) -> None:
    books.book.allow(books.token, 1)
    joined(books.book, books.token, "desk", 7)
    path = books.directory / "admission.json"
    written = path.stat().st_ino
    books.book.renew("desk", 7, 7)
    assert path.stat().st_ino == written
    books.book.renew("desk", 7, 8)
    assert path.stat().st_ino != written
