"""Candidates from whole logits, against loops in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depth import depth
from head_requests import request
from penstock.kernels.candidates import NO_ID, HeadRequest, candidates_of, head_output_of


def oracle(logits: Tensor, wanted: HeadRequest, allowed: list[set[int]] | None = None) -> list[list[int]]:
    """Ids of the candidates of every row."""
    found = []
    for row, values in enumerate(logits.tolist()):
        first, end = wanted.bias.starts[row : row + 2]
        if not all(map(math.isfinite, values)):
            found.append([])
            continue
        scales = (
            np.ones(len(wanted.bias.ids), np.float32) if wanted.bias.scales is None else wanted.bias.scales
        )
        entries = (wanted.bias.ids[first:end], wanted.bias.values[first:end], scales[first:end])
        for i, value, scale in zip(*entries, strict=True):
            logit = np.float32(values[i])
            values[i] = float((logit / scale if logit > 0 else logit * scale) + value)
        ids = [i for i, v in enumerate(values) if v > -math.inf and (allowed is None or i in allowed[row])]
        ids.sort(key=lambda i: (-values[i], i))
        found.append(ids[: wanted.num_candidates[row]])
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, HeadRequest, list[set[int]] | None]:
    """Coarse logits, so that many are equal; some rows not finite; some biases and masks."""
    num_rows, vocab = draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 31, 33, 64, 100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = torch.from_numpy(rng.integers(-4, 5, (num_rows, vocab)).astype(np.float32) / 2)
    logits[logits == 0] *= -1.0  # zeros of both signs are equal
    for row in draw(st.sets(st.integers(0, 4))):
        if row < num_rows:
            logits[row, rng.integers(vocab)] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 7, 50, 128]), min_size=num_rows, max_size=num_rows))
    numbers = st.sampled_from([-math.inf, -1.0, 0.5, 3.0])
    ids = st.dictionaries(st.integers(0, vocab - 1), numbers, max_size=9)
    bias = draw(st.dictionaries(st.integers(0, 4), ids, max_size=3))
    factors = st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([0.5, 1.1, 2.0]), max_size=9)
    scales = draw(st.none() | st.dictionaries(st.integers(0, 4), factors, max_size=3))
    sets = st.lists(st.sets(st.integers(0, vocab - 1)), min_size=num_rows, max_size=num_rows)
    allowed = draw(st.none() | sets)
    wants = sorted(draw(st.sets(st.integers(0, 4))))
    return (
        logits,
        request(counts, wants=wants, bias=bias, scales=scales, allowed=allowed, vocab=vocab),
        allowed,
    )


@pytest.mark.deep
@settings(max_examples=depth(80, 300))
@given(cases())
def test_candidates_are_those_of_plain_loops(case: tuple[Tensor, HeadRequest, list[set[int]] | None]) -> None:
    logits, wanted, allowed = case
    before = logits.clone()
    output = head_output_of(logits, wanted)
    found = output.candidates
    width = max([1, *wanted.num_candidates.tolist()])
    expected = oracle(logits, wanted, allowed)
    assert found.ids.tolist() == [ids + [NO_ID] * (width - len(ids)) for ids in expected]
    assert found.values.shape == (len(logits), width)
    assert np.all((found.values > -np.inf) == (found.ids != NO_ID))
    assert np.all(np.diff(np.where(found.ids == NO_ID, -1e30, found.values), axis=1) <= 0)
    assert found.is_finite.tolist() == [bool(row.isfinite().all()) for row in logits]
    assert output.logits_rows.tolist() == [row for row in range(len(logits)) if wanted.wants_logits[row]]
    assert output.logits.equal(before[output.logits_rows]) or before.isnan().any()
    assert logits.equal(before) or before.isnan().any()


def test_values_are_the_biased_logits() -> None:
    logits = torch.tensor([[0.25, 1.5, -2.0, 1.0]])
    found = candidates_of(logits, request([3], bias={0: {2: 4.0, 1: -math.inf}}))
    assert found.ids.tolist() == [[2, 3, 0]]
    assert found.values.tolist() == [[2.0, 1.0, 0.25]]


def test_logits_above_zero_are_divided_by_their_scale_and_others_multiplied() -> None:
    logits = torch.tensor([[0.25, 1.5, -2.0, 1.0]])
    entries = {0: {0: 0.0, 1: -1.0, 2: 3.0}}
    found = candidates_of(logits, request([4], bias=entries, scales={0: {0: 2.0, 1: 0.5, 2: 2.0}}))
    assert found.ids.tolist() == [[1, 3, 0, 2]]
    assert found.values.tolist() == [[2.0, 1.0, 0.125, -1.0]]


def test_a_row_without_allowed_ids_has_no_candidates_but_is_finite() -> None:
    found = candidates_of(torch.ones(2, 40), request([1, 2], allowed=[set(), {33}], vocab=40))
    assert found.ids.tolist() == [[NO_ID, NO_ID], [33, NO_ID]]
    assert found.is_finite.all()
