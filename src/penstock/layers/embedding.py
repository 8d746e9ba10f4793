"""The two ends of the vocabulary: token ids to vectors, vectors to logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.candidates import HeadOutput, HeadRequest, head_output_of
from penstock.layers.compute import Compute
from penstock.layers.matrix import Matrix


class Vocabulary(nn.Module):
    """A weight [num_ids, hidden] that turns hidden states into logits."""

    weight: nn.Parameter | Matrix

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, num_ids]."""
        if isinstance(self.weight, Matrix):
            return self.weight.multiply(hidden_states, None)
        return F.linear(hidden_states, self.weight)

    def candidates(self, hidden_states: Tensor, request: HeadRequest) -> HeadOutput:
        """What `request` asks of the logits of [num_rows, hidden]."""
        if isinstance(self.weight, Matrix):
            return self.weight.head(hidden_states, request)
        return head_output_of(self.logits(hidden_states).float(), request)


class VocabEmbedding(Vocabulary):
    """Rows `[first_id, first_id + num_ids)` of the token embedding.

    The same weight serves as the output head of a tied model.

    Args:
        is_head: it is used as the head too.
        is_shard: ids may be those of other shards; they give zeros (row S4), so that shards can be summed.
    """

    def __init__(
        self,
        num_ids: int,
        hidden_size: int,
        *,
        first_id: int = 0,
        compute: Compute,
        parts: Mapping[str, int] | None = None,
        is_head: bool = False,
        is_shard: bool = False,
    ) -> None:
        super().__init__()
        self.weight = compute.table(parts or {}, num_ids, hidden_size, multiplied=is_head)
        self.first_id, self.num_ids, self.is_shard = first_id, num_ids, is_shard

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden]."""
        if not self.is_shard:
            return self._look_up(input_ids)
        local = input_ids - self.first_id
        outside = (local < 0) | (local >= self.num_ids)
        vectors = self._look_up(local.masked_fill(outside, 0))
        return vectors.masked_fill_(outside[:, None], 0)

    def _look_up(self, ids: Tensor) -> Tensor:
        if isinstance(self.weight, Matrix):
            return self.weight.gather(ids)
        return F.embedding(ids, self.weight)


class OutputHead(Vocabulary):
    """An output head with a weight of its own."""

    def __init__(
        self, num_ids: int, hidden_size: int, *, compute: Compute, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.weight = compute.weight(parts or {}, num_ids, hidden_size)
