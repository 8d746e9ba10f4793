"""The sampler: from logits to token ids, on the last stage.

`runner.model_runner` calls `Sampler.sample` once per step. The recipe: raw log-probabilities, suppression of
end-of-sequence ids before min_tokens, then for each row either the likeliest token or temperature, min-p,
top-k, top-p and one draw.

A draw uses one number that is a pure function of (seed, output index) and inverts the cumulative
distribution, so a token depends on nothing but seed, index and the row's own logits: not on the batch, the
stages or a replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.request import TokenLogprobs
from penstock.sample.logprobs import RawLogprobs
from penstock.sample.sampling_rows import SamplingBatch
from penstock.sample.truncation import Limits, draw_truncated
from penstock.sample.uniform import uniform

NO_TOKEN = -1  # of a row whose logits are not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """What was drawn. Lists run over the rows of the logits."""

    token_ids: list[int]  # [num_rows]; NO_TOKEN where the row failed
    logprobs: list[TokenLogprobs | None]  # [num_rows]
    failed: list[int]  # indices of rows with NaN or infinite logits


class Sampler:
    """Greedy and random sampling. Holds no state: seeds and counters come with each batch."""

    def sample(self, logits: Tensor, params: SamplingBatch) -> SampleOutput:
        """Choose one token per row.

        Args:
            logits: float32 [num_rows, vocab]; overwritten.
            params: how each row is sampled.
        """
        failed = _blank_failed(logits)
        raw = RawLogprobs(logits, params.num_logprobs.tolist())
        for row, ids in params.suppressed.items():
            logits[row, ids] = -torch.inf
        token_ids = self._choose(logits, params)
        for row in failed:
            token_ids[row] = NO_TOKEN
        return SampleOutput(token_ids=token_ids, logprobs=raw.of(token_ids), failed=failed)

    def _choose(self, logits: Tensor, params: SamplingBatch) -> list[int]:
        drawn = np.flatnonzero(params.temperature > 0.0)
        if not len(drawn):
            return logits.argmax(dim=-1).tolist()
        token_ids = np.empty(len(params), dtype=np.int64)
        greedy = np.flatnonzero(params.temperature == 0.0)
        token_ids[greedy] = logits[greedy.tolist()].argmax(dim=-1).tolist()
        uniforms = uniform(params.seed, params.output_index)
        limited = (params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0)
        free, cut = drawn[~limited[drawn]], drawn[limited[drawn]]
        if len(free):
            token_ids[free] = _draw_free(_probs(logits, params, free), uniforms[free])
        if len(cut):
            limits = Limits(top_k=params.top_k[cut], top_p=params.top_p[cut], min_p=params.min_p[cut])
            token_ids[cut] = draw_truncated(_probs(logits, params, cut), limits, uniforms[cut])
        return token_ids.tolist()


def _blank_failed(logits: Tensor) -> list[int]:
    """Indices of rows that hold NaN or infinity; they are set to zero so that nothing trips over them."""
    # A sum is finite if and only if all terms are (they are far from the float32 limit), and reads each once.
    is_finite = logits.sum(dim=-1).isfinite()
    if bool(is_finite.all()):
        return []
    failed = (~is_finite).nonzero()[:, 0].tolist()
    logits[failed] = 0.0
    return failed


def _probs(logits: Tensor, params: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """The distribution of some rows after temperature: float32 [len(rows), vocab]."""
    temperature = torch.from_numpy(params.temperature[rows]).to(logits.device, torch.float32)
    return torch.softmax(logits[rows.tolist()] / temperature[:, None], dim=-1)


def _draw_free(probs: Tensor, uniforms: NDArray[np.float64]) -> list[int]:
    """Draw from the whole distribution; summed in double precision, in the order of the ids."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    targets = torch.from_numpy(uniforms).to(probs.device)[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return places.clamp_max(probs.shape[1] - 1).tolist()
