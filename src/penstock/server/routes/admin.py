"""`/pause`, `/resume`, `/flush_cache`, `/abort` and the like: for administrators, where an admin key is set.

An operation is answered when every rank of every replica has it behind it; see `penstock.operations`.
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
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")

DEFAULT_TIMEOUT_S = 60.0

Timeout = Annotated[float, msgspec.Meta(gt=0, le=3600, description="Seconds to wait for completion.")]
Session = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{SESSION_ID}$"})]


class TimeoutQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of an operation that has no others."""

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
    """The name of a session, its bounds, and the replica that has it."""

    session_id: str
    capacity_tokens: int | None  # None: as much as all sessions together may have
    idle_s: float
    replicas: list[OperationDone]


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Which session is closed, and in which replica."""

    session_id: str
    replicas: list[OperationDone]


class PauseState(msgspec.Struct, frozen=True, kw_only=True):
    is_paused: bool


class AdminRoute:
    """The route that applies the operations of administrators; it answers when every rank is done.

    Args:
        lifecycle: knows the HTTP requests that run, so that one can be named by its x-request-id.
        profiler: that of the same engine.
        limits: limits of the times of sessions.
    """

    def __init__(self, engine: EngineLike, lifecycle: Lifecycle, profiler: Profiler, limits: Limits) -> None:
        self._limits = limits
        self._engine = engine
        self._lifecycle = lifecycle
        self._profiler = profiler

    async def pause(self, query: PauseQuery) -> Response:
        """Compute nothing until resumed. Started requests are kept, or may end, or are aborted with all."""
        return await self._pause(Pause(query.mode), query.timeout_s)

    async def resume(self, query: TimeoutQuery) -> Response:
        """Go on after a pause. Harmless where there is none."""
        return await self._pause(Resume(), query.timeout_s)

    async def is_paused(self, _query: NoQuery) -> Response:
        """Return whether any replica is paused, as of its last message, at most a second ago."""
        stats = self._engine.status().stats
        return json_response(
            msgspec.json.encode(PauseState(is_paused=stats is not None and stats.scheduler.paused))
        )

    async def flush_cache(self, query: FlushQuery) -> Response:
        """Hide all earlier results from requests that start from now on; running ones go on."""
        done = await self._engine.operate(FlushCache(query.store), query.timeout_s)
        return json_response(msgspec.json.encode(Flushed(replicas=done)))

    async def abort(self, query: AbortQuery) -> Response:
        """End requests at once; clients get the error `aborted_by_administrator`."""
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
        """Let plans follow one another no faster than this, for tests of what is slow; 0 ends it."""
        done = await self._engine.operate(SlowDown(query.interval_ms), query.timeout_s)
        return json_response(msgspec.json.encode(Slowed(interval_ms=query.interval_ms, replicas=done)))

    async def open_session(self, query: OpenSessionQuery) -> Response:
        """Keep what requests of this session compute, before what others leave.

        It is kept until the session is closed or has not been used for too long. Again with the same name:
        give it other bounds.
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
        """Keep nothing for it any more. Its requests go on."""
        check_session_id(query.session_id)
        done = await self._engine.operate(CloseSession(query.session_id), query.timeout_s)
        return json_response(msgspec.json.encode(SessionClosed(session_id=query.session_id, replicas=done)))

    async def start_profile(self, query: TimeoutQuery) -> Response:
        """Record what every stage does, from the same step on. It ends by itself after some time."""
        return json_response(msgspec.json.encode(await self._profiler.start(query.timeout_s)))

    async def stop_profile(self, query: TimeoutQuery) -> Response:
        """End the recording at the same step everywhere, and write it as a trace that Perfetto opens."""
        return json_response(msgspec.json.encode(await self._profiler.stop(query.timeout_s)))

    def _meant(self, names: list[str]) -> list[str]:
        """What the engine calls the requests that are named so in logs, headers and answers."""
        meant = {name.removeprefix(prefix) for name in names for prefix in _ANSWER_PREFIXES} | {*names}
        records = [work.record for work in self._lifecycle.running if isinstance(work, GenerationResponse)]
        return sorted(meant | {record.unique_id for record in records if record.request_id in meant})

    async def _pause(self, operation: Pause | Resume, timeout_s: float) -> Response:
        done = await self._engine.operate(operation, timeout_s)
        return json_response(
            msgspec.json.encode(Applied(is_paused=isinstance(operation, Pause), replicas=done))
        )
