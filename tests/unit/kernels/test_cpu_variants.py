"""What families other than Llama ask of the kernels, against plain formulas, on every target."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from head_requests import request
from kernel_builds import built, targets
from penstock.kernels.candidates import LogitCurve, head_output_of
from penstock.kernels.cpu import abi
from penstock.kernels.cpu.head import Head, dense_product
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import HALVES, CpuKernels, HeadShape, Turning
from penstock.layers.matrix import GATE, UP, PackedMatrix

KINDS = [abi.PLAIN_NORM, abi.WIDE_NORM, abi.ONE_PLUS_NORM]
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
COUNTS = [0, 1, 3, 40]  # of tokens; the last is cut among threads
SIZES = [1, 8, 16, 37, 80]


@pytest.fixture(params=targets())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(built(request.param), frozenset(KERNEL_NAMES))


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weighted(normed: Tensor, weight: Tensor, kind: int) -> Tensor:
    """float64 numbers as the kind of norm leaves them, in the dtype of the weight."""
    if kind == abi.PLAIN_NORM:
        return normed.to(weight.dtype) * weight
    factor = weight.double() + (kind == abi.ONE_PLUS_NORM)
    return (normed * factor).to(weight.dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Up to the last place, which the order of a sum may change."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance * 0.1, rtol=tolerance)


@EACH_DTYPE
@pytest.mark.parametrize("kind", KINDS)
def test_each_group_of_a_row_is_normalised_on_its_own(
    kernels: CpuKernels, kind: int, dtype: torch.dtype
) -> None:
    for count in COUNTS:
        for size in SIZES:
            rows, weight = noise(count, 3 * size + 5, dtype=dtype), noise(size, dtype=dtype, seed=1)
            before = rows.clone()
            kernels.group_norm(rows[:, : 3 * size], weight, 1e-6, kind)
            wide = before[:, : 3 * size].double().reshape(count, 3, size)
            normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            assert_near(rows[:, : 3 * size], weighted(normed, weight, kind).flatten(1))
            assert torch.equal(rows[:, 3 * size :], before[:, 3 * size :])


@EACH_DTYPE
@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_with_the_residual_is_normalised_in_every_kind(
    kernels: CpuKernels, kind: int, dtype: torch.dtype
) -> None:
    for count in COUNTS:
        x, residual = (noise(count, 37, dtype=dtype, seed=seed) for seed in (0, 1))
        weight, total = noise(37, dtype=dtype, seed=2), x + residual
        y = kernels.add_rms_norm(x, residual, weight, 1e-6, kind=kind)
        wide = total.double()
        assert torch.equal(residual, total)
        assert_near(y, weighted(wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), weight, kind))


@EACH_DTYPE
def test_a_norm_over_all_ranks_takes_the_sum_of_their_squares(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    for count in COUNTS:
        whole, weight = noise(count, 80, dtype=dtype), noise(80, dtype=dtype, seed=1)
        expected = whole.clone()
        kernels.group_norm(expected, weight, 1e-6, abi.WIDE_NORM)
        parts = [whole[:, :48], whole[:, 48:]]
        squares = kernels.sums_of_squares(*parts)
        assert_near(squares, torch.stack([p.double().square().sum(-1) for p in parts], -1).float())
        total = squares.sum(-1)
        for part, own in zip(parts, weight.split([48, 32]), strict=True):
            kernels.group_norm(part, own, 1e-6, abi.WIDE_NORM, total, 80)
        assert_near(whole, expected)


@EACH_DTYPE
def test_additions_and_factors_are_those_of_torch(kernels: CpuKernels, dtype: torch.dtype) -> None:
    for count in COUNTS:
        for size in SIZES:
            x, residual = (noise(count, size, dtype=dtype, seed=seed) for seed in (0, 1))
            total, scaled = x + residual, x * 0.7
            kernels.add(x, residual)
            kernels.scale(x, 0.7)
            assert torch.equal(residual, total)
            assert torch.equal(x, scaled)


@EACH_DTYPE
def test_a_gate_of_gelu(kernels: CpuKernels, dtype: torch.dtype) -> None:
    gate, up, x = (noise(37, 24, dtype=dtype, seed=seed) * 0.4 for seed in (0, 1, 2))
    matrix = PackedMatrix(74, 24, dtype, kernels, gated=True, activation="gelu_tanh")
    matrix.put(0, gate, GATE)
    matrix.put(0, up, UP)
    opened = F.gelu(x.double() @ gate.double().T, approximate="tanh")
    expected = opened * (x.double() @ up.double().T)
    assert_near(matrix.multiply(x, None), expected.to(dtype))


@EACH_DTYPE
@pytest.mark.parametrize(
    "curve",
    [LogitCurve(multiplier=0.3), LogitCurve(soft_cap=2.0), LogitCurve(multiplier=0.5, soft_cap=5.0)],
    ids=str,
)
def test_candidates_of_curved_logits(kernels: CpuKernels, curve: LogitCurve, dtype: torch.dtype) -> None:
    """The tile that no logit fills up, logit bias on top of the curve, and a row that is not finite."""
    weight, x = noise(150, 24, dtype=dtype), noise(5, 24, dtype=dtype, seed=1)
    x[3, 2] = math.inf
    matrix = PackedMatrix(150, 24, dtype, kernels)
    matrix.put(0, weight, 0)
    wanted = request([6] * 5, wants=[0, 4], bias={1: {149: 50.0, 3: -math.inf}})
    product = dense_product(matrix._panels.data_ptr(), 24, 150, dtype)
    found = Head(kernels.library).answer(x, product, wanted, curve)
    expected = head_output_of(curve.of(x.float() @ weight.float().T), wanted)
    np.testing.assert_array_equal(found.candidates.is_finite, [True, True, True, False, True])
    np.testing.assert_array_equal(expected.candidates.is_finite, found.candidates.is_finite)
    np.testing.assert_array_equal(found.candidates.ids, expected.candidates.ids)
    np.testing.assert_allclose(found.candidates.values, expected.candidates.values, atol=1e-5)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)


@EACH_DTYPE
@pytest.mark.parametrize("rotary_dim", [2, 6, 36, 40])
def test_heads_are_rotated_in_part(kernels: CpuKernels, rotary_dim: int, dtype: torch.dtype) -> None:
    """What attention makes of one token is its value; of two, the keys as they were stored count."""
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=40)
    qkv, positions = noise(3, shape.qkv_size, dtype=dtype), torch.tensor([5, 0, 77])
    frequencies = 1.0 / 100.0 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    angles = kernels.rope_angles(positions, frequencies, 1.0, rotary_dim, dtype)
    size = kernels.library.penstock_kv_block_bytes(2, 40, 16, abi.BFLOAT16 if dtype != torch.float32 else 0)
    kv, slots = torch.zeros(size, dtype=torch.uint8), torch.arange(3)
    before = qkv.clone()
    step = abi.Step(num_tokens=3, positions=positions.data_ptr(), slot_mapping=slots.data_ptr())
    kernels.rope_store(qkv, angles, kv, shape, 16, step)
    heads = before[:, : shape.query_size].reshape(3, 4, 40).float()
    first, second, rest = heads.split([rotary_dim // 2, rotary_dim // 2, 40 - rotary_dim], dim=-1)
    cos, sin = angles.chunk(2, dim=-1)
    rotated = [first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]]
    assert_near(qkv[:, : shape.query_size], torch.cat([*rotated, rest], -1).flatten(1).to(dtype))
    stored = kv.view(dtype)[: 40 * 16].view(40 // group_of(dtype), 16, group_of(dtype))
    keys = before[:, shape.query_size :][:, :40]
    assert torch.equal(stored.transpose(0, 1)[:3].flatten(1)[:, rotary_dim:], keys[:, rotary_dim:])


@EACH_DTYPE
@pytest.mark.parametrize("rotary_dim", [6, 40])
def test_neighbours_are_rotated_as_halves_are_and_queries_grow(
    kernels: CpuKernels, rotary_dim: int, dtype: torch.dtype
) -> None:
    shape, positions = HeadShape(num_heads=4, num_kv_heads=2, head_dim=40), torch.tensor([5, 0, 77])
    halves = noise(3, shape.qkv_size, dtype=dtype)
    pairs = halves.view(3, 8, 40).clone()
    pairs[:, :6, 0:rotary_dim:2], pairs[:, :6, 1:rotary_dim:2] = halves.view(3, 8, 40)[
        :, :6, :rotary_dim
    ].chunk(2, dim=-1)
    frequencies = 1.0 / 100.0 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    size = kernels.library.penstock_kv_block_bytes(2, 40, 16, abi.BFLOAT16 if dtype != torch.float32 else 0)
    slots = torch.arange(3)
    step = abi.Step(num_tokens=3, positions=positions.data_ptr(), slot_mapping=slots.data_ptr())
    stored = []
    for qkv, turning in ((halves, HALVES), (pairs.flatten(1), Turning(interleaved=True, grows=True))):
        growth = (0.5, 16) if turning.grows else (0.0, 0)
        angles = kernels.rope_angles(positions, frequencies, 1.0, rotary_dim, dtype, growth)
        stored.append(torch.zeros(size, dtype=torch.uint8))
        kernels.rope_store(qkv, angles, stored[-1], shape, 16, step, turning)
        found = qkv[:, : shape.query_size].view(3, 4, 40)[..., :rotary_dim].float()
        if not turning.grows:
            expected = found.clone()
    assert torch.equal(*stored)  # keys do not grow
    larger = 1 + 0.5 * torch.log(1 + torch.floor(positions / 16))
    assert_near(found.to(dtype), (expected * larger[:, None, None]).to(dtype))


def group_of(dtype: torch.dtype) -> int:
    """Numbers that lie together in the keys of a block (csrc/attention.h)."""
    return 2 if dtype == torch.bfloat16 else 1


def test_structs_have_the_size_that_c_gives_them() -> None:
    """All are of 8-byte words, so that no padding can differ."""
    norms = (abi.GroupNormArgs, abi.SquaresArgs, abi.AddArgs, abi.ScaleArgs, abi.NormArgs)
    for struct in (*norms, abi.AttentionArgs, abi.AttentionParts, abi.MergePartsArgs):
        assert ctypes.sizeof(struct) == sum(ctypes.sizeof(kind) for _, kind in struct._fields_)
