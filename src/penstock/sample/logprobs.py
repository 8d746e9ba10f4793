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
        places = [place for place, index in enumerate(self._asking) if token_ids[index] >= 0]
        if places:
            rows = [self._asking[place] for place in places]
            found = self._look_up(
                places, [token_ids[row] for row in rows], [self._num_logprobs[r] for r in rows]
            )
            for row, entry in zip(rows, found, strict=True):
                entries[row] = entry
        return entries

    def _look_up(self, places: list[int], chosen_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
        """All rows at once: one look for the chosen tokens, one for the likeliest."""
        values = self._values[places]
        chosen = values.gather(1, torch.tensor(chosen_ids, device=values.device)[:, None])
        ranks = (values > chosen).sum(1) + 1
        top = values.topk(max(num_top), dim=1)
        columns = (chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), num_top)
        return [
            TokenLogprobs(logprob, rank, ids[:count], logprobs[:count])
            for logprob, rank, ids, logprobs, count in zip(*columns, strict=True)
        ]
