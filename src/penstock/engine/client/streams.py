"""The output of one sequence, as its reader in the client gets it: a stream of text, or one vector.

Output that came between two reads is merged into one delta. If it is large, the reader gets it in several
parts, between which the event loop serves others. A stream never holds more than the output of its own
sequence. `OpenStreams` hands each update of the core to the stream of its sequence, for every kind of client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.engine.client.outputs import (
    NO_DRAFTS,
    Assembler,
    TextDelta,
    merge_deltas,
    num_at_once,
    small_deltas,
)
from penstock.engine.client.routing import DECODE_TOKENS
from penstock.errors import AbortedError, ErrorInfo, PenstockError, error_from_info
from penstock.request import GenerationRequest, RequestUpdate

MakeAssembler = Callable[[GenerationRequest], Assembler]


class RequestStream:
    """The output of one sequence, text or a vector, as it comes from the core. One reader at a time.

    Args:
        request_id: id of the sequence.
        prompt_tokens: number of tokens of the prompt; 0 if they are counted with an earlier sequence of it.
        assembler: makes the text or the vector.
        abort: called with the id of the sequence, to end the sequence in the core.

    Attributes:
        cached_tokens: how many of `prompt_tokens` were found in a cache.
        drafts: how many guessed tokens were accepted and rejected.
        queue_seconds: time that the sequence waited in the core; None until the core has reported it.
        error: the error with which the sequence has ended; None if it has not ended, or has not failed.
        has_ended: no update will come any more.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, assembler: Assembler, abort: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.drafts = NO_DRAFTS
        self.queue_seconds: float | None = None
        self.error: PenstockError | None = None
        self.has_ended = False
        self._assembler = assembler
        self._abort = abort
        self._deltas: list[TextDelta] = []
        self._is_behind = False  # the last read has left a part of what had come
        self._news: asyncio.Future[None] | None = None  # set while the reader waits for any update
        self._end: asyncio.Future[None] | None = None  # set while the reader waits for the last update

    @property
    def completion_tokens(self) -> int:
        """The number of tokens generated so far, up to a stop string."""
        return self._assembler.num_tokens

    async def next(self) -> TextDelta:
        """Wait until there is unread output, and return it as one delta, or the first part if it is large.

        Raises:
            PenstockError: the sequence has failed, was cancelled, or was read to its end. Output that came
                before is returned first.
        """
        if self._is_behind:
            await asyncio.sleep(0)  # let the event loop serve others: the part before has taken long enough
        while not self._deltas and not self.has_ended:
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        count = num_at_once(self._deltas)
        self._is_behind = count < len(self._deltas)
        return self._unread(count)

    async def whole(self) -> TextDelta:
        """Wait until the sequence has ended, and return all its unread output as one delta.

        Raises what `result` does. Unlike `next`, it is not woken at each update before the end.
        """
        if not self.has_ended:
            self._end = asyncio.get_running_loop().create_future()
            await self._end
        return self.result()

    def result(self) -> TextDelta:
        """Return all unread output of a sequence that has ended, as one delta.

        Raises:
            PenstockError: the sequence failed, or was cancelled.
        """
        if self.error is not None:
            raise self.error
        return self._unread(len(self._deltas))

    def cancel(self) -> None:
        """Abort the sequence in the core at once, and end this stream with an `AbortedError`.

        Does nothing if the sequence has ended.
        """
        if not self.has_ended:
            self._abort(self.request_id)
            self.fail(AbortedError(f"request {self.request_id} has ended."))

    def receive(self, update: RequestUpdate) -> bool:
        """Take an update of the core, wake the reader, and return whether the sequence has ended.

        If the text has come to a stop string, the sequence is aborted in the core. Called by `OpenStreams`.
        """
        if update.error is not None:
            self.fail(error_from_info(update.error))
            return True
        if update.queue_seconds is not None:
            self.queue_seconds = update.queue_seconds
            self.cached_tokens = min(update.num_cached_tokens, self.prompt_tokens)
        self.drafts = self.drafts.plus(update.num_accepted_drafts, update.num_rejected_drafts)
        delta = self._assembler.append(update)
        self._deltas += small_deltas(delta)
        if delta.finish_reason is not None:
            if update.finish_reason is None:  # a stop string, which the core does not know
                self._abort(self.request_id)
            self._finish()
        else:
            _wake(self._news)
        return self.has_ended

    def fail(self, error: PenstockError) -> None:
        """End the stream with this error, which its reader then gets. Called by `OpenStreams`."""
        self.error = error
        self._finish()

    def _finish(self) -> None:
        self.has_ended = True
        _wake(self._news)
        _wake(self._end)

    def _unread(self, count: int) -> TextDelta:
        """Return the next deltas as one."""
        if not self._deltas:
            raise self.error or AbortedError(f"request {self.request_id} has ended.")
        deltas, self._deltas = self._deltas[:count], self._deltas[count:]
        return merge_deltas(deltas)


class OpenStreams:
    """The streams of one client whose sequences have not ended, by the ids of the sequences.

    Args:
        abort: called with the id of a sequence to end it in the core.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort_in_core = abort
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def tokens_ahead(self) -> int:
        """An estimate of the tokens that the core computes for these streams before a new request's turn."""
        prompts = sum(
            stream.prompt_tokens for stream in self._streams.values() if not stream.completion_tokens
        )
        return prompts + DECODE_TOKENS * len(self._streams)

    def ids_in_use(self, request: GenerationRequest) -> set[str]:
        """Return the ids of the request's sequences that are already ids of open streams."""
        ids = {request.request_id, *(follower.request_id for follower in request.followers)}
        return ids & self._streams.keys()

    def open(self, request: GenerationRequest, make: MakeAssembler) -> list[RequestStream]:
        """Create and return a stream for each sequence of the request.

        Only the first stream counts the prompt's tokens.

        Args:
            make: returns the assembler that makes the text or the vector of one sequence.
        """
        streams = []
        for sequence in request.alone():
            num_counted = 0 if sequence.follows else len(sequence.prompt_token_ids)
            streams.append(RequestStream(sequence.request_id, num_counted, make(sequence), self._abort))
        self._streams |= {stream.request_id: stream for stream in streams}
        return streams

    def deliver(self, updates: Iterable[RequestUpdate]) -> list[RequestStream]:
        """Give each update to the stream of its sequence, and return the streams that have ended."""
        ended = []
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None and stream.receive(update):
                self._streams.pop(update.request_id, None)
                ended.append(stream)
        return ended

    def fail_all(self, error: ErrorInfo) -> None:
        """End all streams with this error, which their readers then get."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error_from_info(error))

    def cancel_all(self) -> None:
        """Abort all sequences in the core, and end their streams with an `AbortedError`."""
        for stream in list(self._streams.values()):
            stream.cancel()

    def _abort(self, request_id: str) -> None:
        del self._streams[request_id]
        self._abort_in_core(request_id)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
