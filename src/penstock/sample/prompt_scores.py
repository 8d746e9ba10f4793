"""The log-probabilities of the prompts' own tokens, on the last stage.

    hidden states after   0   1   2 | 3   4          two chunks of a prompt of six tokens
    score the tokens      1   2   3 | 4   5

The state of a token gives the distribution of the next one. So a chunk also scores the token behind it, and
the first token of a prompt has no score. Called by `runner.model_runner` for the tokens that the plan names
(`ScheduledBatch.scored`). Logits are as wide as the vocabulary, so that only those of some tokens, a slice,
are held at once. The size of a slice changes no number, since each token's logits are treated by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.candidates import HeadOutput, HeadRequest, SparseBias
from penstock.request import TokenLogprobs
from penstock.sample.logprobs import raw_logprobs

SLICE_ROWS = 64  # tokens of a slice: 39 MB of logits for a vocabulary of 151,936

Head = Callable[[Tensor, HeadRequest], HeadOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The tokens of one request that a step scores."""

    indices: NDArray[np.int64]  # [num_scored] index in the step of the token before each
    token_ids: NDArray[np.int64]  # [num_scored]
    num_top: int  # how many of the likeliest tokens to report for each


def score(
    parts: Iterable[ScoredRows], head: Head, device: torch.device, max_rows: int = SLICE_ROWS
) -> list[list[TokenLogprobs]]:
    """Return the scores of each part; an empty list for a part with logits that are not finite.

    Args:
        head: returns what a request asks for of the logits behind some of the step's tokens, given by their
            indices ([num_rows] int64).
        device: device on which the head takes the indices.
        max_rows: most tokens whose logits are held at once.
    """
    every = list(parts)
    scores: list[list[TokenLogprobs]] = [[] for _ in every]
    unsound: set[int] = set()
    indices = np.concatenate([part.indices for part in every])
    token_ids = np.concatenate([part.token_ids for part in every])
    sizes = [len(part.indices) for part in every]
    owner = np.repeat(np.arange(len(every)), sizes)
    num_top = np.repeat([part.num_top for part in every], sizes)
    for begin in range(0, len(indices), max_rows):
        rows = slice(begin, begin + max_rows)
        output = head(torch.from_numpy(indices[rows]).to(device), _request(num_top[rows]))
        entries = raw_logprobs(
            output.logits, token_ids[rows].tolist(), num_top[rows].tolist(), output.candidates.ids
        )
        for whose, entry in zip(owner[rows].tolist(), entries, strict=True):
            scores[whose].append(entry)
        unsound.update(owner[rows][~output.candidates.is_finite].tolist())
    return [[] if index in unsound else own for index, own in enumerate(scores)]


def _request(num_top: NDArray[np.int64]) -> HeadRequest:
    """Return a request for whole logits and for the likeliest tokens.

    The head ranks these, so that of equally likely tokens the lower id is always first, whatever their
    number.
    """
    return HeadRequest(
        num_candidates=num_top,
        wants_logits=np.ones(len(num_top), dtype=np.bool_),
        bias=SparseBias.none(len(num_top)),
    )
