"""Turns the prompts that `LLM` is given into requests: checks values, and gives each request an id."""

from __future__ import annotations

import itertools

from penstock.engine.client.outputs import output_assembler
from penstock.engine.client.request_check import RequestLimits
from penstock.engine.client.siblings import with_siblings
from penstock.engine.client.vectors import VectorAssembler
from penstock.llm.engine_client import OfflineRequest
from penstock.llm.prompt_preparer import PreparedPrompt, PromptPreparer
from penstock.request import GenerationRequest, PoolingParams, SamplingParams


class OfflineRequests:
    """Makes the requests of one `LLM`, with the ids "0", "1" and so on.

    Args:
        text: knows the model's tokenizer and defaults.
        limits: the bounds of requests in the engine that runs.
    """

    def __init__(self, text: PromptPreparer, limits: RequestLimits) -> None:
        self._text, self._limits = text, limits
        self._numbers = itertools.count()

    def for_text(self, prompt: PreparedPrompt, given: SamplingParams | None) -> OfflineRequest:
        """Return the request for `n` texts; without sampling parameters the model's defaults hold.

        Raises:
            InvalidRequestError: a value is out of bounds, or prompt and output together are too long.
        """
        sampling = self._text.sampling_for(given, self._limits, len(prompt.token_ids))
        self._limits.check(prompt.token_ids, sampling)
        self._limits.check_length(prompt.token_ids, sampling)
        request = with_siblings(str(next(self._numbers)), prompt.token_ids, sampling)
        tokenizer = self._text.tokenizer
        return OfflineRequest(
            request, lambda sequence: output_assembler(tokenizer, prompt.token_ids, sequence.sampling)
        )

    def for_vector(self, prompt: PreparedPrompt, params: PoolingParams) -> OfflineRequest:
        """Return the request for one vector. Raises `InvalidRequestError` for a value out of bounds."""
        self._limits.check_pooled(prompt.token_ids, params)
        request = GenerationRequest(
            request_id=str(next(self._numbers)),
            prompt_token_ids=prompt.token_ids,
            pooling=params.pooling or self._text.pooling,
        )
        return OfflineRequest(request, lambda _: VectorAssembler(params))
