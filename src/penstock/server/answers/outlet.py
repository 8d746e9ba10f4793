"""The destination of a streamed answer's bytes: its connection, or a stream that a client can resume."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Receive, Scope, Send

Respond = Callable[[Scope, Receive, Send], Awaitable[None]]


class Outlet(Protocol):
    """The way of a streamed answer's bytes to its connection."""

    async def carry(self, respond: Respond, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a response to its end, and bring what it sends to the connection of `receive` and `send`."""


class _Direct:
    """Lets the answer write to its connection, and end with it."""

    async def carry(self, respond: Respond, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope, receive, send)


DIRECT: Outlet = _Direct()
