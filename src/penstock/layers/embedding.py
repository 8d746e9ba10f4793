"""The two ends of the vocabulary: token ids to vectors, vectors to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layers.linear import empty_parameter


class VocabEmbedding(nn.Module):
    """Rows `[first_id, first_id + num_ids)` of the token embedding.

    Ids of other shards give zeros (row S4), so that shards can be summed. The same weight serves as the
    output head of a tied model.
    """

    def __init__(
        self, num_ids: int, hidden_size: int, *, first_id: int = 0, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(num_ids, hidden_size, dtype=dtype, device=device)
        self.first_id = first_id

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden]."""
        local = input_ids - self.first_id
        outside = (local < 0) | (local >= len(self.weight))
        vectors = F.embedding(local.masked_fill(outside, 0), self.weight)
        return vectors.masked_fill_(outside[:, None], 0)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, num_ids]: the tied head."""
        return F.linear(hidden_states, self.weight)


class OutputHead(nn.Module):
    """An output head with a weight of its own."""

    def __init__(self, num_ids: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(num_ids, hidden_size, dtype=dtype, device=device)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, num_ids]."""
        return F.linear(hidden_states, self.weight)
