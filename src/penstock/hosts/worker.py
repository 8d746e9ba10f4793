"""The life of a worker: it joins the head, serves it as an agent, and comes back when the head is gone.

    joining ──certificate──▶ connecting ──▶ serving ──the connection breaks──▶ its ranks go on for a while
                                 ▲                                                  │
                                 └────────────── after a pause ◀────────────────────┘

What it has meanwhile is `hosts.station`. Called by `penstock worker`. Ends when it is told to, or when the
head will never let it in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from penstock.config.hosts import own_version
from penstock.errors import CertificateError, JoinError, NameTakenError, PeerError, WrongClusterError
from penstock.hosts.member import Waitable
from penstock.hosts.station import Station, WorkerSettings
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address, JoinedHead, join_with_token, rejoin
from penstock.trust.private_files import make_private_directory

FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 10.0  # between two tries to reach the head
SAID_PAUSE_S = 1.0  # shorter ones are not worth a line

Tell = Callable[[str], None]


def credentials_path(state: Path, head: Address, name: str) -> Path:
    """Return the file in which the host `name` keeps its certificate for a head."""
    host, port = head
    return state / "worker" / f"{host.replace('/', '_')}_{port}_{name}"


class Worker:
    """Args:
    settings: of this host.
    token: asks for the join token; called where this host has no certificate of the head yet.
    tell: takes lines for the user.
    stop: readable when the worker is to end.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        token: Callable[[], JoinToken],
        tell: Tell,
        stop: Waitable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._token = token
        self._tell = tell
        self._stop = stop
        self._clock = clock
        self._path = credentials_path(settings.state, settings.head, settings.name)
        self._weights = settings.weights or settings.state / "weights"

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            JoinError: the head does not let this host in, and never will.
            PeerError: it cannot be reached for the first join.
            UsageError: the token, the state directory or that of the weights cannot be used.
        """
        make_private_directory(self._path.parent)
        with (
            contextlib.closing(WeightCache(self._weights)) as cache,
            contextlib.closing(self._station(cache)) as station,
        ):
            self._live(station)

    def _station(self, cache: WeightCache) -> Station:
        spare_path = self._path.with_name(f"{self._path.name}.spare")
        return Station(self._settings, spare_path, cache, self._tell, self._stop, self._clock)

    def _live(self, station: Station) -> None:
        credentials = self._credentials()
        pause_s, said = FIRST_PAUSE_S, ""
        while True:
            began = self._clock()
            try:
                head = self._connect(credentials)
                credentials = head.credentials
                if station.serve(head):
                    return
            except (NameTakenError, PeerError) as error:
                if isinstance(error, JoinError) and not isinstance(error, NameTakenError):
                    raise
                if error.message != said:
                    said = error.message
                    self._tell(said)
            if self._clock() - began > MOST_PAUSE_S:
                pause_s, said = FIRST_PAUSE_S, ""
            if pause_s >= SAID_PAUSE_S:
                self._tell(f"the next try to join the head is in {pause_s:g} s")
            if station.wait(pause_s):
                return
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _credentials(self) -> Credentials:
        """Those of before, or new ones for a token."""
        try:
            return Credentials.load(self._path)
        except FileNotFoundError:
            return self._join()

    def _join(self) -> Credentials:
        settings = self._settings
        return join_with_token(
            settings.head, self._token(), host=settings.name, version=own_version(), path=self._path
        )

    def _connect(self, credentials: Credentials) -> JoinedHead:
        try:
            return rejoin(self._settings.head, credentials, version=own_version(), path=self._path)
        except (CertificateError, WrongClusterError) as error:  # or a head with a new identity
            self._tell(f"{error.message} A token is needed once more.")
            return rejoin(self._settings.head, self._join(), version=own_version(), path=self._path)
