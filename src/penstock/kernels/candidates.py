"""The best candidates of each row's logits: what sampling needs of a vocabulary, for most requests.

A model's head answers a `HeadRequest` with a `HeadOutput`: `cpu.head` in the pass that computes the logits,
or `head_output_of` from logits that are there already (other devices, no compiler, tests). Both give the same
candidates for the same logits. Candidates lie in host memory, logits on the model's device. Does not sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_ID = -1  # of a candidate that is missing
WORD_BITS = 32  # ids in a word of a mask (`HeadRequest.allowed`)

# [256, 8] for each value of eight bits of a mask, what is added to the logits of their ids; this is faster
# than a test of each bit
_OF_OCTET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_OF_OCTET = np.where(_OF_OCTET, np.float32(0), np.float32(-np.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitCurve:
    """The curve from products of hidden states and vocabulary to logits: cap * tanh(multiplier * x / cap).

    Attributes:
        multiplier: factor of the products.
        soft_cap: the cap; 0: there is none.
    """

    multiplier: float = 1.0
    soft_cap: float = 0.0

    def of(self, products: Tensor) -> Tensor:
        """Return logits, float32; where a product is not finite, its logit is not finite either.

        Args:
            products: of any shape, which the logits have too.
        """
        logits = products.float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.soft_cap:
            logits = (logits / self.soft_cap).tanh_().mul_(self.soft_cap).add_(logits * 0)
        return logits


STRAIGHT = LogitCurve()


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBias:
    """The changes of single logits, row by row, before candidates are chosen.

    A logit above zero is divided by its scale, any other logit is multiplied by it. The result is rounded,
    and then the value is added. All implementations give the same bits.
    """

    starts: NDArray[np.int64]  # [num_rows + 1] row r owns entries [starts[r], starts[r + 1])
    ids: NDArray[np.int64]  # [num_entries] rising within a row; without scales, entries of the same id add up
    values: NDArray[np.float32]  # [num_entries] minus infinity forbids the id
    scales: NDArray[np.float32] | None = None  # [num_entries] above 0; a row then has an id once; None: all 1

    @classmethod
    def none(cls, num_rows: int) -> SparseBias:
        """Return a bias that adds nothing."""
        starts, ids = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return cls(starts=starts, ids=ids, values=np.zeros(0, dtype=np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """The request about each row's logits. Bias and mask change only candidates, never whole logits."""

    num_candidates: NDArray[np.int64]  # [num_rows] 0 = none
    wants_logits: NDArray[np.bool_]  # [num_rows] the row's whole logits too
    bias: SparseBias
    # [num_rows, ceil(vocab / 32)] bit i of word w allows id 32 w + i, as llguidance has it; None: all allowed
    allowed: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The likeliest ids of each row, the likeliest first; of ids with equal logits the lower comes first.

    A row has as many candidates as it asked for, or fewer if fewer logits are above minus infinity, and none
    if a logit is not finite. `width` is the most that any row asked for, and at least 1. The places of a row
    that no candidate takes have minus infinity and `NO_ID`.
    """

    values: NDArray[np.float32]  # [num_rows, width]
    ids: NDArray[np.int64]  # [num_rows, width]
    is_finite: NDArray[np.bool_]  # [num_rows] whether all logits of the row are finite, before bias and mask


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """The answer to a `HeadRequest`."""

    candidates: Candidates
    logits: Tensor  # float32 [num_wanting, vocab] of the rows that wanted them, without bias and mask
    logits_rows: NDArray[np.int64]  # [num_wanting] the row of the request for each row of `logits`, rising


def head_output_of(logits: Tensor, request: HeadRequest) -> HeadOutput:
    """Return the answer from whole logits, float32 [num_rows, vocab], which may themselves be part of it."""
    rows = np.flatnonzero(request.wants_logits)
    candidates = candidates_of(logits, request)
    return HeadOutput(candidates=candidates, logits=rows_of(logits, rows), logits_rows=rows)


def candidates_of(logits: Tensor, request: HeadRequest) -> Candidates:
    """Return the best candidates of whole logits.

    Args:
        logits: float32 [num_rows, vocab]; not changed.
    """
    # The sum reads each logit once. It is finite if and only if all are: they are far from float32's limit.
    is_finite = logits.sum(dim=-1).isfinite().cpu().numpy()
    width = int(request.num_candidates.max(initial=1))
    values = np.full((len(logits), width), -np.inf, dtype=np.float32)
    ids = np.full((len(logits), width), NO_ID, dtype=np.int64)
    rows = np.flatnonzero(is_finite & (request.num_candidates > 0))
    if len(rows):
        own = constrained(rows_of(logits, rows), request, rows)
        values[rows], ids[rows] = _best(own, request.num_candidates[rows], width)
    return Candidates(values=values, ids=ids, is_finite=is_finite)


def rows_of(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return some rows, given in rising order; `logits` itself if those are all.

    Args:
        logits: [num_rows, vocab].
        rows: [num_selected].

    Returns:
        [num_selected, vocab].
    """
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]


