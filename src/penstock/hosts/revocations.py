"""Ends the head's connections of a worker whose certificate is no longer in the book of admitted hosts.

`penstock hosts revoke` takes a certificate out of the book while the head runs. Therefore the head reads the
book, a file of some hundred bytes, each second. It compares the book with the certificates of the connected
workers. Used by `hosts.gathering`, in the supervisor's thread. A worker that comes later is refused at the
door (`trust.head_join`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.errors import CertificateError, PeerError, PenstockError
from penstock.process.rhythm import next_beat
from penstock.trust.admission import AdmissionBook

LOOK_EVERY_S = 1.0


class OpenWeights(Protocol):
    """The interface of the connections over which workers fetch weights from the head."""

    def hosts(self) -> set[str]:
        """Return the names of the hosts that have a connection for weights open now."""
        ...

    def drop(self, host: str) -> None:
        """End all connections over which a host fetches weights."""
        ...


class ConnectedWorker(Protocol):
    """The interface of a worker that has joined before, and that can be shut out if it is connected now."""

    def shut_out(self, error: PeerError) -> None:
        """End the worker's connection and give the worker up as lost, if it is connected; else do nothing.

        Args:
            error: the reason.
        """
        ...


class Revocations:
    """The certificates of the workers that have joined; it shuts out workers whose certificate is revoked.

    Args:
        book: the certificates of the hosts that may join.
        weights: the connections over which workers fetch weights; those of such workers are ended too.
        warn: takes warnings for the user.
    """

    def __init__(self, book: AdmissionBook, weights: OpenWeights, warn: Callable[[str], None]) -> None:
        self._book = book
        self._weights = weights
        self._warn = warn
        self._serials: dict[str, int] = {}  # by host: serial of the certificate of its newest connection
        self._looked_at = -math.inf
        self._complaint = ""

    def note(self, host: str, serial: int) -> None:
        """Remember the serial number of the certificate with which the worker of a host has just joined."""
        self._serials[host] = serial

    def apply(self, now: float, workers: Mapping[str, ConnectedWorker]) -> None:
        """Shut out the workers whose certificates are revoked. Reads the book at most once a second.

        Args:
            now: monotonic seconds.
            workers: all workers that have joined so far, by name of their host.
        """
        if now < next_beat(self._looked_at, LOOK_EVERY_S):
            return
        self._looked_at = now
        known = self._known()
        if known is None:
            return
        for host, worker in workers.items():
            if self._serials[host] not in known.get(host, ()):
                worker.shut_out(
                    CertificateError(
                        "its certificate is revoked, or another worker has joined under its name."
                    )
                )
                self._weights.drop(host)
        for host in self._weights.hosts() - set(known):
            self._weights.drop(host)

    def _known(self) -> Mapping[str, frozenset[int]] | None:
        """Return the certificates in the book; None, after a warning, if the book cannot be read."""
        try:
            known = self._book.certificates()
        except PenstockError as error:
            complaint = f"{error.message} Until this is fixed, revoked workers stay connected."
            if complaint != self._complaint:
                self._warn(f"{complaint} {error.remedy}".rstrip())
            self._complaint = complaint
            return None
        self._complaint = ""
        return known
