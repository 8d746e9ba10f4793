"""The destination of a streamed answer's bytes: its connection, or the readers of `resumable`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Receive, Scope, Send

Respond = Callable[[Scope, Receive, Send], Awaitable[None]]


class Outlet(Protocol):
    """The outlet between a streamed answer and its connection."""

    async def carry(self, respond: Respond, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a response to its end."""


class _Direct:
    """The answer writes to its connection, and ends with it."""

    async def carry(self, respond: Respond, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(scope, receive, send)


DIRECT: Outlet = _Direct()
