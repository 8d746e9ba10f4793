"""Requests of an `LLM` whose updates a benchmark sees when they come, which `LLM.generate` does not show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock import LLM
from penstock.engine.client.outputs import TextDelta
from penstock.llm.engine_client import OfflineRequest
from penstock.llm.progress import ProgressDisplay
from penstock.request import GenerationRequest, RequestUpdate


class ObservedSequence:
    """In place of the assembler of a sequence: shows each update as soon as it comes, and makes no text."""

    def __init__(self, observe: Callable[[RequestUpdate], None]) -> None:
        self.num_tokens = 0
        self._observe = observe

    def append(self, update: RequestUpdate) -> TextDelta:
        self.num_tokens += len(update.token_ids)
        self._observe(update)
        return TextDelta("", update.token_ids, finish_reason=update.finish_reason)


def run_observed(
    llm: LLM, requests: Sequence[GenerationRequest], observe: Callable[[RequestUpdate], None]
) -> None:
    """Return when all requests have ended.

    Args:
        observe: is called with each update that is no error, perhaps by another thread.
    """
    observed = [OfflineRequest(request, lambda _: ObservedSequence(observe)) for request in requests]
    llm._client.run(observed, ProgressDisplay())
