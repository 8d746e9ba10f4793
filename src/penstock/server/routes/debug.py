"""The route `/debug/trace`: the stages' last seconds, as Chrome trace JSON with a report of bubbles."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from penstock.batch import StageSpans
from penstock.server.engine_port import EngineLike
from penstock.server.http.errors import json_response
from penstock.trace.chrome import bubble_report, chrome_trace


class DebugRoute:
    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._one_at_a_time = asyncio.Lock()

    async def trace(self) -> Response:
        """Return a trace that Perfetto opens; `otherData` has all that is not events."""
        async with self._one_at_a_time:
            reports = await self._engine.trace()
            # On a thread: a second of a busy pipe's spans is a megabyte of JSON.
            return json_response(await asyncio.to_thread(_encoded, reports))


def _encoded(reports: Sequence[StageSpans]) -> bytes:
    trace = chrome_trace(reports) | {"otherData": {"bubbles": bubble_report(reports)}}
    return msgspec.json.encode(trace)
