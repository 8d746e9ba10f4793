"""The routes `/health` (= `/health/ready`), `/health/live`, `/health/generate`, `/version`, `/metrics`.

Ready means: every stage has answered lately, the queue takes requests, there is memory, and the server is
neither paused nor shutting down. Live means: this process's event loop turns. Generate means: a token has
just come out of the pipe. A 503 says why as `{state, stage, reason, code, since}`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from typing import Literal

import msgspec
from starlette.responses import Response

from penstock import __version__
from penstock.errors import OverloadedError, PenstockError
from penstock.request import SamplingParams
from penstock.server.answers.generation import GenerationContext
from penstock.server.http.errors import RETRY_AFTER_S, json_response
from penstock.server.http.metrics import CONTENT_TYPE

PROBE_AGE_S = 1.0  # how long the result of a probe counts
PROBE_LIMIT_S = 10.0
PROBE_PLANS = 3  # a probe may have to wait for so many plans if an administrator has slowed them down
LOOK_S = 0.05  # between two looks whether a running request has got a token
NUM_LOOKS = 20
PROBE_PROMPT = [0]  # an id that every vocabulary has

State = Literal["ready", "not_ready", "overloaded", "draining", "paused", "stuck"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the server.

    `since` is the Unix time from which on this state holds, if it is known. `code` is that of the error which
    is the reason, if that error has one.
    """

    state: State
    stage: int | None = None
    reason: str = ""
    code: str | msgspec.UnsetType = msgspec.UNSET
    since: float | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class HealthRoute:
    def __init__(self, context: GenerationContext) -> None:
        self._context = context
        self._probe: asyncio.Task[Health] | None = None  # the last probe, which counts for `PROBE_AGE_S`
        self._probe_ended_at = -math.inf

    async def ready(self) -> Response:
        """Return whether a request sent now would be served."""
        return _respond(self._readiness())

    async def live(self) -> Response:
        """Return whether this process works at all."""
        if self._context.keep_alive.loop_turns:
            return _respond(Health(state="ready"))
        return _respond(Health(state="stuck", reason="the event loop was blocked for seconds"))

    async def generate(self) -> Response:
        """Return whether a token comes out of the pipe now. Requests within a second share one result."""
        probe = self._probe
        if probe is None or (probe.done() and self._context.clock() - self._probe_ended_at >= PROBE_AGE_S):
            probe = self._probe = asyncio.create_task(self._generated())
        return _respond(await asyncio.shield(probe))

    async def version(self) -> Response:
        return json_response(msgspec.json.encode(Version(version=__version__)))

    async def metrics(self) -> Response:
        """Return the metrics as Prometheus text."""
        return Response(self._context.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def _generated(self) -> Health:
        readiness = self._readiness()
        stats = self._context.engine.status().stats
        interval_ms = 0 if stats is None else stats.plan_interval_ms
        limit_s = PROBE_LIMIT_S + PROBE_PLANS * interval_ms / 1000
        if readiness.state == "ready":
            try:
                await asyncio.wait_for(self._see_token(), limit_s)
            except TimeoutError:
                readiness = Health(state="stuck", reason=f"no token arrived within {limit_s:g} s")
            except OverloadedError as error:
                readiness = Health(state="overloaded", reason=str(error))
            except PenstockError as error:
                readiness = Health(state="not_ready", stage=error.stage, reason=str(error))
        self._probe_ended_at = self._context.clock()
        return readiness

    async def _see_token(self) -> None:
        """Wait for a token of any request; ask a busy engine for one only if it seems to yield none [G6]."""
        stats = self._context.engine.status().stats
        num_tokens = 0 if stats is None else stats.scheduler.generated_tokens
        for _ in range(NUM_LOOKS):
            if stats is None or not stats.scheduler.num_running:
                break
            await asyncio.sleep(LOOK_S)
            stats = self._context.engine.status().stats
            if stats is not None and stats.scheduler.generated_tokens > num_tokens:
                return
        await self._generate_token()

    async def _generate_token(self) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        stream = self._context.engine.add(f"health-{secrets.token_hex(8)}", PROBE_PROMPT, sampling)
        try:
            while (await stream.next()).finish_reason is None:
                pass
        finally:
            stream.cancel()

    def _readiness(self) -> Health:
        lifecycle = self._context.lifecycle
        if lifecycle.is_draining:
            reason = f"shutting down, {lifecycle.num_running} requests to finish"
            return Health(state="draining", reason=reason, since=lifecycle.draining_since)
        status = self._context.engine.status()
        if not status.ready:
            loss = None if status.stats is None else status.stats.loss
            return Health(
                state="not_ready",
                stage=status.stage,
                reason=status.reason or "starting",
                code=msgspec.UNSET if loss is None or loss.code is None else loss.code,
                since=status.since,
            )
        if status.stats is not None and status.stats.scheduler.paused:
            return Health(state="paused", reason="an administrator has paused the engine")
        if status.is_full:
            return Health(state="overloaded", reason="the queue is full")
        if shortage := self._context.memory.shortage:
            return Health(state="overloaded", reason=shortage)
        if reason := self._held_back():
            return Health(state="overloaded", reason=reason, code="low_memory")
        return Health(state="ready", reason=status.reason, since=status.since)

    def _held_back(self) -> str:
        """Return why waiting requests start in no replica that is ready; empty if they start in one."""
        statuses = self._context.engine.statuses()
        reasons = [each.stats.scheduler.held_back for each in statuses if each.ready and each.stats]
        return reasons[0] if reasons and all(reasons) else ""


def _respond(health: Health) -> Response:
    body = msgspec.json.encode(health)
    if health.state == "ready":
        return json_response(body)
    return json_response(body, status=503, headers={"retry-after": str(RETRY_AFTER_S)})
