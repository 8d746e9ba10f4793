"""The operations that an administrator may ask of a running engine, and their results. Plain data.

The core takes an operation between two plans, and these are the same two for every rank, because ranks do
nothing but replay plans in order [G4] [d18]:

    accepted      the first plan that is made under it is step n
    completed     a plan from n on has crossed all stages: every rank has everything before n behind it

Asked for over HTTP (`server.routes.admin`), carried by `engine.client.async_engine`, done by
`engine.core.operations_in_force`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from penstock.config.limits import MAX_SESSION_ID_CHARACTERS
from penstock.errors import ErrorInfo, InvalidRequestError

PauseMode = Literal["keep", "wait", "abort"]


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Compute no request, until `Resume`. Requests may come meanwhile, and wait.

    Attributes:
        mode: what becomes of those that have started: `keep` holds them where they are, `wait` lets them
            end, `abort` ends all that are there, waiting ones too, with an error.
    """

    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on. A pause that is not complete never will be."""


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Hide all earlier results in the pool from requests that start from now on; running ones go on.

    Complete when, besides, every copy of a block has ended that was on its way to or from the store.

    Attributes:
        store: the store's records of this model are deleted too. Where some may be left, the operation ends
            with a `StoreError`; the pool is flushed all the same.
    """

    store: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests with an error, wherever they stand.

    Attributes:
        request_ids: each stands for the request of that id, and for all whose ids begin with it and a dash,
            as those of one HTTP request do. None: all requests that are there.
    """

    request_ids: list[str] | None = None

    def concerns(self, request_id: str) -> bool:
        """Return whether a request is among those to end."""
        return self.request_ids is None or any(
            request_id == listed_id or request_id.startswith((f"{listed_id}-", f"{listed_id}/"))
            for listed_id in self.request_ids
        )


MAX_PLAN_INTERVAL_MS = 10_000


class SlowDown(msgspec.Struct, frozen=True, tag="slow_down"):
    """Let plans with work follow one another no faster than this; probes go on.

    Attributes:
        interval_ms: from one to the next at least, 0 to `MAX_PLAN_INTERVAL_MS`; 0 is full speed again.
    """

    interval_ms: int = 0


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Begin a profile with the first plan under it.

    Ranks report at once after that plan, so that earlier work is told apart.
    """


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End a profile: the work of ranks from the first plan under it on does not belong to it."""


SESSION_ID = f"[A-Za-z0-9._-]{{1,{MAX_SESSION_ID_CHARACTERS}}}"


def check_session_id(session_id: str) -> None:
    """Raise `InvalidRequestError` for text that cannot name a session."""
    if re.fullmatch(SESSION_ID, session_id) is None:
        raise InvalidRequestError(
            f"session_id must be 1 to {MAX_SESSION_ID_CHARACTERS} letters, digits, dots, dashes and "
            f"underscores, got {session_id[: 2 * MAX_SESSION_ID_CHARACTERS]!r}.",
            param="session_id",
        )


class OpenSession(msgspec.Struct, frozen=True, tag="open_session"):
    """Keep from now on what requests of this session compute, rather than what others leave.

    See `kvcache.sessions`. A session that is open already keeps what it has, under the new bounds.

    Attributes:
        capacity_tokens: most tokens that are kept of it; None: as much as all sessions together may have.
        idle_s: it is closed when it has not been used for this long.
        is_new: its name was made up for this operation, so that no replica can have it.
    """

    session_id: str
    capacity_tokens: int | None = None
    idle_s: float = 600.0
    is_new: bool = False


class CloseSession(msgspec.Struct, frozen=True, tag="close_session"):
    """Close a session: what was kept for it counts like any other's. Its requests go on.

    Ends with a `NotFoundError` where there is no such session.
    """

    session_id: str


Operation = (
    Pause | Resume | FlushCache | Abort | SlowDown | StartProfile | StopProfile | OpenSession | CloseSession
)


class OperationDone(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation.

    Attributes:
        accepted_step: the first step that was planned under it.
        completed_step: a step planned under it, and through all stages; None when it came to nothing.
        error: why it came to nothing.
        aborted: ids of the requests that an `Abort` has found and ended.
    """

    accepted_step: int
    completed_step: int | None = None
    error: ErrorInfo | None = None
    replica: int = 0
    aborted: list[str] | msgspec.UnsetType = msgspec.UNSET
