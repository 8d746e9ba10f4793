"""Quantised matrices in torch: how far they are from what they stand for, and what they do at the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.quantized_groups import default_group_size
from penstock.kernels.quantized_rows import (
    QuantizedRows,
    dequantize,
    quantize_rows,
    round_activations,
)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    n=st.integers(1, 9),
    in_size=st.sampled_from([1, 8, 80, 130, 512]),
    bits=st.sampled_from([8, 4]),
    group_size=st.sampled_from([8, 32, 64, 128, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_each_weight_is_rounded_to_its_nearest_step(
    n: int, in_size: int, bits: int, group_size: int, dtype: torch.dtype
) -> None:
    """Against the scale as it is stored; only weights beyond the range may be further away."""
    torch.manual_seed(n * in_size)
    weights = torch.randn(n, in_size).to(dtype)
    rows = quantize_rows(weights, bits, group_size)
    assert rows.q.shape == (n, in_size)
    assert rows.scales.shape == (n, -(-in_size // rows.group_size))
    assert rows.scales.dtype == torch.bfloat16
    step = rows.scales.float().abs().repeat_interleave(rows.group_size, 1)[:, :in_size]
    error = (dequantize(rows, torch.float32) - weights.float()).abs()
    is_inside = (rows.q > 0) & (rows.q < 2**rows.bits - 1)
    assert (error <= step * 0.5001)[is_inside].all()


def test_8_bits_keep_the_largest_weight_within_half_a_step() -> None:
    torch.manual_seed(0)
    weights = torch.randn(50, 896)
    rows = quantize_rows(weights, 8, 896)
    error = (dequantize(rows, torch.float32) - weights).abs()
    assert (error <= 0.51 * rows.scales.float()).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_search_beats_the_largest_magnitude_at_4_bits(group_size: int) -> None:
    torch.manual_seed(0)
    weights = torch.randn(200, 512)
    found = dequantize(quantize_rows(weights, 4, group_size), torch.float32)
    groups = weights.unflatten(1, (-1, group_size))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / scale).round() * scale).flatten(1)
    assert (found - weights).square().mean() < 0.8 * (plain - weights).square().mean()


def test_rows_are_quantized_each_by_itself() -> None:
    torch.manual_seed(0)
    weights = torch.randn(700, 1000)  # more than is worked on at a time
    for bits, group_size in ((8, 1000), (4, 64)):
        together = quantize_rows(weights, bits, group_size)
        alone = quantize_rows(weights[651:652], bits, group_size)
        assert torch.equal(together.q[651:652], alone.q)
        assert torch.equal(together.scales[651:652], alone.scales)


def test_rows_of_zeros_and_empty_matrices() -> None:
    weights = torch.tensor([[0.0], [1.0], [-0.5]]).expand(3, 64)
    for bits in (8, 4):
        found = dequantize(quantize_rows(weights, bits, 32), torch.float32)
        assert torch.equal(found[0], weights[0])
        assert torch.allclose(found, weights, rtol=1 / 254 if bits == 8 else 0)
    assert quantize_rows(torch.empty(0, 64), 4, 32).q.shape == (0, 64)


def test_zeros_belong_to_their_group() -> None:
    rows = QuantizedRows(
        q=torch.tensor([[0, 15, 3]], dtype=torch.uint8),
        scales=torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        zeros=torch.tensor([[16, 1]], dtype=torch.uint8),
        group_size=2,
        bits=4,
    )
    assert dequantize(rows, torch.float32).tolist() == [[-8.0, -0.5, 4.0]]


def test_default_groups_fit_the_matrix() -> None:
    assert default_group_size(8, 896) == 896
    assert default_group_size(4, 896) == 64
    assert default_group_size(4, 16) == 16


@pytest.mark.parametrize(
    ("group_size", "own"), [(32, 32), (64, 64), (128, 128), (256, 128), (300, 128), (200, 200)]
)
def test_activations_are_rounded_in_groups(group_size: int, own: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 300)
    rounded = round_activations(x, group_size)
    for first in range(0, 300, own):
        part = x[:, first : first + own]
        scale = part.abs().amax(1, keepdim=True) / 127
        assert torch.allclose(rounded[:, first : first + own], (part / scale).round() * scale, atol=1e-6)


def test_activations_that_are_not_finite_spoil_their_group_only() -> None:
    x = torch.ones(3, 256)
    x[0, 5], x[1, 200] = torch.nan, torch.inf
    rounded = round_activations(x, 256)
    assert rounded[0, :128].isnan().all()
    assert rounded[1, 128:].isnan().all()
    assert torch.equal(rounded[2], x[2])
    assert (round_activations(torch.full((1, 8), 1e-40), 8) == 0).all()
