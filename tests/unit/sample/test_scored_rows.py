"""Scores of prompt tokens from logits: slices, ranks, ties and what is not finite (row G8)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.candidates import HeadOutput, HeadRequest, head_output_of
from penstock.sample.prompt_scores import ScoredRows, score

VOCAB = 50
CPU = torch.device("cpu")


def logits_of(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


class FakeHead:
    """Answers from logits that are there already, and remembers how many rows it was asked for."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.sizes: list[int] = []

    def __call__(self, indices: Tensor, request: HeadRequest) -> HeadOutput:
        self.sizes.append(len(indices))
        return head_output_of(self.logits[indices], request)


def rows(indices: list[int], token_ids: list[int], num_top: int) -> ScoredRows:
    return ScoredRows(indices=np.array(indices), token_ids=np.array(token_ids), num_top=num_top)


def test_values_ranks_and_likeliest_are_those_of_the_whole_distribution() -> None:
    head = FakeHead(logits_of(9))
    ((first, second),) = score([rows([2, 7], [11, 3], 4)], head, CPU)
    for index, token_id, found in ((2, 11, first), (7, 3, second)):
        expected = head.logits[index].log_softmax(-1)
        order = expected.argsort(descending=True).tolist()
        assert found.logprob == expected[token_id].item()
        assert found.rank == order.index(token_id) + 1
        assert found.top_ids == order[:4]
        assert found.top_logprobs == expected[order[:4]].tolist()


@pytest.mark.parametrize("max_rows", [1, 2, 3, 64])
def test_g8_where_a_slice_ends_changes_nothing(max_rows: int) -> None:
    parts = [rows([0, 1, 2], [5, 6, 7], 0), rows([4, 5, 6, 7], [1, 2, 3, 4], 3), rows([8], [49], 20)]
    head = FakeHead(logits_of(9))
    found = score(parts, head, CPU, max_rows=max_rows)
    assert max(head.sizes) <= max_rows
    assert sum(head.sizes) == 8
    assert found == [score([part], FakeHead(head.logits), CPU)[0] for part in parts]
    assert [len(entry.top_ids) for own in found for entry in own] == [0] * 3 + [3] * 4 + [20]


def test_g8_of_equal_logits_the_lower_id_comes_first_whoever_asks_for_more() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 30:] = 1.0
    alone = score([rows([0], [0], 2)], FakeHead(logits), CPU)
    beside = score([rows([0], [0], 2), rows([1], [0], 20)], FakeHead(logits), CPU)
    assert alone[0] == beside[0]
    assert alone[0][0].top_ids == [30, 31]
    assert alone[0][0].rank == 21


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_leaves_its_own_part_without_scores(value: float) -> None:
    logits = logits_of(6)
    logits[3, 8] = value
    found = score([rows([0, 1], [5, 6], 1), rows([2, 3, 4], [1, 2, 3], 1)], FakeHead(logits), CPU, max_rows=2)
    assert [len(own) for own in found] == [2, 0]
    assert all(math.isfinite(entry.logprob) for entry in found[0])
