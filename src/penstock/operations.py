"""The operations that an administrator may ask of a running engine, and their results. Plain data.

The core puts an operation into force between two plans. These are the same two plans for every rank, because
ranks do nothing but replay plans in order [G4] [d18]:

    accepted      the operation is in force, and step n is the first that is planned under it
    completed     what the operation waits for has happened, and a step from n on that was planned after that
                  has crossed all stages: every rank has finished all steps before n

`server.routes.admin` takes operations over HTTP, `engine.client.async_engine` sends them to the core, and
`engine.core.operations_in_force` carries them out.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from penstock.config.limits import MAX_SESSION_ID_CHARACTERS
from penstock.errors import ErrorInfo, InvalidRequestError

PauseMode = Literal["keep", "wait", "abort"]


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Start no request until `Resume`. Requests that come meanwhile wait.

    Attributes:
        mode: what becomes of the requests that the engine has. `keep` holds the running ones where they are,
            `wait` lets them end, and `abort` ends all requests, also waiting ones, with an error.
    """

    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a pause. A `Pause` that is not complete by then ends with an error."""


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Hide the KV blocks on the devices from requests that start from now on; running requests go on.

    Blocks in the store stay findable, unless `store` is set. The operation waits for all copies of blocks to
    or from the store that were under way when it began.

    Attributes:
        store: the store's records of this model are deleted too. If some may be left, the result has a
            `StoreError`; the blocks on the devices are hidden all the same.
    """

    store: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests with an error, whether they wait or run.

    Attributes:
        request_ids: each stands for the request with that id, and for all requests whose ids begin with it
            and a dash or a slash, as the ids of the sequences of one HTTP request do. None: all requests.
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
    """Set the least time between two plans with tokens; health probes are not slowed down.

    Attributes:
        interval_ms: the least time from one plan to the next, 0 to `MAX_PLAN_INTERVAL_MS`; 0 is full speed.
    """

    interval_ms: int = 0


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Begin a profile of the ranks' work with the first step that is planned under this operation.

    Ranks report their times right after that step, so that the profile can leave out earlier work.
    """


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End a profile with the last step that was planned before this operation."""


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
    """Open a session: give up the KV blocks of its requests later than those of other requests.

    See `kvcache.sessions`. If the session is open already, it keeps its blocks, and gets the new bounds.

    Attributes:
        capacity_tokens: most tokens of the session whose blocks are kept; None: the bound of all sessions
            together.
        idle_s: the session is closed when it has had no request for so many seconds.
        is_new: the server made up the name for this operation, so that no replica has such a session.
    """

    session_id: str
    capacity_tokens: int | None = None
    idle_s: float = 600.0
    is_new: bool = False


class CloseSession(msgspec.Struct, frozen=True, tag="close_session"):
    """Close a session: its KV blocks are no longer kept longer than others. Its requests go on.

    The operation ends with a `NotFoundError` if no such session is open.
    """

    session_id: str


Operation = (
    Pause | Resume | FlushCache | Abort | SlowDown | StartProfile | StopProfile | OpenSession | CloseSession
)


class OperationDone(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation.

    Attributes:
        accepted_step: the first step that was planned under the operation.
        completed_step: the step that completed it by crossing all stages; None if it ended without being
            complete.
        error: why it ended without being complete; or, of a complete `FlushCache`, why records may be left
            in the store.
        replica: number of the replica that carried it out.
        aborted: ids of the requests that an `Abort` has found and ended; unset for other operations.
    """

    accepted_step: int
    completed_step: int | None = None
    error: ErrorInfo | None = None
    replica: int = 0
    aborted: list[str] | msgspec.UnsetType = msgspec.UNSET
