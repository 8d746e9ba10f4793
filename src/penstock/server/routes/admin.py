"""`/pause`, `/resume`, `/flush_cache`, `/abort` and the like: for administrators, where an admin key is set.

An operation is answered when every rank of every replica has passed its first plan under it; see
`penstock.operations`.
"""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

import msgspec
from starlette.responses import Response

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError, WaitTimeoutError
from penstock.operations import (
    MAX_PLAN_INTERVAL_MS,
    SESSION_ID,
    Abort,
    CloseSession,
    FlushCache,
    OpenSession,
    OperationDone,
    Pause,
    PauseMode,
    Resume,
    SlowDown,
    check_session_id,
)
from penstock.server.answers.generation import GenerationResponse
from penstock.server.engine_port import EngineLike
from penstock.server.http.errors import json_response
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.routes.profiler import Profiler

MAX_ABORTED = 64  # ids of one abort
MAX_ID_CHARACTERS = 160
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")

DEFAULT_TIMEOUT_S = 60.0

Timeout = Annotated[float, msgspec.Meta(gt=0, le=3600, description="Seconds to wait for completion.")]
Session = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{SESSION_ID}$"})]


class TimeoutQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of an operation that takes nothing but a time limit."""

    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class NoQuery(msgspec.Struct, frozen=True):
    """A query without parameters."""


class PauseQuery(msgspec.Struct, frozen=True, kw_only=True):
    mode: Annotated[PauseMode, msgspec.Meta(extra_json_schema={"type": "string"})] = "keep"
    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class FlushQuery(msgspec.Struct, frozen=True, kw_only=True):
    store: Annotated[bool, msgspec.Meta(description="Delete the store's records of this model too.")] = False
    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class AbortQuery(msgspec.Struct, frozen=True, kw_only=True):
    request_id: Annotated[
        Annotated[list[str], msgspec.Meta(max_length=MAX_ABORTED)] | None,
        msgspec.Meta(description="x-request-id of a request, or the id of its answer."),
    ] = None
    every: Annotated[bool, msgspec.Meta(description="Abort all requests, instead of ids.")] = msgspec.field(
        default=False, name="all"
    )
    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class SlowDownQuery(msgspec.Struct, frozen=True, kw_only=True):
    interval_ms: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=MAX_PLAN_INTERVAL_MS, description="Milliseconds between two plans; 0: full speed."
        ),
    ]
    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class OpenSessionQuery(msgspec.Struct, frozen=True, kw_only=True):
    session_id: Annotated[
        Session | None, msgspec.Meta(description="Id of the session; default: a new id.")
    ] = None
    capacity_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None,
        msgspec.Meta(description="Most tokens kept; default: the limit of all sessions."),
    ] = None
    idle_s: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        msgspec.Meta(description="Idle seconds after which the session is closed."),
    ] = None
    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class CloseSessionQuery(msgspec.Struct, frozen=True, kw_only=True):
    session_id: Annotated[Session, msgspec.Meta(description="Id of the session.")]
    timeout_s: Timeout = DEFAULT_TIMEOUT_S


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an operation in each replica."""

    is_paused: bool
    replicas: list[OperationDone]


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a flush in each replica."""

    replicas: list[OperationDone]


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an abort in each replica, with the requests that it has found there."""

    replicas: list[OperationDone]


