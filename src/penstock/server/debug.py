"""`/debug/trace`: what the stages did in the last seconds, as Chrome trace JSON with a report of bubbles."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from penstock.server.engine_port import EngineLike
from penstock.server.errors import json_response
from penstock.trace.chrome import bubble_report, chrome_trace


class DebugRoute:
    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    async def trace(self) -> Response:
        """A trace that Perfetto opens; what is not events is under `otherData`."""
        reports = await self._engine.trace()
        trace = chrome_trace(reports) | {"otherData": {"bubbles": bubble_report(reports)}}
        return json_response(msgspec.json.encode(trace))
