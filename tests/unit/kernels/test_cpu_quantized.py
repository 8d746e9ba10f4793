"""The quantised linear kernel against `quantized_rows` in torch, on every target that runs here."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_builds import built, targets
from penstock.kernels.cpu.abi import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    QuantizedGatherArgs,
    QuantizedLinearArgs,
    QuantizedPackArgs,
    QuantizedSizes,
    Step,
)
from penstock.kernels.quantized_rows import QuantizedRows, dequantize, quantize_rows, round_activations

CODES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
EACH_TARGET = pytest.mark.parametrize("library", targets(emulated=True), indirect=True)
GUARD = 7.0  # what memory that must not be written holds


def random_rows(
    n: int,
    in_size: int,
    bits: int,
    group_size: int,
    *,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
) -> QuantizedRows:
    """Any q at all, the extremes among them, and scales of both signs."""
    groups = -(-in_size // min(group_size, in_size))
    return QuantizedRows(
        q=torch.randint(0, 1 << bits, (n, in_size), dtype=torch.uint8),
        scales=(torch.randn(n, groups) / 10).to(dtype),
        zeros=torch.randint(0, 17 if bits == 4 else 256, (n, groups), dtype=torch.uint8) if zeros else None,
        group_size=group_size,
        bits=bits,
    )


@dataclass(frozen=True)
class Packed:
    """A matrix in the kernel's layout. Its buffers hold exactly the bytes that the library asks for."""

    library: ctypes.CDLL
    rows: QuantizedRows  # both halves of a gated matrix, gate first
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    token_bytes: int
    gated: bool

    @property
    def fields(self) -> dict[str, int | None]:
        return {
            "weight": self.weight.data_ptr(),
            "scales": self.scales.data_ptr(),
            "zeros": None if self.zeros is None else self.zeros.data_ptr(),
            "in_size": self.rows.q.shape[1],
            "group_size": self.rows.group_size,
            "bits": self.rows.bits,
            "scale_dtype": CODES[self.rows.scales.dtype],
        }