def constrained(logits: Tensor, request: HeadRequest, rows: NDArray[np.int64]) -> Tensor:
    """Return the logits changed by their bias, with forbidden ids at minus infinity.

    Args:
        logits: float32 [len(rows), vocab]; not changed.
        rows: the row of the request for each row of `logits`.

    Returns:
        float32 [len(rows), vocab]; `logits` itself where nothing is to be done.
    """
    bias = request.bias
    counts = (bias.starts[1:] - bias.starts[:-1])[rows]
    if counts.any():
        row_indices = np.repeat(np.arange(len(rows)), counts)
        entries = np.concatenate([np.arange(bias.starts[row], bias.starts[row + 1]) for row in rows])
        index = tuple(torch.from_numpy(part).to(logits.device) for part in (row_indices, bias.ids[entries]))
        added = torch.from_numpy(bias.values[entries]).to(logits.device)
        if bias.scales is None:
            logits = logits.index_put(index, added, accumulate=True)
        else:
            scales = torch.from_numpy(bias.scales[entries]).to(logits.device)
            old = logits[index]
            logits = logits.index_put(index, torch.where(old > 0, old / scales, old * scales) + added)
    if request.allowed is not None:
        octets = np.ascontiguousarray(request.allowed[rows], dtype="<i4").view(np.uint8)
        masked = np.take(_OF_OCTET, octets, axis=0).reshape(len(rows), -1)[:, : logits.shape[1]]
        logits = torch.from_numpy(masked).to(logits.device).add_(logits)
    return logits


def _best(
    logits: Tensor, num_candidates: NDArray[np.int64], width: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the best `num_candidates` of each row as values and ids, filled up to [num_rows, width]."""
    if width == 1:
        first = logits.argmax(dim=-1, keepdim=True)
        best = logits.gather(1, first).cpu().numpy()
        return best, np.where(best > -np.inf, first.cpu().numpy(), NO_ID)
    vocab_size = logits.shape[1]
    last = torch.from_numpy(np.minimum(num_candidates, vocab_size) - 1).to(logits.device)[:, None]
    lowest = logits.topk(min(width, vocab_size), dim=-1).values.gather(1, last)
    # topk leaves open which of equal values it takes: all that reach its lowest value are put in order here.
    reaching = ((logits >= lowest) & (logits > -torch.inf)).nonzero(as_tuple=True)
    rows, ids = (part.cpu().numpy() for part in reaching)
    values = logits[reaching].cpu().numpy()
    order = np.lexsort((ids, -values, rows))
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    taken = rank < num_candidates[rows]
    order, target = order[taken], (rows[taken], rank[taken])
    best_values = np.full((len(logits), width), -np.inf, dtype=np.float32)
    best_ids = np.full((len(logits), width), NO_ID, dtype=np.int64)
    best_values[target], best_ids[target] = values[order], ids[order]
    return best_values, best_ids
