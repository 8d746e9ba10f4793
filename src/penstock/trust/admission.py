"""The admission to a cluster: its tokens with their uses, and the certificate of each host.

A certificate that is not in the book is refused, so to revoke one is to take it out. All of it stands in one
private file of the head's state directory, under a lock, so that a restart neither renews a token nor forgets
what was revoked. Secrets of tokens are not in it, but keys that prove them are.

    book = AdmissionBook(directory, wall_clock)
    book.allow(token, max_joins=1, life_s=3600)
    seat = book.reserve(is_proved_by)   a use of the token, for as long as the join takes
    book.commit(seat, host, serial)  or  book.cancel(seat)

A join that breaks off gives its use back; its certificate was never entered and so is not taken.
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
MAX_TOKENS = 16  # remembered; the oldest is forgotten, and is then a wrong one
_BACKWARDS_S = 300.0  # by which the clock of the head may be set back while a token lives
_FILE, _LOCK = "admission.json", "admission.lock"
CERTIFICATE_REVOKED = "certificate_revoked"  # code of the error
_NEW_TOKEN = "Delete the token file of the head and restart the head, which makes a new token."


class _Token(msgspec.Struct, kw_only=True):
    """The record of a token."""

    proof_key: bytes
    begin: float  # when it was first allowed, in seconds since the epoch of Unix
    life_s: float
    max_joins: int
    num_joins: int = 0
    is_revoked: bool = False


class _Book(msgspec.Struct, kw_only=True):
    """The content of the file."""

    tokens: list[_Token] = []
    serials: dict[str, list[str]] = {}  # by host, of its certificate, in hexadecimal; two during a renewal


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A use of a token that is held while a worker joins."""

    number: int
    proof_key: bytes


class AdmissionBook:
    """The tokens, hosts and revocations of a cluster.

    Safe for threads, and for several heads of one directory.

    Args:
        directory: directory of the head's state.
        wall_clock: seconds since the epoch of Unix.
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
        return os.path.isfile(directory / _FILE)  # false too where it may not be looked at

    def allow(self, token: JoinToken, max_joins: int, life_s: float = DEFAULT_LIFE_S) -> None:
        """Take a token from now on. One that is known keeps its beginning, its uses and its revocation."""
        key = token.proof_key()
        with self._changed() as book:
            known = next((entry for entry in book.tokens if entry.proof_key == key), None)
            if known is None:
                known = _Token(proof_key=key, begin=self._wall_clock(), life_s=life_s, max_joins=max_joins)
                book.tokens.append(known)
                del book.tokens[:-MAX_TOKENS]
            known.life_s, known.max_joins = life_s, max_joins

    def require_usable(self, token: JoinToken) -> None:
        """Refuse a token with which nobody could join any more, so that the head can say so when it starts.

        Raises:
            JoinTokenError: it is expired, used up or revoked, or was never allowed.
        """
        key = token.proof_key()
        entry = next((entry for entry in self._read().tokens if entry.proof_key == key), None)
        self._require_usable(entry)

    def revoke_all_tokens(self) -> None:
        """Take no token that was allowed until now. Hosts that have joined stay."""
        with self._changed() as book:
            for entry in book.tokens:
                entry.is_revoked = True

    def revoke_host(self, host: str) -> bool:
        """Take the certificate of a host no longer. The host may join anew with a token.

        Returns:
            Whether the host had one.
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
        """Return with how many tokens a worker could join now."""
        return sum(map(self._is_usable, self._read().tokens))

    def reserve(self, is_proved_by: Callable[[bytes], bool]) -> Seat:
        """Hold a use of the token that a worker has proved.

        Args:
            is_proved_by: whether the worker's proof was made with this key; compares in constant time.

        Raises:
            JoinTokenError: no token was proved, or the one that was is expired, used up or revoked.
        """
        with self._mutex:
            proved = [entry for entry in self._read().tokens if is_proved_by(entry.proof_key)]  # all tried
            key = self._require_usable(proved[0] if proved else None).proof_key
            self._num_seats += 1
            seat = Seat(number=self._num_seats, proof_key=key)
            self._seats[seat.number] = seat
            return seat

    def commit(self, seat: Seat, host: str, serial: int) -> None:
        """Count the use and take this certificate of the host alone, as the worker has stored it.

        Raises:
            JoinTokenError: in the meantime the token was revoked, or used up by a join at another head.
        """
        with self._changed() as book:
            self._seats.pop(seat.number, None)
            entry = next((entry for entry in book.tokens if entry.proof_key == seat.proof_key), None)
            self._require_usable(entry).num_joins += 1
            book.serials[host] = [f"{serial:x}"]

    def cancel(self, seat: Seat) -> None:
        """Give the use back, as the join broke off. Nothing happens after a commit."""
        with self._mutex:
            self._seats.pop(seat.number, None)

    def offer(self, host: str, present: int, renewed: int) -> None:
        """Take a newer certificate of a host beside the present one, since the newer one may not arrive.

        Raises:
            CertificateError: as `require_known`, of the present one.
        """
        with self._changed() as book:
            _require_known(book, host, present)  # it may be revoked since the host has proved itself
            book.serials[host] = [f"{present:x}", f"{renewed:x}"]

    def renew(self, host: str, present: int, serial: int) -> None:
        """Take one certificate alone of a host that has joined again and stored it.

        Args:
            present: serial of the certificate with which the host has proved itself.
            serial: serial of the certificate that the host has from now on, which may be the same.

        Raises:
            CertificateError: as `require_known`, of the present one.
        """
        with self._changed() as book:
            _require_known(book, host, present)  # as in `offer`
            book.serials[host] = [f"{serial:x}"]

    def require_known(self, host: str, serial: int) -> None:
        """Refuse a certificate that is not the one of its host.

        Raises:
            CertificateError: it is revoked, replaced by a newer one, or its join was never finished.
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
        """Read the book, and write it back when the block has changed it.

        A book that stays as it is needs no room: on a full disk hosts come back with their certificates.
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