class Slowed(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a change of pace in each replica."""

    interval_ms: int
    replicas: list[OperationDone]


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a session, its bounds, and the result in the replica that has it."""

    session_id: str
    capacity_tokens: int | None  # None: as many as all sessions together may keep
    idle_s: float
    replicas: list[OperationDone]


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a session that is closed, and the result in the replica that had it."""

    session_id: str
    replicas: list[OperationDone]


class PauseState(msgspec.Struct, frozen=True, kw_only=True):
    is_paused: bool


class AdminRoute:
    """The routes that apply the operations of administrators.

    Args:
        lifecycle: knows the running HTTP requests, so that an abort can name one by its x-request-id.
        profiler: makes the profiles of the same engine.
        limits: has the limits on the idle time of sessions.
    """

    def __init__(self, engine: EngineLike, lifecycle: Lifecycle, profiler: Profiler, limits: Limits) -> None:
        self._limits = limits
        self._engine = engine
        self._lifecycle = lifecycle
        self._profiler = profiler

    async def pause(self, query: PauseQuery) -> Response:
        """Compute no requests until `/resume`.

        With the mode `keep`, started requests are held where they are; with `wait`, they end first; with
        `abort`, all requests are aborted, waiting ones too.
        """
        return await self._pause(Pause(query.mode), query.timeout_s)

    async def resume(self, query: TimeoutQuery) -> Response:
        """Continue after a pause. Harmless without a pause."""
        return await self._pause(Resume(), query.timeout_s)

    async def is_paused(self, _query: NoQuery) -> Response:
        """Return whether any replica is paused, by its last message, which is at most about a second old."""
        stats = self._engine.status().stats
        return json_response(
            msgspec.json.encode(PauseState(is_paused=stats is not None and stats.scheduler.paused))
        )

    async def flush_cache(self, query: FlushQuery) -> Response:
        """Hide all cached KV blocks from requests that start from now on; running requests continue."""
        done = await self._engine.operate(FlushCache(query.store), query.timeout_s)
        return json_response(msgspec.json.encode(Flushed(replicas=done)))

    async def abort(self, query: AbortQuery) -> Response:
        """End requests at once; their clients get the error `aborted_by_administrator`."""
        if bool(query.request_id) == query.every:
            raise InvalidRequestError(
                "give either request_id, once or several times, or all=true.",
                param="request_id",
                code="invalid_combination" if query.every else "missing_required_parameter",
            )
        names = query.request_id or []
        if any(not 1 <= len(name) <= MAX_ID_CHARACTERS for name in names):
            raise InvalidRequestError(
                f"a request_id must have 1 to {MAX_ID_CHARACTERS} characters.",
                param="request_id",
                code="out_of_range",
            )
        done = await self._engine.operate(Abort(None if query.every else self._meant(names)), query.timeout_s)
        return json_response(msgspec.json.encode(Aborted(replicas=done)))

    async def slow_down(self, query: SlowDownQuery) -> Response:
        """Let at least `interval_ms` pass between two plans with tokens, for tests; 0: full speed."""
        done = await self._engine.operate(SlowDown(query.interval_ms), query.timeout_s)
        return json_response(msgspec.json.encode(Slowed(interval_ms=query.interval_ms, replicas=done)))

    async def open_session(self, query: OpenSessionQuery) -> Response:
        """Keep the KV blocks that requests of this session compute, in preference to those of others.

        They are kept until the session is closed, or has been idle for too long. If the session is open
        already, it gets the new bounds.
        """
        if query.session_id is not None:
            check_session_id(query.session_id)
        idle_s, most_s = query.idle_s or self._limits.session_idle_s, self._limits.max_session_idle_s
        if idle_s > most_s:
            raise InvalidRequestError(
                f"idle_s is {idle_s:g}; this server allows {most_s:g}.",
                remedy="Lower it, or raise --max-session-idle-seconds.",
                param="idle_s",
                code="out_of_range",
            )
        operation = OpenSession(
            query.session_id or f"session-{uuid4().hex}",
            query.capacity_tokens,
            idle_s,
            is_new=query.session_id is None,
        )
        try:
            done = await self._engine.operate(operation, query.timeout_s)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"session {operation.session_id}: {error.message}",
                remedy="Repeat the request with its session_id to wait longer.",
            ) from error
        opened = SessionOpened(
            session_id=operation.session_id,
            capacity_tokens=query.capacity_tokens,
            idle_s=idle_s,
            replicas=done,
        )
        return json_response(msgspec.json.encode(opened))

    async def close_session(self, query: CloseSessionQuery) -> Response:
        """Close a session: keep nothing for it any more. Its running requests continue."""
        check_session_id(query.session_id)
        done = await self._engine.operate(CloseSession(query.session_id), query.timeout_s)
        return json_response(msgspec.json.encode(SessionClosed(session_id=query.session_id, replicas=done)))

    async def start_profile(self, query: TimeoutQuery) -> Response:
        """Begin a profile: record what every stage does, from the same step on in all stages.

        It ends by itself at limits of time and size.
        """
        return json_response(msgspec.json.encode(await self._profiler.start(query.timeout_s)))

    async def stop_profile(self, query: TimeoutQuery) -> Response:
        """End the profile, at the same step in all stages, and write it as a trace that Perfetto opens.

        If it has ended by itself, return what was written then.
        """
        return json_response(msgspec.json.encode(await self._profiler.stop(query.timeout_s)))

    def _meant(self, names: list[str]) -> list[str]:
        """Return the engine's ids of requests that are named by the ids of logs, headers or answers."""
        meant = {name.removeprefix(prefix) for name in names for prefix in _ANSWER_PREFIXES} | {*names}
        records = [work.record for work in self._lifecycle.running if isinstance(work, GenerationResponse)]
        return sorted(meant | {record.unique_id for record in records if record.request_id in meant})

    async def _pause(self, operation: Pause | Resume, timeout_s: float) -> Response:
        done = await self._engine.operate(operation, timeout_s)
        return json_response(
            msgspec.json.encode(Applied(is_paused=isinstance(operation, Pause), replicas=done))
        )
