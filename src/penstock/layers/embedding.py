"""The two ends of the vocabulary: token ids to vectors, vectors to logits.

A rank may have a share of the ids [B6] [B7]. Its embedding then gives zeros for all other ids, and the sum
over the ranks is the whole. Its head computes the candidates among its own ids, and those of all ranks are
merged. So no rank ever holds the logits of the whole vocabulary, unless a request needs them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.distributed.group import TensorGroup
from penstock.distributed.share import Share
from penstock.kernels.candidate_shares import gathered_logits, merged, request_of_share
from penstock.kernels.candidates import STRAIGHT, HeadOutput, HeadRequest, LogitCurve, head_output_of
from penstock.layers.compute import Compute
from penstock.layers.matrix import Matrix
from penstock.layers.scale import scale_by


class Vocabulary(nn.Module):
    """A weight [num_ids, hidden] that turns hidden states into logits, or this rank's rows of it.

    Args:
        ids: the ids whose rows this rank has.
        group: the ranks that have the other rows.
        curve: what is done to logits after the product.
    """

    weight: nn.Parameter | Matrix

    def __init__(self, ids: Share, group: TensorGroup, curve: LogitCurve) -> None:
        super().__init__()
        self._ids, self._group, self._curve = ids, group, curve

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Turn [num_rows, hidden] into logits, [num_rows, num_ids] float32, of all ranks' ids."""
        own = self._own_products(hidden_states)
        whole = own if self._ids.is_whole else gathered_logits(own, self._ids, self._group)
        return self._curve.of(whole)

    def candidates(self, hidden_states: Tensor, request: HeadRequest) -> HeadOutput:
        """Return what `request` asks of the logits of [num_rows, hidden]; the same on all ranks."""
        if self._ids.is_whole:
            return self._own_candidates(hidden_states, request)
        own = self._own_candidates(hidden_states, request_of_share(request, self._ids))
        return merged(own, request, self._ids, self._group)

    def shares(self, part: str, rows: int) -> tuple[Share, Share | None]:
        """Return which rows and columns of the checkpoint's tensor the weight is."""
        return self._ids, None

    def _own_products(self, hidden_states: Tensor) -> Tensor:
        if isinstance(self.weight, Matrix):
            return self.weight.multiply(hidden_states, None)
        return F.linear(hidden_states, self.weight)

    def _own_candidates(self, hidden_states: Tensor, request: HeadRequest) -> HeadOutput:
        if isinstance(self.weight, Matrix):
            return self.weight.head(hidden_states, request, self._curve)
        return head_output_of(self._curve.of(self._own_products(hidden_states)), request)


class VocabEmbedding(Vocabulary):
    """The token embedding, or this rank's rows of it.

    The same weight serves as the output head of a tied model.

    Args:
        ids: the ids whose rows this rank has. For other ids it gives zeros [S4], and the sum over the ranks
            is the embedding.
        is_head: it is used as the head too.
        multiplier: factor of the vectors that are looked up; the head does not use it.
        curve: curve of the head's logits.
    """

    def __init__(
        self,
        ids: Share,
        hidden_size: int,
        *,
        compute: Compute,
        parts: Mapping[str, int] | None = None,
        is_head: bool = False,
        multiplier: float = 1.0,
        curve: LogitCurve = STRAIGHT,
    ) -> None:
        super().__init__(ids, compute.group, curve)
        self._scale = scale_by(multiplier, compute)
        self.weight = compute.table(parts or {}, ids.size, hidden_size, multiplied=is_head)

    @property
    def can_be_recorded(self) -> bool:
        """Whether a look-up is only a kernel call."""
        return isinstance(self.weight, Matrix) and self._ids.is_whole

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up the vectors of ids: [num_tokens] int64 -> [num_tokens, hidden]."""
        if self._ids.is_whole:
            return self._scale(self._look_up(input_ids))
        local = input_ids - self._ids.start
        outside = (local < 0) | (local >= self._ids.size)
        vectors = self._look_up(local.masked_fill(outside, 0))
        return self._scale(self._group.all_reduce(vectors.masked_fill_(outside[:, None], 0)))

    def _look_up(self, ids: Tensor) -> Tensor:
        if isinstance(self.weight, Matrix):
            return self.weight.gather(ids)
        return F.embedding(ids, self.weight)


class OutputHead(Vocabulary):
    """An output head with a weight of its own, or this rank's rows of it."""

    def __init__(
        self,
        ids: Share,
        hidden_size: int,
        *,
        compute: Compute,
        parts: Mapping[str, int] | None = None,
        curve: LogitCurve = STRAIGHT,
    ) -> None:
        super().__init__(ids, compute.group, curve)
        self.weight = compute.weight(parts or {}, ids.size, hidden_size)
