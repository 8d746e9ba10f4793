"""The admission to a cluster: its join tokens, how many joins each allows, and each host's certificate.

A certificate that is not in the book is refused; to revoke one is to remove it. The book is one private file
in the head's state directory, written under a lock. A restart therefore neither renews a token nor forgets
what was revoked. The file has no secrets of tokens, but the keys with which proofs of them are checked.

    book = AdmissionBook(directory, wall_clock)
    book.allow(token, max_joins=1, life_s=3600)
    seat = book.reserve(is_proved_by)   holds one use of the token while the worker joins
    book.commit(seat, host, serial)  or  book.cancel(seat)

A join that breaks off gives the use of the token back. Its certificate was never entered, so it is refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from penstock.errors import CertificateError, JoinTokenError, UsageError
from penstock.trust.join_token import JoinToken
from penstock.trust.private_files import locked, make_private_directory, read_private, replace_private

DEFAULT_LIFE_S = 3600.0  # --join-token-ttl
MAX_TOKENS = 16  # so many tokens are remembered; an older one is forgotten, and is refused as unknown
_BACKWARDS_S = 300.0  # the head's clock may be set back by so much while a token is valid
_FILE, _LOCK = "admission.json", "admission.lock"
CERTIFICATE_REVOKED = "certificate_revoked"  # code of the error for a certificate that is not in the book
_NEW_TOKEN = "Delete the token file of the head and restart the head, which makes a new token."


class _Token(msgspec.Struct, kw_only=True):
    """The record of a token."""

    proof_key: bytes
    begin: float  # when it was first allowed, in Unix time (seconds since 1970)
    life_s: float
    max_joins: int
    num_joins: int = 0
    is_revoked: bool = False


class _Book(msgspec.Struct, kw_only=True):
    """The content of the book's file."""

    tokens: list[_Token] = []
    serials: dict[str, list[str]] = {}  # by host: hexadecimal serials of its certificates; two in a renewal


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A use of a token, which is held while a worker joins."""

    number: int
    proof_key: bytes


class AdmissionBook:
    """The tokens, hosts and revocations of a cluster.

    Safe for several threads, and for several heads that use the same directory.

    Args:
        directory: directory of the head's state.
        wall_clock: Unix time (seconds since 1970).
    """

    def __init__(self, directory: Path, wall_clock: Callable[[], float]) -> None:
        make_private_directory(directory)
        self._path, self._lock_path = directory / _FILE, directory / _LOCK
        self._wall_clock = wall_clock
        self._mutex = threading.RLock()
        self._seats: dict[int, Seat] = {}
        self._num_seats = 0

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Return whether a head has begun a book in this directory."""
        return os.path.isfile(directory / _FILE)  # also False if this user may not look into the directory

    def allow(self, token: JoinToken, max_joins: int, life_s: float = DEFAULT_LIFE_S) -> None:
        """Accept a token from now on.

        If the token is known, its age and the number of its uses go on, and it stays revoked if it was.

        Args:
            max_joins: how often workers may join with the token.
            life_s: seconds from the first call in which the token is valid.
        """
        key = token.proof_key()
        with self._changed() as book:
            known = next((entry for entry in book.tokens if entry.proof_key == key), None)
            if known is None:
                known = _Token(proof_key=key, begin=self._wall_clock(), life_s=life_s, max_joins=max_joins)
                book.tokens.append(known)
                del book.tokens[:-MAX_TOKENS]
            known.life_s, known.max_joins = life_s, max_joins

    def require_usable(self, token: JoinToken) -> None:
        """Raise an error if nobody can join with a token any more, so that the head can say so at its start.

        Raises:
            JoinTokenError: the token is expired, used up or revoked, or was never allowed.
        """
        key = token.proof_key()
        entry = next((entry for entry in self._read().tokens if entry.proof_key == key), None)
        self._require_usable(entry)

    def revoke_all_tokens(self) -> None:
        """Refuse all tokens that were allowed until now; hosts that have joined stay."""
        with self._changed() as book:
            for entry in book.tokens:
                entry.is_revoked = True

    def revoke_host(self, host: str) -> bool:
        """Refuse the certificate of a host from now on; the host may join anew with a token.

        Returns:
            Whether the host had a certificate.
        """
        with self._changed() as book:
            return book.serials.pop(host, None) is not None

    def hosts(self) -> list[str]:
        """Return the names of the hosts that have a certificate."""
        return sorted(self._read().serials)

    def certificates(self) -> dict[str, frozenset[int]]:
        """Return the serial numbers of the certificates of each host: one, or two during a renewal."""
        return {
            host: frozenset(int(serial, 16) for serial in serials)
            for host, serials in self._read().serials.items()
        }

    def num_usable_tokens(self) -> int:
        """Return the number of tokens with which a worker could join now."""
        return sum(map(self._is_usable, self._read().tokens))

    def reserve(self, is_proved_by: Callable[[bytes], bool]) -> Seat:
        """Hold a use of the token that a worker has proved.

        Args:
            is_proved_by: returns whether the worker's proof was made with this key; compares in constant
                time.

        Raises:
            JoinTokenError: the proof fits no token, or its token is expired, used up or revoked.
        """
        with self._mutex:
            proved = [entry for entry in self._read().tokens if is_proved_by(entry.proof_key)]  # all
            key = self._require_usable(proved[0] if proved else None).proof_key
            self._num_seats += 1
            seat = Seat(number=self._num_seats, proof_key=key)
            self._seats[seat.number] = seat
            return seat

    def commit(self, seat: Seat, host: str, serial: int) -> None:
        """Count the use, and accept only this certificate of the host, which the worker has stored.

        Raises:
            JoinTokenError: meanwhile the token was revoked or has expired, or joins at another head have
                used it up.
        """
        with self._changed() as book:
            self._seats.pop(seat.number, None)
            entry = next((entry for entry in book.tokens if entry.proof_key == seat.proof_key), None)
            self._require_usable(entry).num_joins += 1
            book.serials[host] = [f"{serial:x}"]

    def cancel(self, seat: Seat) -> None:
        """Give the use back, because the join broke off; does nothing after `commit`."""
        with self._mutex:
            self._seats.pop(seat.number, None)

    def offer(self, host: str, present: int, renewed: int) -> None:
        """Accept a newer certificate of a host beside its present one, since the newer one may not arrive.

        Args:
            present: serial of the present certificate.
            renewed: serial of the newer certificate.

        Raises:
            CertificateError: the present certificate is not accepted any more (`require_known`).
        """
        with self._changed() as book:
            _require_known(book, host, present)  # it may have been revoked after the host had proved itself
            book.serials[host] = [f"{present:x}", f"{renewed:x}"]

    def renew(self, host: str, present: int, serial: int) -> None:
        """Accept only one certificate of a host that has joined again and has stored this certificate.

        Args:
            present: serial of the certificate with which the host has proved itself.
            serial: serial of the certificate that the host has from now on, which may be the same.

        Raises:
            CertificateError: the present certificate is not accepted any more (`require_known`).
        """
        with self._changed() as book:
            _require_known(book, host, present)  # as in `offer`
            book.serials[host] = [f"{serial:x}"]

    def require_known(self, host: str, serial: int) -> None:
        """Raise an error if a certificate is not one that the book has for its host.

        Raises:
            CertificateError: the certificate is revoked or was replaced by a newer one, or its join was never
                finished.
        """
        _require_known(self._read(), host, serial)

    def _is_usable(self, entry: _Token) -> bool:
        try:
            self._require_usable(entry)
        except JoinTokenError:
            return False
        return True

    def _require_usable(self, entry: _Token | None) -> _Token:
        if entry is None:
            raise JoinTokenError(
                "the head does not know the join token.", remedy="Copy it from the head again."
            )
        if entry.is_revoked:
            raise JoinTokenError("the join token was revoked.", remedy=_NEW_TOKEN, code="token_revoked")
        age_s = self._wall_clock() - entry.begin
        if not -_BACKWARDS_S <= age_s < entry.life_s:
            raise JoinTokenError(
                f"the join token has expired: it was valid for {entry.life_s:g} s.",
                remedy=_NEW_TOKEN,
                code="token_expired",
            )
        num_held = sum(seat.proof_key == entry.proof_key for seat in self._seats.values())
        if entry.num_joins + num_held >= entry.max_joins:
            raise JoinTokenError(
                f"the join token is used up: it was for {entry.max_joins} "
                f"{'worker' if entry.max_joins == 1 else 'workers'}.",
                remedy=_NEW_TOKEN,
                code="token_used_up",
            )
        return entry

    @contextlib.contextmanager
    def _changed(self) -> Iterator[_Book]:
        """Read the book, and write it back if the `with` block has changed it.

        An unchanged book is not written, so that hosts can come back with their certificates on a full disk.
        """
        with self._mutex, locked(self._lock_path):
            book = self._read()
            before = msgspec.json.encode(book)
            yield book
            after = msgspec.json.encode(book)
            if after != before or not self._path.exists():
                replace_private(self._path, msgspec.json.format(after, indent=1))

    def _read(self) -> _Book:
        try:
            return msgspec.json.decode(read_private(self._path), type=_Book)
        except FileNotFoundError:
            return _Book()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{self._path} is damaged, so the list of revoked certificates is lost.",
                remedy="Restore it from a copy; or delete the directory, and let all workers join again.",
            ) from error


def _require_known(book: _Book, host: str, serial: int) -> None:
    if f"{serial:x}" not in book.serials.get(host, ()):
        raise CertificateError(
            f"the certificate of the host {host} is revoked, or another worker has joined under its name.",
            remedy="Join again with a token.",
            code=CERTIFICATE_REVOKED,
        )
