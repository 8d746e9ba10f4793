"""The sampler: it turns what the output head found into token ids, on the last stage.

`runner.model_runner` calls `Sampler.sample` once per step. Greedy rows and rows with a small top_k need the
head's candidates alone, others whole logits (`sampling_rows`). Penalties, forbidden ids and grammars change
logits first: in the head for candidates, and here for whole logits. A greedy row then gets its likeliest
token. For any other row temperature, min-p, top-k and top-p are applied, in this order, and one token is
drawn. Where a request asks for log-probabilities, they are those of the unchanged logits.

A draw inverts the cumulative distribution at one random number, which is a pure function of (seed, output
index). So a token depends on seed, index and the row's own logits alone, and not on the batch, on the number
of stages, or on whether the step is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.candidates import NO_ID, HeadOutput, constrained, rows_of
from penstock.request import TokenLogprobs
from penstock.sample.logprobs import raw_logprobs
from penstock.sample.sampling_rows import SamplingBatch
from penstock.sample.truncation import Limits, draw_candidates, draw_truncated
from penstock.sample.uniform import uniform

NO_TOKEN = NO_ID  # in place of a token: the row's logits are not finite, or all ids are forbidden
_LOGITS_AT_ONCE = 1 << 21  # logits that are sampled at a time: of each there are up to twenty copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """The tokens that were drawn. Lists run over the step's samples; a row with drafts has several."""

    token_ids: list[int]  # [num_rows]; NO_TOKEN where nothing could be drawn
    logprobs: list[TokenLogprobs | None]  # [num_rows]
    failed: list[int]  # indices of samples with NaN or infinite logits, or without an id that may be drawn


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of whole logits the sampler copies at a time."""
    return max(1, _LOGITS_AT_ONCE // vocab_size)


class Sampler:
    """The sampler, greedy and random. It holds no state: seeds and output indices come with each batch."""

    def sample(self, output: HeadOutput, params: SamplingBatch, output_index: Sequence[int]) -> SampleOutput:
        """Choose one token per row.

        Args:
            output: the head's answer to `params.head`; not changed.
            params: how each row is sampled.
            output_index: [num_rows] tokens that the request has generated before, drafts counted in.
        """
        token_ids = output.candidates.ids[:, 0]
        if params.has_draws:
            token_ids = _with_draws(token_ids, output, params, output_index)
        chosen = token_ids.tolist()
        failed = [row for row, token_id in enumerate(chosen) if token_id == NO_TOKEN]
        logprobs: list[TokenLogprobs | None] = [None] * len(chosen)
        if len(output.logits_rows):
            _fill_logprobs(logprobs, output, params, token_ids)
        return SampleOutput(token_ids=chosen, logprobs=logprobs, failed=failed)


def _with_draws(
    token_ids: NDArray[np.int64], output: HeadOutput, params: SamplingBatch, output_index: Sequence[int]
) -> NDArray[np.int64]:
    """Return the likeliest candidate of each row [num_rows], replaced where a token is drawn."""
    token_ids = token_ids.copy()
    uniforms = uniform(params.seed, np.array(output_index, dtype=np.int64))
    is_drawn = (params.temperature > 0.0) & output.candidates.is_finite
    has_candidates = params.head.num_candidates > 0
    narrow = np.flatnonzero(is_drawn & has_candidates & (token_ids != NO_ID))
    whole = np.flatnonzero(is_drawn & ~has_candidates)
    if len(narrow):
        token_ids[narrow] = _draw_among_candidates(output, params, narrow, uniforms[narrow])
    for rows in _few_at_once(whole, output):
        token_ids[rows] = _draw_among_all(output, params, rows, uniforms[rows])
    return token_ids


def _few_at_once(rows: NDArray[np.int64], output: HeadOutput) -> list[NDArray[np.int64]]:
    """Cut rows with whole logits into runs whose copies take little memory, however many rows a step has."""
    most = rows_at_once(output.logits.shape[-1])
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _draw_among_candidates(
    output: HeadOutput, params: SamplingBatch, rows: NDArray[np.int64], uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    candidates = output.candidates
    return draw_candidates(
        candidates.values[rows],
        candidates.ids[rows],
        params.temperature[rows],
        _limits(params, rows),
        uniforms,
    )


def _draw_among_all(
    output: HeadOutput, params: SamplingBatch, rows: NDArray[np.int64], uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draw from the whole distribution of some rows, truncated or not."""
    logits = rows_of(output.logits, np.searchsorted(output.logits_rows, rows))
    logits = constrained(logits, params.head, rows)
    temperature = torch.from_numpy(params.temperature[rows]).to(logits.device, torch.float32)
    probs = torch.softmax(logits / temperature[:, None], dim=-1)  # [len(rows), vocab]
    is_empty = probs[:, 0].isnan()  # nothing was left above minus infinity
    probs.masked_fill_(is_empty[:, None], 0.0)
    limits = _limits(params, rows)
    is_free = (limits.top_k == 0) & (limits.top_p == 1.0) & (limits.min_p == 0.0)
    drawn = np.empty(len(rows), dtype=np.int64)
    free, cut = np.flatnonzero(is_free), np.flatnonzero(~is_free)
    if len(free):
        drawn[free] = _draw_free(rows_of(probs, free), uniforms[free])
    if len(cut):
        drawn[cut] = draw_truncated(rows_of(probs, cut), limits.of(cut), uniforms[cut])
    return np.where(is_empty.cpu().numpy(), NO_TOKEN, drawn)


def _draw_free(probs: Tensor, uniforms: NDArray[np.float64]) -> list[int]:
    """Draw from the whole distribution; the cumulative sum is in the order of ids, in double precision."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    targets = torch.from_numpy(uniforms).to(probs.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return ids.clamp_max(probs.shape[1] - 1).tolist()


def _limits(params: SamplingBatch, rows: NDArray[np.int64]) -> Limits:
    return Limits(top_k=params.top_k[rows], top_p=params.top_p[rows], min_p=params.min_p[rows])


def _fill_logprobs(
    logprobs: list[TokenLogprobs | None],
    output: HeadOutput,
    params: SamplingBatch,
    token_ids: NDArray[np.int64],
) -> None:
    """Write the entries of the rows that requested log-probabilities and have a token."""
    rows = output.logits_rows
    indices = np.flatnonzero((params.num_logprobs[rows] >= 0) & (token_ids[rows] >= 0))
    for some in _few_at_once(indices, output):
        asking = rows[some]
        logits = rows_of(output.logits, some)
        entries = raw_logprobs(logits, token_ids[asking].tolist(), params.num_logprobs[asking].tolist())
        for row, entry in zip(asking.tolist(), entries, strict=True):
            logprobs[row] = entry
