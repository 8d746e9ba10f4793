"""What an administrator may ask of a running engine, and what became of it. Plain data.

The core takes an operation between two plans, and these are the same two for every rank, because ranks do
nothing but replay plans in order (rows G4, d18):

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
    """Compute for nobody, until `Resume`. Requests may come meanwhile, and wait.

    Attributes:
        mode: what becomes of those that have started: `keep` holds them where they are, `wait` lets them
            end, `abort` ends all that are there, waiting ones too, with an error.
    """

    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on. A pause that is not complete never will be."""


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Nobody who starts from now on finds in the pool what was computed before. Who runs goes on undisturbed.

    Complete when, besides, every copy of a block has ended that was on its way to or from the store.

    Attributes:
        store: the store's records of this model are deleted too. Where some may be left, the operation ends
            with a `StoreError`; the pool is flushed all the same.
    """

    store: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests, whoever's they are and wherever they stand, with an error.

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
    """What ranks do from the first plan under it on belongs to a profile; they report at once after it, so
    that what was before is told apart."""


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """What ranks do from the first plan under it on does not."""


SESSION_ID = f"[A-Za-z0-9._-]{{1,{MAX_SESSION_ID_CHARACTERS}}}"


def check_session_id(session_id: str) -> None:
    """Raise `InvalidRequestError` for what cannot name a session."""
    if re.fullmatch(SESSION_ID, session_id) is None:
        raise InvalidRequestError(
            f"session_id must be 1 to {MAX_SESSION_ID_CHARACTERS} letters, digits, dots, dashes and "
            f"underscores, got {session_id[: 2 * MAX_SESSION_ID_CHARACTERS]!r}.",
            param="session_id",
        )


class OpenSession(msgspec.Struct, frozen=True, tag="open_session"):
    """From now on keep what requests compute that name this session, before what others leave
    (`kvcache.sessions`). One that is open already keeps what it has, under the new bounds.

    Attributes:
        capacity_tokens: that are kept of it at most; None: as much as all sessions together may have.
        idle_s: it is closed when nobody has used it for this long.
        is_new: its name was made up for this operation, so that no replica can have it.
    """

    session_id: str
    capacity_tokens: int | None = None
    idle_s: float = 600.0
    is_new: bool = False


class CloseSession(msgspec.Struct, frozen=True, tag="close_session"):
    """What was kept for it is as any other's. Its requests go on. Ends with a `NotFoundError` where there is
    no such session."""

    session_id: str


Operation = (
    Pause | Resume | FlushCache | Abort | SlowDown | StartProfile | StopProfile | OpenSession | CloseSession
)


class OperationDone(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    accepted_step: the first that was planned under it.
    completed_step: planned under it, and through all stages; None when it came to nothing.
    error: why it did.
    aborted: ids of the requests that an `Abort` has found and ended.
    """

    accepted_step: int
    completed_step: int | None = None
    error: ErrorInfo | None = None
    replica: int = 0
    aborted: list[str] | msgspec.UnsetType = msgspec.UNSET
