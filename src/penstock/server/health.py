"""`/health` (= `/health/ready`), `/health/live`, `/version`, `/metrics`.

Ready means: every stage has answered lately, the queue takes requests, and the server is not shutting down.
Live means: this process's event loop turns. A 503 says why as `{state, stage, reason, since}`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.responses import Response

from penstock import __version__
from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.errors import RETRY_AFTER_S, json_response
from penstock.server.keep_alive import KeepAlive
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import CONTENT_TYPE, Metrics

State = Literal["ready", "not_ready", "overloaded", "draining", "stuck"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`since`: Unix time from which on this state holds, where it is known."""

    state: State
    stage: int | None = None
    reason: str = ""
    since: float | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class HealthRoute:
    def __init__(
        self,
        model: ServedModel,
        engine: EngineLike,
        lifecycle: Lifecycle,
        keep_alive: KeepAlive,
        metrics: Metrics,
    ) -> None:
        self._max_waiting = model.max_waiting_requests
        self._engine = engine
        self._lifecycle = lifecycle
        self._keep_alive = keep_alive
        self._metrics = metrics

    async def ready(self) -> Response:
        """Whether a request sent now would be served."""
        return _respond(self._readiness())

    async def live(self) -> Response:
        """Whether this process works at all."""
        if self._keep_alive.loop_turns:
            return _respond(Health(state="ready"))
        return _respond(Health(state="stuck", reason="the event loop was blocked for seconds"))

    async def version(self) -> Response:
        return json_response(msgspec.json.encode(Version(version=__version__)))

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    def _readiness(self) -> Health:
        if self._lifecycle.is_draining:
            reason = f"shutting down, {self._lifecycle.num_running} requests to finish"
            return Health(state="draining", reason=reason, since=self._lifecycle.draining_since)
        status = self._engine.status()
        if not status.ready:
            return Health(
                state="not_ready", stage=status.stage, reason=status.reason or "starting", since=status.since
            )
        waiting = status.stats.num_waiting if status.stats is not None else 0
        if waiting >= self._max_waiting:
            return Health(state="overloaded", reason=f"{waiting} requests wait, which is the limit")
        return Health(state="ready", since=status.since)


def _respond(health: Health) -> Response:
    body = msgspec.json.encode(health)
    if health.state == "ready":
        return json_response(body)
    return json_response(body, status=503, headers={"retry-after": str(RETRY_AFTER_S)})
