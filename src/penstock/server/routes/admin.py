"""`/pause`, `/resume`, `/flush_cache`, `/abort` and the like: for administrators, where an admin key is set.

An operation is answered when every rank of every replica has it behind it; see `penstock.operations`.
"""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

import msgspec
from fastapi import Query
from starlette.requests import Request
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
)
from penstock.server.answers.generation import GenerationResponse
from penstock.server.engine_port import EngineLike
from penstock.server.http.errors import json_response
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.routes.profiler import Profiler

MAX_ABORTED = 64  # ids of one abort
MAX_ID_CHARACTERS = 160
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")

Timeout = Annotated[float, Query(gt=0, le=3600, description="Seconds to wait until it is complete.")]
Store = Annotated[bool, Query(description="Delete the store's records of this model too.")]
RequestIds = Annotated[
    list[str] | None,
    Query(max_length=MAX_ABORTED, description="Of a request: its x-request-id, or the id of its answer."),
]
Interval = Annotated[
    int, Query(ge=0, le=MAX_PLAN_INTERVAL_MS, description="Milliseconds between two plans; 0: full speed.")
]
All = Annotated[bool, Query(alias="all", description="Every request that is there; in place of ids.")]
_PATTERN = f"^{SESSION_ID}$"
NewSession = Annotated[
    str | None, Query(pattern=_PATTERN, description="Of the session; left out: one is made up.")
]
OldSession = Annotated[str, Query(pattern=_PATTERN, description="Of the session.")]
Capacity = Annotated[
    int | None,
    Query(ge=1, le=2**31 - 1, description="Tokens kept at most; left out: what all sessions may have."),
]
IdleTime = Annotated[
    float | None, Query(gt=0, description="Seconds without a request after which it is closed.")
]
DEFAULT_TIMEOUT_S = 60.0
_GIVEN_SEVERAL_TIMES = ("request_id",)
_EMPTY_BODY_BYTES = len("{}")  # as some clients send it who have nothing to say


