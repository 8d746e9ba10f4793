"""Many requests through one `llm.engine_client`, from the first to the last: what `llm` waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.client.outputs import (
    Assembler,
    RequestOutput,
    TextDelta,
    merge_deltas,
    request_output,
)
from penstock.errors import error_from_info
from penstock.llm.engine_client import EngineClient
from penstock.llm.progress import ProgressDisplay
from penstock.llm.prompt_preparer import PreparedPrompt
from penstock.request import GenerationRequest, RequestUpdate
from penstock.tokenizer.tokenizer import Tokenizer

POLL_S = 1.0


class Pending:
    """One request on its way, and what has come of its sequences.

    Args:
        prompt: of the request.
        make: the assembler of the text or the vector of one sequence.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt: PreparedPrompt,
        make: Callable[[GenerationRequest], Assembler],
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.num_cached_tokens = 0
        self._assemblers = {one.request_id: make(one) for one in request.alone()}
        self._deltas: dict[str, list[TextDelta]] = {name: [] for name in self._assemblers}
        self._num_open = len(self._assemblers)

    @property
    def names(self) -> list[str]:
        """Of its sequences, as the core has them."""
        return list(self._assemblers)

    @property
    def has_ended(self) -> bool:
        """Whether all its sequences have."""
        return not self._num_open

    def take(self, update: RequestUpdate) -> bool:
        """Whether the sequence has ended. Raises its error."""
        if update.error is not None:
            raise error_from_info(update.error)
        if update.request_id == self.request.request_id:  # the others find what this one has computed
            self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        delta = self._assemblers[update.request_id].append(update)
        self._deltas[update.request_id].append(delta)
        self._num_open -= delta.finish_reason is not None
        return delta.finish_reason is not None

    def whole(self) -> TextDelta:
        """All that has come of its only sequence."""
        (deltas,) = self._deltas.values()
        return merge_deltas(deltas)

    def output(self, tokenizer: Tokenizer) -> RequestOutput:
        """Of a request for text."""
        return request_output(
            self.request.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            [merge_deltas(deltas) for deltas in self._deltas.values()],
            tokenizer,
            scored=self.request.sampling.prompt_logprobs is not None,
            num_cached_tokens=self.num_cached_tokens,
        )


def run_all(client: EngineClient, requests: Sequence[Pending], progress: ProgressDisplay) -> None:
    """Send all requests and wait until all have ended.

    Raises the first error of one of them, or of the engine; the others are aborted then, as they are at an
    interrupt.
    """
    pending = {name: entry for entry in requests for name in entry.names}
    try:
        for entry in requests:
            client.add(entry.request)
        with progress:
            while pending:
                for update in client.poll(POLL_S):
                    _take(client, pending, update, progress)
    finally:
        if pending:  # an error or an interrupt: let nothing run on
            client.abort(list(pending))


def _take(
    client: EngineClient, pending: dict[str, Pending], update: RequestUpdate, progress: ProgressDisplay
) -> None:
    entry = pending.get(update.request_id)
    if entry is None or not entry.take(update):
        return
    del pending[update.request_id]
    if update.finish_reason is None:  # ended by a stop string, which the core does not know
        client.abort([update.request_id])
    if entry.has_ended:
        progress.advance()
