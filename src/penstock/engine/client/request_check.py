"""Checks what a request must satisfy before it is sent to the core.

Called by `engine.client.async_engine` and `llm.llm`.
"""

from __future__ import annotations

import msgspec

from penstock.errors import InvalidRequestError
from penstock.request import PoolingParams, SamplingParams, VectorShape


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds that the served model sets for requests.

    Attributes:
        max_model_len: the most tokens of prompt and output together.
        vocab_size: token ids are below this.
        vector: lengths of the vectors that the model gives.
    """

    max_model_len: int
    vocab_size: int
    vector: VectorShape = VectorShape(size=0)

    def check(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Raise `InvalidRequestError`, with field and bound, if prompt or parameters are out of bounds."""
        sampling.validate(self.vocab_size)
        self._check_ids(prompt_token_ids)
        self._check_prompt_length(len(prompt_token_ids), room=0 if sampling.max_tokens == 0 else 1)

    def check_pooled(self, prompt_token_ids: list[int], params: PoolingParams) -> None:
        """Raise `InvalidRequestError` if the prompt, or the requested length of the vector, is out of bounds.

        Other than with a generation, the prompt may fill the model's context, since no token follows it.
        """
        self.vector.check(params.dimensions)
        self._check_ids(prompt_token_ids)
        self._check_prompt_length(len(prompt_token_ids), room=0)

    def check_length(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Raise `InvalidRequestError` if the model's context has no room for prompt and `max_tokens`.

        Without `max_tokens` there must be room for `min_tokens`.
        """
        name, wanted = "max_tokens", sampling.max_tokens
        if wanted is None:
            name, wanted = "min_tokens", sampling.min_tokens
        if len(prompt_token_ids) + wanted <= self.max_model_len:
            return
        raise InvalidRequestError(
            f"the prompt has {len(prompt_token_ids)} tokens and {name} is {wanted}, "
            f"{len(prompt_token_ids) + wanted} together; the limit is {self.max_model_len}.",
            remedy=f"Ask for at most {self.max_model_len - len(prompt_token_ids)} tokens.",
            param=name,
            code="context_length_exceeded",
        )

    def shortened(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Return `sampling` with `max_tokens` lowered to what fits behind the prompt, but not below 1."""
        room = self.max_model_len - num_prompt_tokens
        if sampling.max_tokens is None or sampling.max_tokens <= room:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=max(1, room))

    def _check_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty.", param="prompt", code="empty_prompt")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequestError(
                f"prompt token ids must be between 0 and {self.vocab_size - 1}, "
                f"got {low if low < 0 else high}.",
                param="prompt",
                code="out_of_range",
            )

    def _check_prompt_length(self, num_tokens: int, *, room: int) -> None:
        """Refuse a prompt that leaves less than `room` tokens behind it."""
        if num_tokens + room > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens; the limit for prompt and output together is "
                f"{self.max_model_len}.",
                remedy="Shorten the prompt, or raise --max-model-len if the model allows it.",
                param="prompt",
                code="context_length_exceeded",
            )
