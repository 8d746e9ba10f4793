"""The sampling parameters of each row, in arrays indexed by row, and what they ask of the output head.

A small state object of `runner.model_runner`: `add` when a request enters a row, `batch` once per step for
the rows that are sampled. Numbers were validated when the request was accepted.

The way in which a row is sampled follows from its own parameters alone, never from the other rows:

- the likeliest token, or a draw among at most `MAX_CANDIDATES`, needs candidates only
- any other draw needs whole logits
- log-probabilities need whole logits too, but do not change how the token is chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.batch import RowSampling
from penstock.kernels.candidates import HeadRequest, SparseBias
from penstock.sample.allowed_ids import AllowedIds
from penstock.sample.logit_changes import LogitChangesOfRows, TokenHistory

MAX_CANDIDATES = 128  # rows with a larger top_k draw from whole logits

# Below this the scaled logits could overflow, and the likeliest token is certain anyway.
_GREEDY_BELOW = 1e-5
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling of the rows of one step, in the order of their logits."""

    temperature: NDArray[np.float64]  # [num_rows] 0 = greedy
    top_k: NDArray[np.int64]  # [num_rows] 0 = all
    top_p: NDArray[np.float64]  # [num_rows]
    min_p: NDArray[np.float64]  # [num_rows]
    seed: NDArray[np.uint64]  # [num_rows]
    num_logprobs: NDArray[np.int64]  # [num_rows] -1 = none
    min_tokens: NDArray[np.int64]  # [num_rows] until then suppressed ids are forbidden, by `head`
    has_changes: bool  # any row has `LogitChanges`
    has_min_tokens: bool  # any row has `min_tokens` above 0
    has_draws: bool  # any row is not greedy
    head: HeadRequest  # what the rows need of their logits; rows without candidates draw from whole logits

    def __len__(self) -> int:
        return len(self.temperature)


class SamplingRows:
    """The sampling parameters of all rows of a rank.

    Args:
        history: tokens of the same rows.
        vocab_size: size of the model's vocabulary.
    """

    def __init__(self, history: TokenHistory, vocab_size: int) -> None:
        num_rows = len(history.prompt_len)
        self._temperature = np.zeros(num_rows)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows)
        self._min_p = np.zeros(num_rows)
        self._seed = np.zeros(num_rows, dtype=np.uint64)
        self._min_tokens = np.zeros(num_rows, dtype=np.int64)
        self._num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        self._num_candidates = np.ones(num_rows, dtype=np.int64)
        self._wants_logits = np.zeros(num_rows, dtype=np.bool_)
        self._has_changes = np.zeros(num_rows, dtype=np.bool_)
        self._changes = LogitChangesOfRows(num_rows, history)
        self._allowed = AllowedIds(vocab_size)
        self._num_prompt_logprobs = [-1] * num_rows
        self._kept: tuple[NDArray[np.int64], SamplingBatch] | None = None  # rows of the last call, and result

    def add(self, row: int, sampling: RowSampling) -> None:
        """Take the parameters of a request that enters `row`."""
        self._kept = None
        temperature = sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0.0
        top_k = max(sampling.top_k, 0)
        self._temperature[row] = temperature
        self._top_k[row] = top_k
        num_candidates = _num_candidates(temperature, top_k)
        self._num_candidates[row] = num_candidates
        self._wants_logits[row] = num_candidates == 0 or sampling.num_logprobs >= 0
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed & _SEED_MASK
        self._min_tokens[row] = sampling.min_tokens
        self._num_logprobs[row] = sampling.num_logprobs
        self._has_changes[row] = self._changes.add(row, sampling)
        self._allowed.add(row, sampling)
        self._num_prompt_logprobs[row] = sampling.num_prompt_logprobs

    def num_prompt_logprobs(self, row: int) -> int:
        """Return how many likeliest tokens are reported at each position of the row's prompt; -1: none."""
        return self._num_prompt_logprobs[row]

    def batch(self, rows: NDArray[np.int64], output_index: Sequence[int]) -> SamplingBatch:
        """Return the parameters of `rows`.

        Args:
            rows: the row of each sample; the array must never be changed, since it is kept.
            output_index: [num_rows] tokens that the request has generated before, drafts counted in.
        """
        batch = self._kept_or_gathered(rows)
        allowed = self._allowed.masks(rows)
        is_biased = batch.has_changes or batch.has_min_tokens
        if allowed is None and not is_biased:
            return batch
        index = np.array(output_index, dtype=np.int64)
        is_early = index < batch.min_tokens
        is_biased = batch.has_changes or bool(is_early.any())
        if allowed is None and not is_biased:
            return batch
        bias = self._changes.bias(rows, index, is_early) if is_biased else batch.head.bias
        return replace(batch, head=replace(batch.head, bias=bias, allowed=allowed))

    def bare(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """Return the parameters of `rows` without log-probabilities, penalties, bias and forbidden ids.

        Args:
            rows: [num_rows] int64.
        """
        batch = self._gather(rows)
        head = replace(batch.head, wants_logits=batch.head.num_candidates == 0)
        return replace(batch, head=head, num_logprobs=np.full(len(rows), -1, dtype=np.int64))

    def _kept_or_gathered(self, rows: NDArray[np.int64]) -> SamplingBatch:
        if self._kept is None or (self._kept[0] is not rows and not np.array_equal(self._kept[0], rows)):
            self._kept = (rows, self._gather(rows))
        return self._kept[1]

    def _gather(self, rows: NDArray[np.int64]) -> SamplingBatch:
        min_tokens = self._min_tokens[rows]
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            num_logprobs=self._num_logprobs[rows],
            min_tokens=min_tokens,
            has_changes=bool(self._has_changes[rows].any()),
            has_min_tokens=bool(min_tokens.any()),
            has_draws=bool(self._temperature[rows].any()),
            head=HeadRequest(
                num_candidates=self._num_candidates[rows],
                wants_logits=self._wants_logits[rows],
                bias=SparseBias.none(len(rows)),
            ),
        )


def _num_candidates(temperature: float, top_k: int) -> int:
    """Return among how many candidates a row's token is chosen; 0: among all ids."""
    if temperature == 0.0:
        return 1
    return top_k if top_k <= MAX_CANDIDATES else 0
