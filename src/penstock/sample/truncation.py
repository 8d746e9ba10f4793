"""The truncation by top-k, top-p and min-p: how many of a row's likeliest tokens may be drawn.

Called by `sample.sampler`. All three keep a prefix of the tokens in falling order of probability, so that one
number says how a row is truncated. With a small top-k, that number and the draw need the k candidates alone.
Without it, a wide vocabulary is still not sorted whole. For almost every row some of the likeliest tokens are
enough, and only the other rows are sorted again, with more tokens. Whether they are enough follows from the
row's own numbers, so that its tokens never depend on the other rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SORTED_WIDTHS = (128, 2048)  # numbers of the likeliest tokens that are sorted first, before all are


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The truncation of rows, in the order in which their probabilities are given."""

    top_k: NDArray[np.int64]  # [num_rows] 0 = all
    top_p: NDArray[np.float64]  # [num_rows]
    min_p: NDArray[np.float64]  # [num_rows]

    def of(self, rows: NDArray[np.int64]) -> Limits:
        """Return the limits of some of the rows, by their indices ([num_selected] int64)."""
        return Limits(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


def draw_candidates(
    logits: NDArray[np.float32],
    ids: NDArray[np.int64],
    temperature: NDArray[np.float64],
    limits: Limits,
    uniforms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Draw one id per row from its truncated candidates by inverting their cumulative sum.

    Args:
        logits: [num_rows, width] falling; each row has at least one and at most top_k above minus infinity.
        ids: [num_rows, width].
        uniforms: [num_rows] in [0, 1).

    Returns:
        [num_rows] ids.
    """
    scaled = (logits / temperature.astype(np.float32)[:, None]).astype(np.float64)
    # Only ratios matter for min-p, top-p and the draw: probabilities against the likeliest candidate will do.
    weights = np.exp(scaled - scaled[:, :1])
    weights *= weights >= limits.min_p[:, None]
    cumulative = weights.cumsum(axis=1)
    reached = limits.top_p * cumulative[:, -1]
    # As in `count_kept`. If top_p is 1, this leaves out only ids too unlikely to change the sum, which are
    # never drawn.
    num_kept = np.maximum((cumulative - weights < reached[:, None]).sum(axis=1), 1)
    return _invert(ids, cumulative, num_kept, uniforms)


def draw_truncated(probs: Tensor, limits: Limits, uniforms: NDArray[np.float64]) -> list[int]:
    """Draw one id per row from the truncated distribution by inverting its cumulative sum.

    Args:
        probs: float32 [num_rows, vocab], the whole distribution after temperature.
        uniforms: [num_rows] in [0, 1).
    """
    vocab_size = probs.shape[1]
    drawn = np.empty(len(probs), dtype=np.int64)
    rows = np.arange(len(probs))
    for width in (*(w for w in SORTED_WIDTHS if w < vocab_size), vocab_size):
        likeliest, ids = probs[rows.tolist()].topk(width, dim=-1)
        falling = likeliest.double().cpu().numpy()
        num_kept, is_enough = count_kept(falling, limits.of(rows), vocab_size)
        drawn[rows] = _invert(ids.cpu().numpy(), np.cumsum(falling, axis=1), num_kept, uniforms[rows])
        rows = rows[~is_enough]
        if not len(rows):
            break
    return drawn.tolist()


def count_kept(
    probs: NDArray[np.float64], limits: Limits, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return how many leading tokens each row keeps.

    In this order: min-p against the likeliest token, top-k, then top-p of what these two have left.

    Args:
        probs: [num_rows, num_sorted] in falling order, of the whole distribution.

    Returns:
        How many tokens each row keeps, and whether the sorted ones were enough to know that; [num_rows] each.
    """
    num_sorted = probs.shape[1]
    likely = (probs > 0.0) & (probs >= limits.min_p[:, None] * probs[:, :1])
    num_likely = likely.sum(axis=1)
    kept = np.where(limits.top_k == 0, vocab_size, limits.top_k)
    kept = np.where(num_likely < num_sorted, np.minimum(kept, num_likely), kept)
    cumulative = np.cumsum(probs, axis=1)
    last_kept = np.minimum(kept, num_sorted) - 1
    # The probability that min-p and top-k have left: the sum up to their cut; 1 if the cut is behind the
    # sorted tokens, or there is none.
    mass = np.where(kept <= num_sorted, cumulative[np.arange(len(probs)), last_kept], 1.0)
    # The smallest set that reaches top_p: a token belongs to it if those before it do not reach it.
    in_nucleus = (cumulative - probs < (limits.top_p * mass)[:, None]).sum(axis=1)
    nucleus = np.where(limits.top_p < 1.0, np.maximum(in_nucleus, 1), kept)
    whole = (kept == vocab_size) & (limits.min_p == 0.0)
    is_enough = (kept <= num_sorted) | (whole & (nucleus < num_sorted))
    return np.minimum(np.minimum(nucleus, kept), num_sorted), is_enough


def _invert(
    ids: NDArray[np.int64],
    cumulative: NDArray[np.float64],
    num_kept: NDArray[np.int64],
    uniforms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return the id of each row at which the cumulative sum passes a share of the sum of all kept ids.

    Args:
        cumulative: [num_rows, width] sums of probabilities in falling order.
        num_kept: [num_rows] leading ids that may be drawn.
        uniforms: [num_rows] the shares, in [0, 1).
    """
    rows = np.arange(len(ids))
    last = num_kept - 1
    targets = uniforms * cumulative[rows, last]
    columns = np.minimum((cumulative <= targets[:, None]).sum(axis=1), last)
    chosen: NDArray[np.int64] = ids[rows, columns]
    return chosen
