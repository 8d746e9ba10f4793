"""The route `/v1/streams/{request_id}`: the events of a streamed answer, for a client that comes back.

`GET` returns the events after the last one that the client has, until the end of the answer. The header
`Last-Event-ID` has that event's number; without it, all events are returned. `DELETE` ends an answer that is
no longer wanted. Both need the key of the request (`answers.resumable`).
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import InvalidRequestError
from penstock.server.answers.resumable import KeptStream, ResumableStreams, ResumedResponse
from penstock.server.http.errors import json_response

MAX_DIGITS = 9


class StreamStopped(msgspec.Struct, frozen=True, kw_only=True):
    """`was_running`: whether the answer was still incomplete."""

    id: str
    was_running: bool


class StreamsRoute:
    """The route that resumes and stops streams."""

    def __init__(self, streams: ResumableStreams) -> None:
        self._streams = streams

    async def resume(self, request: Request) -> Response:
        """Return the events of an answer after the last one that the client has."""
        last = _last_event(request.headers.get("last-event-id", "0"))
        stream = self._find(request)
        stream.require(last)
        return ResumedResponse(stream, last)

    async def stop(self, request: Request) -> Response:
        """End an answer whose client does not want the rest."""
        stream = self._find(request)
        stopped = StreamStopped(id=request.path_params["request_id"], was_running=stream.ended_at is None)
        stream.stop()
        return json_response(msgspec.json.encode(stopped))

    def _find(self, request: Request) -> KeptStream:
        return self._streams.find(self._streams.name_of(request, request.path_params["request_id"]))


def _last_event(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise InvalidRequestError(
            "Last-Event-ID is not the number of an event.", param="Last-Event-ID", code="invalid_value"
        )
    return int(text)