def refuse_what_is_not_read(request: Request) -> None:
    """Raise `InvalidRequestError` for a body, and for a name in the query that its route does not have or
    that comes twice: who asks by another way, with a slip in a word or for two things at once, must not get
    something else."""
    has_body = int(request.headers.get("content-length", 0)) > _EMPTY_BODY_BYTES
    if has_body or "transfer-encoding" in request.headers:
        raise InvalidRequestError(
            f"{request.url.path} reads no body.",
            remedy="Put parameters into the query, as in /pause?mode=keep.",
            param="body",
            code="unexpected_body",
        )
    route = request.scope["route"]
    known = [field.alias for field in route.dependant.query_params]  # codespell:ignore dependant
    names = [name for name, _value in request.query_params.multi_items()]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        named = unknown[:MAX_ID_CHARACTERS]
        raise InvalidRequestError(
            f"{named!r} is no parameter of {route.path}.",
            remedy=f"It takes {' and '.join(known)}." if known else "It takes none.",
            param=named,
            code="unknown_parameter",
        )
    twice = next((name for name in names if names.count(name) > 1 and name not in _GIVEN_SEVERAL_TIMES), None)
    if twice is not None:
        raise InvalidRequestError(
            f"{twice} is given {names.count(twice)} times.",
            remedy="Give it once.",
            param=twice,
            code="invalid_value",
        )


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of an operation in each replica."""

    is_paused: bool
    replicas: list[OperationDone]


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a flush in each replica."""

    replicas: list[OperationDone]


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of an abort in each replica, with the requests that it has found there."""

    replicas: list[OperationDone]


class Slowed(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a change of pace in each replica."""

    interval_ms: int
    replicas: list[OperationDone]


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is called, its bounds, and the replica that has it."""

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
    """Args:
    lifecycle: knows the HTTP requests that run, for who names one by its x-request-id.
    profiler: of the same engine.
    limits: of the times of sessions.
    """

    def __init__(self, engine: EngineLike, lifecycle: Lifecycle, profiler: Profiler, limits: Limits) -> None:
        self._limits = limits
        self._engine = engine
        self._lifecycle = lifecycle
        self._profiler = profiler

    async def pause(self, mode: PauseMode = "keep", timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Compute for nobody until resumed. Who has started is kept, or may end, or is aborted with all."""
        return await self._pause(Pause(mode), timeout_s)

    async def resume(self, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Go on after a pause. Harmless where there is none."""
        return await self._pause(Resume(), timeout_s)

    async def is_paused(self) -> Response:
        """Whether any replica is paused, as of its last message, which is at most a second old."""
        stats = self._engine.status().stats
        return json_response(
            msgspec.json.encode(PauseState(is_paused=stats is not None and stats.scheduler.paused))
        )

    async def flush_cache(self, store: Store = False, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Let nobody who starts from now on find what was computed before. Who runs goes on undisturbed."""
        done = await self._engine.operate(FlushCache(store), timeout_s)
        return json_response(msgspec.json.encode(Flushed(replicas=done)))

    async def abort(
        self, request_id: RequestIds = None, every: All = False, timeout_s: Timeout = DEFAULT_TIMEOUT_S
    ) -> Response:
        """End requests at once, whoever's they are; clients get the error `aborted_by_administrator`."""
        if bool(request_id) == every:
            raise InvalidRequestError(
                "give request_id, once or several times, or all=true, and not both.",
                param="request_id",
                code="invalid_combination" if every else "missing_required_parameter",
            )
        names = request_id or []
        if any(not 1 <= len(name) <= MAX_ID_CHARACTERS for name in names):
            raise InvalidRequestError(
                f"a request_id must have 1 to {MAX_ID_CHARACTERS} characters.",
                param="request_id",
                code="out_of_range",
            )
        done = await self._engine.operate(Abort(None if every else self._meant(names)), timeout_s)
        return json_response(msgspec.json.encode(Aborted(replicas=done)))

    async def slow_down(self, interval_ms: Interval, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Let plans follow one another no faster than this, for tests of what is slow; 0 ends it."""
        done = await self._engine.operate(SlowDown(interval_ms), timeout_s)
        return json_response(msgspec.json.encode(Slowed(interval_ms=interval_ms, replicas=done)))

    async def open_session(
        self,
        session_id: NewSession = None,
        capacity_tokens: Capacity = None,
        idle_s: IdleTime = None,
        timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    ) -> Response:
        """Keep what requests compute that name this session, before what others leave, until it is closed or
        nobody has used it for too long. Again with the same name: give it other bounds."""
        idle_s, most_s = idle_s or self._limits.session_idle_s, self._limits.max_session_idle_s
        if idle_s > most_s:
            raise InvalidRequestError(
                f"idle_s is {idle_s:g}; this server allows {most_s:g}.",
                remedy="Ask for less, or raise --max-session-idle-seconds.",
                param="idle_s",
                code="out_of_range",
            )
        asked = OpenSession(session_id or f"session-{uuid4().hex}", capacity_tokens, idle_s)
        try:
            done = await self._engine.operate(asked, timeout_s)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"session {asked.session_id}: {error.message}",
                remedy="Ask for it once more, by its session_id, to wait longer.",
            ) from error
        opened = SessionOpened(
            session_id=asked.session_id,
            capacity_tokens=capacity_tokens,
            idle_s=idle_s,
            replicas=done,
        )
        return json_response(msgspec.json.encode(opened))

    async def close_session(self, session_id: OldSession, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Keep nothing for it any more. Its requests go on."""
        done = await self._engine.operate(CloseSession(session_id), timeout_s)
        return json_response(msgspec.json.encode(SessionClosed(session_id=session_id, replicas=done)))

    async def start_profile(self, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Record what every stage does, from the same step on. It ends by itself after some time."""
        return json_response(msgspec.json.encode(await self._profiler.start(timeout_s)))

    async def stop_profile(self, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """End the recording at the same step everywhere, and write it as a trace that Perfetto opens."""
        return json_response(msgspec.json.encode(await self._profiler.stop(timeout_s)))

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
