"""The way in which a worker joins its cluster: by its certificate, or by a join token if it has none.

Only the head itself can make a worker give up its certificate. Anybody on the network can answer at the
head's address with another certificate, or break a handshake with an alert in plain text. A worker that has a
certificate therefore joins with a token again in two cases only:

- The head has proved itself and refuses the certificate, which is revoked or expired (`joining.needs_token`).
- The join fails, and the token at hand is for another cluster than the certificate. The head was set up anew,
  and somebody has brought its new token.

Used by `hosts.worker`, in a thread of `hosts.join_attempts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from penstock.config.hosts import own_version
from penstock.errors import (
    CertificateError,
    JoinError,
    OtherVersionError,
    PeerError,
    PenstockError,
    UsageError,
    WrongClusterError,
)
from penstock.trust.cancellation import Cancellation
from penstock.trust.certificates import certified_key, read_certificate
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address, JoinedHead, join_with_token, needs_token, rejoin
from penstock.trust.token_prompt import NO_TOKEN, Tokens
from penstock.trust.worker_join import CertificateClaim, KeptCertificateClaim


class Membership:
    """The proofs of this host for its head: a certificate and tokens.

    Args:
        name: name of this host.
        path: path of the file with the certificate.
        tokens: source of join tokens.
        tell: takes lines for the user.
    """

    def __init__(self, name: str, path: Path, tokens: Tokens, tell: Callable[[str], None]) -> None:
        self._name = name
        self._path = path
        self._tokens = tokens
        self._tell = tell
        self._credentials: list[Credentials] = []  # none, or one
        with contextlib.suppress(FileNotFoundError):
            self._credentials.append(Credentials.load(path))

    @property
    def cluster(self) -> str:
        """The name of the cluster that this host has a certificate of; empty if it has none."""
        return read_certificate(self._credentials[0].certificate_pem)[1].cluster if self._credentials else ""

    def is_final(self, error: PeerError) -> bool:
        """Return whether another try is of no use, because the user must do something first.

        For a host that has never joined, every error is final.
        """
        return not self._credentials or isinstance(error, OtherVersionError) or error.code == NO_TOKEN

    def join(self, head: Address, cancellation: Cancellation) -> JoinedHead:
        """Join the head once; to be called from one thread at a time.

        Args:
            head: address where the head listens.
            cancellation: ends the join from another thread.

        Raises:
            JoinError: the head, or this host, refuses.
            PeerError: the head cannot be reached, or does not answer in time.
            UsageError: the token or the state directory cannot be used; only at a first join.
            CancelledError: the join is not wanted any more.
        """
        if not self._credentials:
            return self._join_with(head, self._tokens.ask(cancellation), cancellation)
        try:
            return self._come_back(head, cancellation)
        except UsageError as error:  # here or at the head, such as a full disk: a later try may succeed
            raise JoinError(error.message, remedy=error.remedy) from error
        except PenstockError:  # raised as it is; some of these are an OSError too
            raise
        except OSError as error:  # before a connection is tried, such as too many open files
            raise JoinError(f"this host cannot join at the moment: {error.strerror or error}.") from error

    def _come_back(self, head: Address, cancellation: Cancellation) -> JoinedHead:
        """Join with the certificate, or with a token if that is needed again."""
        try:
            return self._rejoin(head, cancellation)
        except (CertificateError, WrongClusterError) as error:
            return self._join_with(head, self._other_token(error, cancellation), cancellation)

    def _rejoin(self, head: Address, cancellation: Cancellation) -> JoinedHead:
        """Join with the certificate, and keep it if this host or the head has no room for a newer one."""
        try:
            return self._rejoin_by(CertificateClaim, head, cancellation)
        except UsageError as error:
            self._tell(f"{error.message} This host joins with the certificate that it has.")
            return self._rejoin_by(KeptCertificateClaim, head, cancellation)

    def _rejoin_by(
        self, claimed: type[CertificateClaim], head: Address, cancellation: Cancellation
    ) -> JoinedHead:
        joined = rejoin(
            head,
            self._credentials[0],
            version=own_version(),
            path=self._path,
            hold=cancellation.add,
            claimed=claimed,
        )
        self._credentials = [joined.credentials]
        return joined

    def _join_with(self, head: Address, token: JoinToken, cancellation: Cancellation) -> JoinedHead:
        credentials = join_with_token(
            head,
            token,
            host=self._name,
            version=own_version(),
            path=self._path,
            hold=cancellation.add,
        )
        self._credentials = [credentials]
        return self._rejoin(head, cancellation)

    def _other_token(
        self, error: CertificateError | WrongClusterError, cancellation: Cancellation
    ) -> JoinToken:
        """Return the token to join with after this refusal; raise `JoinError` if the certificate is kept."""
        if needs_token(error):
            self._tell(f"{error.message} A token is needed again.")
            try:
                return self._tokens.ask(cancellation)
            except UsageError as missing:  # the file may still come
                raise JoinError(missing.message, remedy=missing.remedy, code=error.code) from error
        token = self._tokens.at_hand()
        if token is None or token.is_pin_of(certified_key(self._credentials[0].authority_pem)):
            raise _kept(error) from error
        return token


def _kept(error: CertificateError | WrongClusterError) -> JoinError:
    """Return the error that tells the user that this host goes on trying with its certificate."""
    return type(error)(
        f"{error.message} Any host on the network can cause this, so this host keeps its certificate and "
        "tries again.",
        remedy="Check the address and the clocks of both hosts. If the head was set up again, copy its new "
        "token to the file of --join-token-file, or restart the worker with it.",
        code=error.code,
    )
