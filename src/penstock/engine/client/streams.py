"""What comes of one request in the core: a stream of text, or one vector, for one reader.

What came between two reads is merged, so a stream never holds more than the output of its own request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.engine.client.outputs import Assembler, TextDelta, merge_deltas
from penstock.errors import AbortedError, PenstockError, error_from_info
from penstock.request import RequestUpdate


class RequestStream:
    """One sequence, or one vector, in the engine. Made by `AsyncEngine.add_all` or `embed`; one reader at a
    time.

    Attributes:
        prompt_tokens: of its prompt; 0 where the prompt is that of a sequence before, and is counted there.
        cached_tokens: of these, that were found in a cache.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, assembler: Assembler, abort: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self._assembler = assembler
        self._abort = abort
        self._deltas: list[TextDelta] = []
        self._error: PenstockError | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, up to the stop."""
        return self._assembler.num_tokens

    async def next(self) -> TextDelta:
        """Wait for news: everything that came since the last call, as one delta.

        Raises:
            PenstockError: the request failed, or was cancelled. Deltas that came before are given first.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise AbortedError(f"request {self.request_id} has ended.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    def cancel(self) -> None:
        """Abort in the core at once. Harmless after the end and when called twice."""
        if not self._closed:
            self._closed = True
            self._abort(self.request_id)
            self._wake()

    def receive(self, update: RequestUpdate) -> bool:
        """Take an update from the core; whether the request has ended. For `AsyncEngine`."""
        if update.error is not None:
            self.fail(error_from_info(update.error))
            return True
        if update.queue_seconds is not None:
            self.queue_seconds = update.queue_seconds
            self.cached_tokens = min(update.num_cached_tokens, self.prompt_tokens)
        delta = self._assembler.append(update)
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._closed = True
            if update.finish_reason is None:  # a stop string: the core does not know
                self._abort(self.request_id)
        self._wake()
        return self._closed

    def fail(self, error: PenstockError) -> None:
        """End the stream with this error. For `AsyncEngine`."""
        self._error = error
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
