"""The life of a worker: it joins the head, serves it as an agent, and joins again after a lost connection.

    joining ──▶ serving ──the connection breaks──▶ its ranks go on for a while
       ▲                                                  │
       └────────────── after a pause ◀────────────────────┘

`hosts.station` has the parts that a worker keeps between connections; they go on while `hosts.join_attempts`
joins. Called by `penstock worker`. A worker ends at once when it is told to. It also ends when the head will
never let it in, or has been away for too long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import JoinError, LinkClosedError, PeerError, PenstockError, WaitTimeoutError
from penstock.hosts.join_attempts import JoinAttempts
from penstock.hosts.network.followed_head import Find, FollowedHead, found_nowhere
from penstock.hosts.station import Station, WorkerSettings
from penstock.hosts.weights.weight_cache import WeightCache
from penstock.process.readiness import Waitable
from penstock.trust.certificates import read_certificate
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import Address
from penstock.trust.membership import Membership
from penstock.trust.private_files import make_private_directory
from penstock.trust.token_prompt import Tokens

FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 10.0  # between two tries to reach the head
SAID_PAUSE_S = 1.0  # shorter pauses are not worth a line for the user

Tell = Callable[[str], None]


def credentials_path(state: Path, head: Address, name: str) -> Path:
    """Return the path of the file in which the host `name` keeps its certificate for a head.

    Args:
        state: directory of the worker's state.
        head: address and port of the head.
        name: name of the worker's host.
    """
    host, port = head
    return state / "worker" / f"{host.replace('/', '_')}_{port}_{name}"


def kept_certificate(path: Path, host: str, token: JoinToken | None) -> Path:
    """Return the path of the file that has a host's certificate for its head; `path` if there is none.

    The head is known by its token's cluster. It has another address after a new lease of DHCP, or if a search
    in the network comes upon another of its addresses. A token may be used up by then.

    Args:
        path: path of the certificate for the address of now; the file there is the right one if it exists.
        host: name of the worker's host. Hosts that share a home have their certificates in one directory.
        token: the join token, if it is at hand. Of several certificates of its cluster the newest is taken.
    """
    if token is None or path.exists():
        return path
    found: list[tuple[float, Path]] = []
    for other in path.parent.glob("*"):
        with contextlib.suppress(PenstockError, OSError):  # not a certificate, or not ours to read
            _, name, end = read_certificate(Credentials.load(other).certificate_pem)
            if (name.cluster, name.host) == (token.cluster, host):
                found.append((end, other))
    return max(found)[1] if found else path


class Worker:
    """The life of a worker on this host: it joins the head, serves it, and joins again when it is cut off.

    Args:
        settings: the worker's command line.
        tokens: source of the join token, used if this host has no certificate that the head accepts.
        tell: takes lines for the user.
        stop: object to poll: readable when the worker is to end.
        clock: returns monotonic seconds.
        find: searches for the head if it is not at its address any more (`FollowedHead`).
    """

    def __init__(
        self,
        settings: WorkerSettings,
        tokens: Tokens,
        tell: Tell,
        stop: Waitable,
        clock: Callable[[], float] = time.monotonic,
        find: Find = found_nowhere,
    ) -> None:
        self._settings = settings
        self._find = find
        self._tokens = tokens
        self._tell = tell
        self._stop = stop
        self._clock = clock
        self._path = credentials_path(settings.state, settings.head, settings.name)
        self._weights = settings.weights or settings.state / "weights"

    def run(self) -> None:
        """Join the head and serve it, again and again, until `stop` is readable.

        Also return when the head has been away for longer than the settings allow.

        Raises:
            JoinError: the head does not let this host in, and never will.
            PeerError: the head cannot be reached for the first join.
            UsageError: the token, the directory of state or the directory of weights cannot be used.
        """
        settings = self._settings
        make_private_directory(self._path.parent)
        kept = kept_certificate(self._path, settings.name, self._tokens.at_hand())
        with contextlib.suppress(OSError):  # there is none
            kept.replace(self._path)  # so that a later start finds it without the token
        membership = Membership(settings.name, self._path, self._tokens, self._tell)
        attempts = JoinAttempts(FollowedHead(membership, settings.head, self._find, self._tell).join)
        with (
            contextlib.closing(WeightCache(self._weights)) as cache,
            contextlib.closing(self._station(cache, attempts)) as station,
        ):
            with contextlib.closing(attempts):
                self._live(station, attempts, membership)
            ranks = " and ends its ranks" if station.has_members else ""
            self._tell(f"{settings.name} was asked to end{ranks}.")

    def _station(self, cache: WeightCache, attempts: JoinAttempts) -> Station:
        spare_path = self._path.with_name(f"{self._path.name}.spare")
        return Station(self._settings, spare_path, cache, self._tell, self._stop, attempts, self._clock)

    def _live(self, station: Station, attempts: JoinAttempts, membership: Membership) -> None:
        """Join and serve, again and again, until the worker is to end."""
        pauses, said = _Pauses(self._tell), ""
        left_at, patience_s = self._clock(), self._settings.patience_s
        while True:
            attempts.begin()
            if station.await_attempt():
                return
            try:
                head = attempts.take()
                said, joined_at = "", self._clock()
                if station.serve(head):
                    return
                left_at, patience_s = self._clock(), 0.0
                if left_at - joined_at > MOST_PAUSE_S:
                    pauses.begin_anew()
            except PeerError as error:
                away_s = self._clock() - left_at
                if membership.is_final(error) and not (_may_only_start(error) and away_s < patience_s):
                    raise
                if away_s > max(patience_s, self._settings.away_limit_s):
                    self._tell(
                        f"the head has been away for {away_s:.0f} s, so this worker takes it as ended."
                    )
                    return
                if error.message != said:
                    said = error.message
                    self._tell(f"{error}" if isinstance(error, JoinError) else said)
            if station.wait(pauses.next_s()):
                return


def _may_only_start(error: PeerError) -> bool:
    """Return whether the error may only mean that the head has not started yet."""
    return isinstance(error, LinkClosedError | WaitTimeoutError)


class _Pauses:
    """Pauses between tries: each longer than the last, up to a bound; the user is told about long ones."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.begin_anew()

    def begin_anew(self) -> None:
        """Let the next pause be a short one."""
        self._next_s, self._said_s = FIRST_PAUSE_S, 0.0

    def next_s(self) -> float:
        """Return the length of the pause that begins now."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, MOST_PAUSE_S)
        if pause_s >= SAID_PAUSE_S and pause_s != self._said_s:
            self._said_s = pause_s
            following = ", and so on" if pause_s == MOST_PAUSE_S else ""
            self._tell(f"this worker tries again to join the head in {pause_s:g} s{following}")
        return pause_s
