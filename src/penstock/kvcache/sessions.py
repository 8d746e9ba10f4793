"""The open sessions: conversations whose blocks are kept between requests, despite other traffic.

    open ──▶ a request of it ends: the blocks that it found or made are kept ──▶ … ──▶ close, or it was
                      ▲                                                      │         idle for too long
                      └──── its next turn finds them ────────────────────────┘

Kept blocks are given up last (`kvcache.eviction`), and never make a request wait. A session keeps the names
of blocks (their hashes, `kvcache.block_hash`), whether the blocks are there or not. There are three bounds:

    of each session     its capacity: names that only older turns had go first, and of one turn the deepest
                        block, since nothing behind a missing one can be found
    of all together     half of the pool: the session that was used longest ago loses names first
    in time             a session without a request for its idle timeout is closed by the core (`expire`)

Only the order in which blocks are given up depends on sessions. So they change which blocks plans name, and
no token. Owned by `scheduler.prefix_reuse`; opened and closed by `engine.core.operations_in_force`.
`take_changes` says which sessions were opened and closed, for clients.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import InvalidRequestError, NotFoundError, OverloadedError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.stats import SessionStats
from penstock.operations import CloseSession, OpenSession

KEPT_SHARE = 2  # sessions keep at most the pool's blocks divided by this


def unknown_session(session_id: str) -> NotFoundError:
    """Return the error for a request that names a session which is not open."""
    return NotFoundError(
        f"session {session_id!r} is not open: it never existed, was closed, or was idle for too long.",
        remedy="Open it (POST /open_session), or leave session_id out.",
        param="session_id",
        code="session_not_found",
    )


@dataclass(slots=True)
class _Session:
    """An open session.

    Attributes:
        asked: the operation that opened the session, or last changed its bounds.
        max_blocks: most names that are kept for it.
        names: names of blocks that are kept for it; the first is given up first.
    """

    asked: OpenSession
    max_blocks: int
    used_at: float  # clock seconds
    names: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class Sessions:
    """The open sessions (conversations), and the names (hashes) of the KV blocks kept for their next turns.

    Args:
        allocator: holds the blocks that are kept; without a prefix cache no session can be opened.
        max_sessions: most sessions open at once.
        clock: monotonic seconds.

    Attributes:
        num_reaped: sessions that were closed because they were idle.
    """

    def __init__(self, allocator: BlockAllocator, max_sessions: int, clock: Callable[[], float]) -> None:
        self._cache = allocator.pool.cache
        self._block_size = allocator.block_size
        self._max_blocks = allocator.num_blocks // KEPT_SHARE
        self._max_sessions = max_sessions
        self._clock = clock
        self._open: OrderedDict[str, _Session] = OrderedDict()  # used longest ago first
        self._live: dict[str, set[int]] = {}  # by session, open or not: arrivals of requests that name it
        self._keepers: Counter[bytes] = Counter()  # how many sessions keep each name
        self._look_at = math.inf  # before this time no session has been idle for too long
        self._changed: dict[str, OpenSession | None] = {}  # since the last `take_changes`; None: closed
        self.num_reaped = 0

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    @property
    def num_kept(self) -> int:
        """The number of names of blocks that all sessions together keep."""
        return len(self._keepers)

    def stats(self) -> SessionStats:
        return SessionStats(num_open=len(self._open), kept_blocks=self.num_kept, num_reaped=self.num_reaped)

    def opened(self) -> list[OpenSession]:
        """Return the operation that opened, or last changed, each open session."""
        return [session.asked for session in self._open.values()]

    def take_changes(self) -> tuple[list[OpenSession], list[str]]:
        """Return the sessions opened or changed, and the ids of those closed, since the last call."""
        changed, self._changed = self._changed, {}
        opened = [operation for operation in changed.values() if operation is not None]
        return opened, [session_id for session_id, operation in changed.items() if operation is None]

    # --- what administrators ask ----------------------------------------------------------------

    def apply(self, operation: OpenSession | CloseSession) -> None:
        """Open or close a session, as the operation says; errors are those of `open` and `close`."""
        if isinstance(operation, OpenSession):
            self.open(operation)
        else:
            self.close(operation.session_id)

    def open(self, operation: OpenSession) -> None:
        """Open a session (a conversation whose KV blocks are kept between requests), or change its bounds.

        A session that is open already gets the bounds of the operation; that counts as a use of the session.

        Raises:
            InvalidRequestError: there is no prefix cache.
            OverloadedError: the limit of open sessions is reached.
        """
        if not self._cache.is_on:
            raise InvalidRequestError(
                "this server has no prefix cache, so it has no sessions.",
                remedy="Start it without --no-enable-prefix-caching.",
                code="no_prefix_cache",
            )
        session = self._open.get(operation.session_id)
        if session is None and len(self._open) >= self._max_sessions:
            raise OverloadedError(
                f"{len(self._open)} sessions are open, which is the limit.",
                remedy="Close a session, wait until an idle session expires, or raise --max-sessions.",
                code="too_many_sessions",
            )
        now, max_blocks = self._clock(), self._max_blocks
        if operation.capacity_tokens is not None:
            max_blocks = min(max_blocks, operation.capacity_tokens // self._block_size)
        if session is None:
            self._open[operation.session_id] = session = _Session(operation, max_blocks, now)
        else:
            session.asked, session.max_blocks = operation, max_blocks
        self._use(session, now)
        self._shorten(session)
        self._look_at = min(self._look_at, self._idle_until(session, now))
        self._changed[operation.session_id] = operation

    def close(self, session_id: str) -> None:
        """Close a session: its blocks are not kept any longer, and its requests continue.

        Raises:
            NotFoundError: the session is not open.
        """
        self.require(session_id)
        self._drop_all(self._open.pop(session_id))
        self._changed[session_id] = None

    # --- what requests do -----------------------------------------------------------------------

    def require(self, session_id: str) -> None:
        """Raise `NotFoundError` unless the session is open; the id "" stands for no session and passes."""
        if session_id and session_id not in self._open:
            raise unknown_session(session_id)

    def enter(self, session_id: str, arrival: int) -> None:
        """Record that the session has a live request, so that it is not idle until that request leaves.

        May be called again for the same request. A session that is not open may be opened (again) while the
        request lives. The id "" stands for no session.

        Args:
            arrival: the request's number.
        """
        if session_id:
            self._live.setdefault(session_id, set()).add(arrival)
        session = self._open.get(session_id)
        if session is not None:
            self._use(session, self._clock())

    def leave(self, session_id: str, arrival: int, names: Sequence[bytes]) -> None:
        """Record that a request of the session has ended, and keep its blocks, within the session's bounds.

        If the session is not open, nothing is kept.

        Args:
            arrival: the request's number.
            names: names (hashes) of its blocks that are in the cache, from its first on.
        """
        live = self._live.get(session_id, set())
        live.discard(arrival)
        if not live:
            self._live.pop(session_id, None)
        session = self._open.get(session_id)
        if session is None:
            return
        self._use(session, self._clock())
        self._keep(session, names[: session.max_blocks])
        self._shorten(session)
        self._share()

    def expire(self) -> None:
        """Close the sessions without a live request that have been idle for longer than their timeout."""
        now = self._clock()
        if now < self._look_at:
            return
        ends = {name: self._idle_until(session, now) for name, session in self._open.items()}
        for session_id in [name for name, end in ends.items() if end <= now]:
            self.close(session_id)
            self.num_reaped += 1
            del ends[session_id]
        self._look_at = min(ends.values(), default=math.inf)

    def _idle_until(self, session: _Session, now: float) -> float:
        """Return the earliest time at which the session will have been idle for too long."""
        is_used = session.asked.session_id in self._live
        return (now if is_used else session.used_at) + session.asked.idle_s

    def forget(self) -> None:
        """Drop all names that sessions keep, since no block is there any more; the sessions stay open."""
        for session in self._open.values():
            self._drop_all(session)

    # --- names ----------------------------------------------------------------------------------

    def _use(self, session: _Session, now: float) -> None:
        session.used_at = now
        self._open.move_to_end(session.asked.session_id)

    def _keep(self, session: _Session, names: Sequence[bytes]) -> None:
        """Keep names: the session gives them up after all others that it keeps, and the first one last."""
        for name in reversed(names):
            if name in session.names:
                session.names.move_to_end(name)
                continue
            session.names[name] = None
            self._keepers[name] += 1
            if self._keepers[name] == 1:
                self._cache.keep(name)

    def _drop_first(self, session: _Session) -> None:
        name, _ = session.names.popitem(last=False)
        self._keepers[name] -= 1
        if not self._keepers[name]:
            del self._keepers[name]
            self._cache.release(name)

    def _drop_all(self, session: _Session) -> None:
        while session.names:
            self._drop_first(session)

    def _shorten(self, session: _Session) -> None:
        while len(session.names) > session.max_blocks:
            self._drop_first(session)

    def _share(self) -> None:
        for session in self._open.values():
            while session.names and len(self._keepers) > self._max_blocks:
                self._drop_first(session)
            if len(self._keepers) <= self._max_blocks:
                break
