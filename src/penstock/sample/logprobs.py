"""Log-probabilities under the model's own distribution, before temperature and truncation."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.request import TokenLogprobs


class RawLogprobs:
    """Log-probabilities of the rows that asked for them, taken before the sampler changes the logits.

    Args:
        logits: float32 [num_rows, vocab].
        num_logprobs: [num_rows] likeliest tokens to report beside the chosen one; -1 = none at all.
    """

    def __init__(self, logits: Tensor, num_logprobs: list[int]) -> None:
        self._num_logprobs = num_logprobs
        self._asking = [index for index, count in enumerate(num_logprobs) if count >= 0]
        self._values = torch.log_softmax(logits[self._asking], dim=-1) if self._asking else logits[:0]

    def of(self, token_ids: list[int]) -> list[TokenLogprobs | None]:
        """One entry per row, None for those that did not ask or have no token (-1)."""
        entries: list[TokenLogprobs | None] = [None] * len(token_ids)
        for place, index in enumerate(self._asking):
            if token_ids[index] >= 0:
                entries[index] = _entry(self._values[place], token_ids[index], self._num_logprobs[index])
        return entries


def _entry(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    chosen = logprobs[token_id]
    top = logprobs.topk(num_top)
    return TokenLogprobs(
        logprob=chosen.item(),
        rank=1 + int((logprobs > chosen).sum()),
        top_ids=top.indices.tolist(),
        top_logprobs=top.values.tolist(),
    )
