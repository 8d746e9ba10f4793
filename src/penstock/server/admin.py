"""`/pause`, `/resume`, `/is_paused`, `/flush_cache`: for administrators, there where an admin key is set.

An operation is answered when every rank of every replica has it behind it; see `penstock.operations`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Query
from starlette.responses import Response

from penstock.operations import FlushCache, OperationDone, Pause, PauseMode, Resume
from penstock.server.engine_port import EngineLike
from penstock.server.errors import json_response

Timeout = Annotated[float, Query(gt=0, le=3600, description="Seconds to wait until it is complete.")]
Store = Annotated[bool, Query(description="Delete the store's records of this model too.")]
DEFAULT_TIMEOUT_S = 60.0


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of an operation in each replica."""

    is_paused: bool
    replicas: list[OperationDone]


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a flush in each replica."""

    replicas: list[OperationDone]


class PauseState(msgspec.Struct, frozen=True, kw_only=True):
    is_paused: bool


class AdminRoute:
    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    async def pause(self, mode: PauseMode = "keep", timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Compute for nobody until resumed. Who has started is kept, or may end, or is aborted with all."""
        return await self._pause(Pause(mode), timeout_s)

    async def resume(self, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Go on after a pause. Harmless where there is none."""
        return await self._pause(Resume(), timeout_s)

    async def is_paused(self) -> Response:
        """Whether any replica is paused, as of its last message, which is at most a second old."""
        stats = self._engine.status().stats
        return json_response(msgspec.json.encode(PauseState(is_paused=stats is not None and stats.paused)))

    async def flush_cache(self, store: Store = False, timeout_s: Timeout = DEFAULT_TIMEOUT_S) -> Response:
        """Let nobody who starts from now on find what was computed before. Who runs goes on undisturbed."""
        done = await self._engine.operate(FlushCache(store), timeout_s)
        return json_response(msgspec.json.encode(Flushed(replicas=done)))

    async def _pause(self, operation: Pause | Resume, timeout_s: float) -> Response:
        done = await self._engine.operate(operation, timeout_s)
        return json_response(
            msgspec.json.encode(Applied(is_paused=isinstance(operation, Pause), replicas=done))
        )