def pack(
    library: ctypes.CDLL, rows: QuantizedRows, *, gated: bool = False, keep_zeros: bool = False
) -> Packed:
    n, in_size = rows.q.shape
    sizes, scale_dtype = QuantizedSizes(), CODES[rows.scales.dtype]
    library.penstock_quantized_sizes(
        n, in_size, rows.group_size, rows.bits, gated, scale_dtype, ctypes.byref(sizes)
    )
    has_zeros = keep_zeros or rows.zeros is not None
    weight, scales = (
        torch.zeros(size, dtype=torch.uint8) for size in (sizes.weight_bytes, sizes.scale_bytes)
    )
    zeros = torch.zeros(sizes.zero_bytes, dtype=torch.uint8) if has_zeros else None
    packed = Packed(library, rows, weight, scales, zeros, sizes.token_bytes, gated)
    halves = [(0, n // 2, 1), (n // 2, n, 2)] if gated else [(0, n // 3, 0), (n // 3, n, 0)]
    for start, end, role in halves:
        part = rows.q[start:end].contiguous(), rows.scales[start:end].contiguous()
        part_zeros = None if rows.zeros is None else rows.zeros[start:end].contiguous()
        args = QuantizedPackArgs(
            q=part[0].data_ptr(),
            scales=part[1].data_ptr(),
            zeros=None if part_zeros is None else part_zeros.data_ptr(),
            weight=weight.data_ptr(),
            packed_scales=scales.data_ptr(),
            packed_zeros=None if zeros is None else zeros.data_ptr(),
            first_row=0 if gated else start,
            num_rows=end - start,
            in_size=in_size,
            group_size=rows.group_size,
            bits=rows.bits,
            role=role,
            scale_dtype=scale_dtype,
        )
        library.penstock_pack_quantized(ctypes.byref(args))
    return packed


def product(packed: Packed, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; x and y lie in wider rows, and nothing beside y may be written."""
    num_tokens, in_size = x.shape
    out_size = packed.rows.q.shape[0]
    width = out_size // 2 if packed.gated else out_size
    wide_x = torch.full((num_tokens, in_size + 3), torch.nan, dtype=x.dtype)
    wide_x[:, :in_size] = x
    y = torch.full((num_tokens + 1, width + 5), GUARD, dtype=x.dtype)
    scratch = torch.full((num_tokens * packed.token_bytes,), 0x7F, dtype=torch.uint8)
    args = QuantizedLinearArgs(
        x=wide_x.data_ptr(),
        x_stride=wide_x.shape[1],
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        y_stride=y.shape[1],
        out_size=out_size,
        scratch=scratch.data_ptr(),
        dtype=CODES[x.dtype],
        gated=packed.gated,
        **packed.fields,
    )
    packed.library.penstock_quantized_linear(ctypes.byref(args), ctypes.byref(Step(num_tokens=num_tokens)))
    assert (y[:, width:] == GUARD).all()
    assert (y[num_tokens] == GUARD).all()
    return y[:num_tokens, :width]


def gathered(packed: Packed, ids: list[int], dtype: torch.dtype) -> Tensor:
    y = torch.full((len(ids) + 1, packed.rows.q.shape[1]), GUARD, dtype=dtype)
    id_tensor = torch.tensor(ids, dtype=torch.int64)
    args = QuantizedGatherArgs(
        y=y.data_ptr(),
        dtype=CODES[dtype],
        out_size=len(packed.rows.q),
        **packed.fields,
    )
    step = Step(num_tokens=len(ids), input_ids=id_tensor.data_ptr())
    packed.library.penstock_gather_quantized(ctypes.byref(args), ctypes.byref(step))
    assert (y[-1] == GUARD).all()
    return y[:-1]


def expected_and_bound(rows: QuantizedRows, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The emulation in float64, and how far float32 sums may be from it."""
    rounded = round_activations(x, rows.group_size).double()
    weights = dequantize(rows, torch.float32).double()
    expected, magnitude = rounded @ weights.T, rounded.abs() @ weights.abs().T
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    return expected, 1e-6 * magnitude + 1e-30


def assert_close(y: Tensor, expected: Tensor, bound: Tensor) -> None:
    if y.dtype == torch.bfloat16:
        bound = bound + expected.abs() / 256
    error = (y.double() - expected).abs()
    assert (error <= bound).all(), f"{(error / bound).max().item():.2f} of what is allowed"


SHAPES = st.tuples(st.sampled_from([1, 31, 33, 96]), st.sampled_from([1, 3, 8, 80, 130, 264, 300, 512]))
GROUPS = st.sampled_from([8, 24, 32, 64, 128, 256, 4096])


@EACH_TARGET
@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    shape=SHAPES,
    group_size=GROUPS,
    bits=st.sampled_from([8, 4]),
    num_tokens=st.integers(0, 27),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale_dtype=st.sampled_from(list(CODES)),
    options=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_the_kernel_computes_what_the_emulation_says(
    library: ctypes.CDLL,
    shape: tuple[int, int],
    group_size: int,
    bits: int,
    num_tokens: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    options: tuple[bool, bool],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    zeros, has_bias = options
    rows = random_rows(*shape, bits, group_size, zeros=zeros, dtype=scale_dtype)
    x = (torch.randn(num_tokens, shape[1]) * torch.randn(num_tokens, 1).exp()).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    y = product(pack(library, rows), x, bias)
    assert_close(y, *expected_and_bound(rows, x, bias))


@EACH_TARGET
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, 16, 40])
def test_gate_and_up_projections_share_a_pass(library: ctypes.CDLL, bits: int, width: int) -> None:
    torch.manual_seed(width)
    rows = random_rows(2 * width, 130, bits, 64)
    x, bias = torch.randn(5, 130) / 50, torch.randn(2 * width)  # gates of a few units
    y = product(pack(library, rows, gated=True), x, bias)
    both, bound = expected_and_bound(rows, x, bias)
    gate, up = both.split(width, dim=1)
    gate_bound, up_bound = bound.split(width, dim=1)
    tolerance = 2 * gate_bound * up.abs() + up_bound * gate.abs() + 1e-5 * (gate * up).abs() + 1e-6
    assert_close(y, torch.nn.functional.silu(gate) * up, tolerance)


@EACH_TARGET
@pytest.mark.parametrize(("bits", "zeros"), [(8, False), (8, True), (4, False), (4, True)])
def test_integer_sums_are_exact_on_every_target(library: ctypes.CDLL, bits: int, zeros: bool) -> None:
    """Whole activations with 127 in each group, and scales of 1: the result is the whole number itself.

    Among them are the largest weights with activations of +127 and -127, where 16-bit sums would saturate.
    """
    torch.manual_seed(bits)
    rows = random_rows(64, 328, bits, 64, zeros=zeros)
    rows.q[:16] = (1 << bits) - 1
    rows = replace(rows, scales=torch.ones_like(rows.scales))
    x = torch.randint(-127, 128, (9, 328)).float()
    x[:, ::64] = 127
    x[0], x[1] = 127, -127
    middle = rows.middle if rows.zeros is None else rows.zeros.repeat_interleave(64, 1)[:, :328].long()
    assert torch.equal(product(pack(library, rows), x), (x.long() @ (rows.q.long() - middle).T).float())


@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 896), (4, 64), (4, 128), (8, 24), (4, 152)])
def test_a_row_does_not_depend_on_its_company_nor_on_threads(
    library: ctypes.CDLL, dtype: torch.dtype, bits: int, group_size: int
) -> None:
    torch.manual_seed(0)
    packed = pack(library, quantize_rows(torch.randn(97, 896), bits, group_size))
    x = torch.randn(70, 896).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([product(packed, row) for row in x.split(1)])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_tokens in (2, 5, 12, 13, 37, 70):
            assert torch.equal(product(packed, x[:num_tokens]), alone[:num_tokens])
            assert torch.equal(product(packed, x[-num_tokens:]), alone[-num_tokens:])


