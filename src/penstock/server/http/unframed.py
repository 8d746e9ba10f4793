"""Answers to clients of HTTP/1.0, which cannot read chunks: the end of the connection ends the answer.

uvicorn writes every answer without a length in chunks, also to clients of HTTP/1.0, which RFC 9112 (section
6.1) forbids. Used by `http_protocol`. Relies on private parts of uvicorn, which
`tests/unit/server/test_uvicorn.py` watches.
"""

from __future__ import annotations

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.server.http.access import header_value


class UnframedSend:
    """The `send` of one answer, without chunks.

    Args:
        cycle: uvicorn's state of the request. Its `keep_alive` must be off, so that the connection ends after
            the answer.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_length = bool(header_value(message.get("headers", []), b"content-length"))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:  # uvicorn checks each piece against the length that it expects
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)  # type: ignore[arg-type]
