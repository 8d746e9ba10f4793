"""The log-probabilities under the model's own distribution, before temperature and truncation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.request import TokenLogprobs


def raw_logprobs(
    logits: Tensor, chosen_ids: list[int], num_top: list[int], top_ids: NDArray[np.int64] | None = None
) -> list[TokenLogprobs]:
    """Return log-probability and rank of each row's chosen token, and the row's likeliest tokens.

    The rank of the likeliest token is 1.

    Args:
        logits: float32 [num_rows, vocab] as the model gave them; the result of a row that is not finite means
            nothing.
        chosen_ids: [num_rows].
        num_top: [num_rows] how many of the likeliest tokens to report.
        top_ids: [num_rows, width] ids of the likeliest tokens, if they are known already; entries behind a
            row's `num_top` may be below 0.
    """
    if not chosen_ids:
        return []
    values = torch.log_softmax(logits, dim=-1)
    # All rows at once: one call for the chosen tokens, and one for the likeliest.
    chosen = values.gather(1, torch.tensor(chosen_ids, device=values.device)[:, None])
    ranks = (values > chosen).sum(1) + 1
    if top_ids is None:
        top, indices = values.topk(max(num_top), dim=1)
    else:
        indices = torch.from_numpy(top_ids).to(values.device)
        top = values.gather(1, indices.clamp_min(0))
    columns = (chosen[:, 0].tolist(), ranks.tolist(), indices.tolist(), top.tolist(), num_top)
    return [
        TokenLogprobs(logprob, rank, ids[:count], logprobs[:count])
        for logprob, rank, ids, logprobs, count in zip(*columns, strict=True)
    ]