@EACH_TARGET
@pytest.mark.parametrize(("bits", "group_size"), [(8, 601), (8, 128), (4, 64), (4, 152), (4, 256)])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_does_not_depend_on_hundreds_of_others(
    library: ctypes.CDLL, bits: int, group_size: int, zeros: bool
) -> None:
    """Where rows and inputs are cut into blocks, too: whole ones, and what is left over."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    packed = pack(library, random_rows(70, 601, bits, group_size, zeros=zeros))
    x = torch.randn(540, 601).bfloat16()
    alone = torch.cat([product(packed, few) for few in x.split(12)])
    for num_tokens in (33, 65, 540):
        assert torch.equal(product(packed, x[-num_tokens:]), alone[-num_tokens:])


@EACH_TARGET
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_that_is_not_finite_comes_out_so_alone(library: ctypes.CDLL, bits: int, bad: float) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        packed = pack(library, quantize_rows(torch.randn(33, 200), bits, 64))
        x = torch.randn(14, 200).to(dtype)
        sound = product(packed, x)
        x[3, 199] = bad
        y = product(packed, x)
        assert not y[3].isfinite().any()
        others = torch.arange(14) != 3
        assert torch.equal(y[others], sound[others])


@EACH_TARGET
def test_groups_of_nothing_and_of_extreme_numbers(library: ctypes.CDLL) -> None:
    rows = random_rows(33, 256, 8, 256)
    x = torch.zeros(5, 256)
    x[1, :128] = 1e-40
    x[2, 128:] = 3e38
    x[3] = 1e-35
    y = product(pack(library, rows), x)
    assert (y[:2] == 0).all()
    expected, bound = expected_and_bound(rows, x, None)
    fits = expected.abs() < 3e38
    assert_close(y[fits], expected[fits], bound[fits])
    assert not y[~fits].isfinite().any()


@EACH_TARGET
@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    shape=SHAPES,
    group_size=GROUPS,
    bits=st.sampled_from([8, 4]),
    zeros=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale_dtype=st.sampled_from(list(CODES)),
)
def test_gathered_rows_are_the_dequantized_ones(
    library: ctypes.CDLL,
    shape: tuple[int, int],
    group_size: int,
    bits: int,
    zeros: bool,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
) -> None:
    torch.manual_seed(shape[0])
    rows = random_rows(*shape, bits, group_size, zeros=zeros, dtype=scale_dtype)
    ids = torch.randint(0, shape[0], (19,)).tolist()
    assert torch.equal(gathered(pack(library, rows), ids, dtype), dequantize(rows, dtype)[ids])


@EACH_TARGET
def test_every_finite_float16_scale_is_read_exactly(library: ctypes.CDLL) -> None:
    scales = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    scales = scales[scales.isfinite()].unsqueeze(1)
    rows = QuantizedRows(torch.full((len(scales), 1), 129, dtype=torch.uint8), scales, None, 1, 8)
    y = gathered(pack(library, rows), list(range(len(scales))), torch.float32)
    assert torch.equal(y, scales.float())


@EACH_TARGET
@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_of_a_symmetric_part_are_the_middle(library: ctypes.CDLL, bits: int) -> None:
    torch.manual_seed(0)
    rows, x = random_rows(40, 96, bits, 32), torch.randn(4, 96)
    with_zeros = pack(library, rows, keep_zeros=True)
    assert torch.equal(product(with_zeros, x), product(pack(library, rows), x))


def test_sizes_are_those_of_whole_panels() -> None:
    sizes = QuantizedSizes()
    at = ctypes.byref(sizes)
    built().penstock_quantized_sizes(33, 130, 64, 4, 0, BFLOAT16, at)
    assert (sizes.weight_bytes, sizes.scale_bytes, sizes.zero_bytes) == (2 * 17 * 128, 2 * 3 * 64, 2 * 3 * 32)
    built().penstock_quantized_sizes(34, 130, 999, 8, 1, FLOAT32, at)  # 17 gates and 17 ups: 2 panels
    assert (sizes.weight_bytes, sizes.scale_bytes, sizes.zero_bytes) == (2 * 33 * 128, 2 * 128, 2 * 32)
    assert sizes.token_bytes % 64 == 0
