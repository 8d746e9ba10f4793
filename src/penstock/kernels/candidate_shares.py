"""The likeliest tokens (candidates) of each row, where the ranks of a group divide the vocabulary.

Each rank answers for its own ids. The ranks exchange a few numbers for each row, and then every rank has the
answer for all ids. They exchange whole logits only for rows that want them. Called by `layers.embedding`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.distributed.group import TensorGroup
from penstock.distributed.share import IDS, Share, vocab_share
from penstock.kernels.candidates import NO_ID, Candidates, HeadOutput, HeadRequest, SparseBias


def request_of_share(request: HeadRequest, ids: Share) -> HeadRequest:
    """Return the request for the ids of a share, numbered from 0 on."""
    assert ids.start % IDS == 0, ids
    allowed = request.allowed
    if allowed is not None:
        allowed = np.ascontiguousarray(allowed[:, ids.start // IDS : -(-ids.end // IDS)])
    return HeadRequest(
        num_candidates=request.num_candidates,
        wants_logits=request.wants_logits,
        bias=_bias_of_share(request.bias, ids),
        allowed=allowed,
    )


def _bias_of_share(bias: SparseBias, ids: Share) -> SparseBias:
    if not len(bias.ids):
        return bias
    inside = (bias.ids >= ids.start) & (bias.ids < ids.end)
    before = np.concatenate([np.zeros(1, dtype=np.int64), inside.cumsum()])
    return SparseBias(
        starts=before[bias.starts],
        ids=bias.ids[inside] - ids.start,
        values=bias.values[inside],
        scales=None if bias.scales is None else bias.scales[inside],
    )


def merged(own: HeadOutput, request: HeadRequest, ids: Share, group: TensorGroup) -> HeadOutput:
    """Return the answer for all ids from this rank's answer for its own ids; all ranks get the same.

    Args:
        own: this rank's answer: candidates [num_rows, width], whose ids count from 0 on; logits
            [num_wanting, ids.size].
        ids: the ids of this rank.

    Returns:
        Candidates [num_rows, most candidates of a row] with ids of the whole vocabulary; logits
        [num_wanting, ids.whole].
    """
    own_candidates = own.candidates
    all_values, all_ids, all_finite = [], [], []
    for part in group.all_gather(_packed(own_candidates, ids)):
        values, part_ids, is_finite = _unpacked(part.numpy(), own_candidates.values.shape[1])
        all_values.append(values)
        all_ids.append(part_ids)
        all_finite.append(is_finite)
    candidates = _best(
        np.concatenate(all_values, axis=1),
        np.concatenate(all_ids, axis=1),
        np.logical_and.reduce(all_finite),
        request,
    )
    logits = torch.empty(0, ids.whole)
    if len(own.logits_rows):
        logits = gathered_logits(own.logits, ids, group)
    return HeadOutput(candidates=candidates, logits=logits, logits_rows=own.logits_rows)


def gathered_logits(own: Tensor, ids: Share, group: TensorGroup) -> Tensor:
    """Gather logits: [num_rows, ids of this rank] -> [num_rows, all ids]."""
    shares = [vocab_share(ids.whole, rank, group.size) for rank in range(group.size)]
    padded = own.new_zeros(len(own), max(share.size for share in shares))
    padded[:, : ids.size] = own
    parts = group.all_gather(padded)
    return torch.cat([part[:, : share.size] for part, share in zip(parts, shares, strict=True)], dim=1)


def _packed(candidates: Candidates, ids: Share) -> Tensor:
    """Return int64 [num_rows, 2 width + 1]: bits of values, ids in the whole vocabulary, whether finite."""
    values = candidates.values.view(np.int32).astype(np.int64)
    numbers = np.where(candidates.ids == NO_ID, NO_ID, candidates.ids + ids.start)
    packed = np.concatenate([values, numbers, candidates.is_finite[:, None].astype(np.int64)], axis=1)
    return torch.from_numpy(packed)


def _unpacked(
    packed: NDArray[np.int64], width: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    values = packed[:, :width].astype(np.int32).view(np.float32)
    return values, packed[:, width : 2 * width], packed[:, -1].astype(np.bool_)


def _best(
    values: NDArray[np.float32], ids: NDArray[np.int64], is_finite: NDArray[np.bool_], request: HeadRequest
) -> Candidates:
    """Return as many candidates as each row asked for, the best of those of all ranks, as `Candidates`."""
    width = int(request.num_candidates.max(initial=1))
    # A missing candidate has the id -1. Of equal values it must come last, not first.
    order = np.lexsort((np.where(ids == NO_ID, np.iinfo(np.int64).max, ids), -values), axis=1)[:, :width]
    is_left = is_finite[:, None] & (np.arange(width) < request.num_candidates[:, None])
    best_values = np.take_along_axis(values, order, axis=1)
    best_ids = np.take_along_axis(ids, order, axis=1)
    return Candidates(
        values=np.where(is_left, best_values, np.float32(-np.inf)),
        ids=np.where(is_left, best_ids, NO_ID),
        is_finite=is_finite,
    )
