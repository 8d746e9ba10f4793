"""The log-probabilities of the prompts' own tokens, on the last stage.

    hidden states after   0   1   2 | 3   4          two chunks of a prompt of six tokens
    score the tokens      1   2   3 | 4   5

What stands before a token gives its distribution, so a chunk also scores the token behind it, and the first
token of a prompt has no score. Called by `runner.model_runner` for what the plan names. Logits are as wide as
the vocabulary, so only a slice of them is held at once; where a slice ends changes no number, since the head
and all that is done here treat each row by itself.
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

SLICE_ROWS = 64  # logits of so many tokens are held at once: 39 MB for a vocabulary of 151,936

Head = Callable[[Tensor, HeadRequest], HeadOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The tokens of one request that a step scores."""

    indices: NDArray[np.int64]  # [num_scored] which of the step's tokens stand before them
    token_ids: NDArray[np.int64]  # [num_scored]
    num_top: int  # how many of the likeliest to tell of each


def score(
    parts: Iterable[ScoredRows], head: Head, device: torch.device, max_rows: int = SLICE_ROWS
) -> list[list[TokenLogprobs]]:
    """Return the scores of each part; an empty list for a part with logits that are not finite.

    Args:
        head: answers for some of the step's tokens ([num_rows] int64).
        device: where the head wants them.
        max_rows: tokens whose logits are held at once.
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
    """Return a request for whole logits, and the likeliest as the head ranks them.

    Of equal ones the lower id is first, however many others are asked for beside.
    """
    return HeadRequest(
        num_candidates=num_top,
        wants_logits=np.ones(len(num_top), dtype=np.bool_),
        bias=SparseBias.none(len(num_top)),
    )
