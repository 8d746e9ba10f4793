"""Packing, products, gathering and the norm against torch, and bit for bit against themselves.

Every target that runs here is tested: tiles, lanes and products differ between them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_builds import built, targets
from penstock.kernels.cpu.abi import BFLOAT16, FLOAT32, GatherArgs, LinearArgs, NormArgs, Step

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
PANEL = 32
PLAIN, GATE, UP = 0, 1, 2  # roles of csrc/epilogue.h
GUARD = 7.0  # what memory that must not be written holds
DTYPES = st.sampled_from(list(TYPES))
EACH_TARGET = pytest.mark.parametrize("library", targets(emulated=True), indirect=True)
EACH_DTYPE = pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])


@dataclass(frozen=True)
class Packed:
    """A weight [out_size, in_size] and its panels, in exactly the memory that they need."""

    library: ctypes.CDLL
    rows: Tensor  # of a gated matrix [gate; up]
    panels: Tensor
    gated: bool = False


def pack(library: ctypes.CDLL, rows: Tensor, *, gated: bool = False, pieces: int = 1) -> Packed:
    """Rows go in piece by piece, as a loader reads them."""
    out_size, in_size = rows.shape
    width = out_size // 2 if gated else out_size
    lanes = PANEL // 2 if gated else PANEL
    padded_in = in_size + in_size % 2 if rows.dtype == torch.bfloat16 else in_size
    panels = torch.zeros(-(-width // lanes) * PANEL * padded_in, dtype=rows.dtype)
    parts = [(GATE, rows[:width]), (UP, rows[width:])] if gated else [(PLAIN, rows)]
    for role, part in parts:
        first_row = 0
        for piece in part.tensor_split(pieces):
            library.penstock_pack(
                piece.data_ptr(), panels.data_ptr(), first_row, len(piece), in_size, role, TYPES[rows.dtype]
            )
            first_row += len(piece)
    return Packed(library, rows, panels, gated)


def strided(x: Tensor, stride: int, offset: int) -> Tensor:
    """The same numbers in rows of `stride` numbers that start `offset` after an aligned address; NaN beside
    them, which would show in a result."""
    num_tokens, in_size = x.shape
    storage = torch.full((offset + num_tokens * stride + 1,), math.nan, dtype=x.dtype)
    there = storage.as_strided((num_tokens, in_size), (stride, 1), offset)
    return there.copy_(x)


def product(packed: Packed, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; y lies in wider rows, and nothing beside it may be written."""
    out_size, in_size = packed.rows.shape
    width = out_size // 2 if packed.gated else out_size
    y = torch.full((len(x) + 1, width + 5), GUARD, dtype=x.dtype)
    args = LinearArgs(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=packed.panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        y_stride=y.shape[1],
        in_size=in_size,
        out_size=out_size,
        dtype=TYPES[x.dtype],
        gated=packed.gated,
    )
    packed.library.penstock_linear(ctypes.byref(args), ctypes.byref(Step(num_tokens=len(x))))
    assert (y[:, width:] == GUARD).all()
    assert (y[len(x)] == GUARD).all()
    return y[: len(x), :width]


def gathered(packed: Packed, ids: list[int]) -> Tensor:
    out_size, in_size = packed.rows.shape
    y = torch.full((len(ids) + 1, in_size), GUARD, dtype=packed.rows.dtype)
    id_tensor = torch.tensor(ids, dtype=torch.int64)
    args = GatherArgs(
        weight=packed.panels.data_ptr(),
        y=y.data_ptr(),
        in_size=in_size,
        out_size=out_size,
        dtype=TYPES[y.dtype],
    )
    step = Step(num_tokens=len(ids), input_ids=id_tensor.data_ptr())
    packed.library.penstock_gather(ctypes.byref(args), ctypes.byref(step))
    assert (y[-1] == GUARD).all()
    return y[:-1]


def normed(
    library: ctypes.CDLL, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(y, residual + x); x is read only."""
    num_tokens, size = x.shape
    stream, y = (torch.full((num_tokens + 1, size), GUARD, dtype=x.dtype) for _ in range(2))
    stream[:num_tokens] = residual
    before = x.clone()
    args = NormArgs(
        x=x.data_ptr(),
        residual=stream.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        size=size,
        eps=eps,
        dtype=TYPES[x.dtype],
    )
    library.penstock_add_rms_norm(ctypes.byref(args), ctypes.byref(Step(num_tokens=num_tokens)))
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert (stream[num_tokens] == GUARD).all()
    assert (y[num_tokens] == GUARD).all()
    return y[:num_tokens], stream[:num_tokens]


def expected_and_bound(rows: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far float32 sums may be from it."""
    wide, weights = x.double(), rows.double()
    expected, magnitude = wide @ weights.T, wide.abs() @ weights.abs().T
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    return expected, 1e-6 * magnitude + 1e-30


def gated_and_bound(both: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of a product and its bound."""
    (gate, up), (gate_bound, up_bound) = both.chunk(2, dim=1), bound.chunk(2, dim=1)
    opened = F.silu(gate)
    expected = opened * up  # silu is nowhere steeper than 1.1
    return expected, 1.1 * gate_bound * up.abs() + up_bound * opened.abs() + 1e-6 * expected.abs() + 1e-30


def assert_rounded_once(y: Tensor, expected: Tensor, bound: Tensor) -> None:
    """y is what some number within the bound becomes in the dtype of y; rounding keeps order."""
    low, high = ((expected + sign * bound).to(y.dtype) for sign in (-1, 1))
    bad = ((y < low) | (y > high) | y.isnan()).nonzero()
    assert not len(bad), f"{y[tuple(bad[0])]} at {bad[0].tolist()} is not {expected[tuple(bad[0])]}"


def random_rows(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@EACH_TARGET
@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    out_size=st.sampled_from([1, 2, 16, 20, 31, 32, 33, 40, 64, 512]),
    in_size=st.sampled_from([1, 2, 3, 16, 79, 80, 81, 256]),
    num_tokens=st.integers(0, 40),
    dtype=DTYPES,
    options=st.tuples(st.booleans(), st.booleans()),
    pieces=st.integers(1, 4),
    place=st.tuples(st.integers(0, 9), st.integers(0, 3)),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_torch(
    library: ctypes.CDLL,
    out_size: int,
    in_size: int,
    num_tokens: int,
    dtype: torch.dtype,
    options: tuple[bool, bool],
    pieces: int,
    place: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    has_bias, gated = options
    out_size = 2 * out_size if gated else out_size
    rows = random_rows(out_size, in_size, dtype=dtype, scale=in_size**-0.5)
    bias = random_rows(out_size, dtype=dtype) if has_bias else None
    apart, offset = place
    x = strided(random_rows(num_tokens, in_size, dtype=dtype), in_size + apart, offset)
    y = product(pack(library, rows, gated=gated, pieces=pieces), x, bias)
    expected, bound = expected_and_bound(rows, x, bias)
    assert_rounded_once(y, *(gated_and_bound(expected, bound) if gated else (expected, bound)))


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("vocab_size", [512, 151_936])
def test_a_vocabulary_is_multiplied_and_looked_up(
    library: ctypes.CDLL, dtype: torch.dtype, vocab_size: int
) -> None:
    """Small whole numbers: every sum is exact."""
    torch.manual_seed(vocab_size)
    rows, x = (torch.randint(-4, 5, (size, 10)).to(dtype) for size in (vocab_size, 3))
    packed = pack(library, rows)
    assert torch.equal(product(packed, x), (x.float() @ rows.float().T).to(dtype))
    ids = [vocab_size - 1, 0, 31, 32, vocab_size - 1, vocab_size // 3]
    assert torch.equal(gathered(packed, ids), rows[ids])


@EACH_TARGET
@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    out_size=st.sampled_from([1, 31, 32, 33, 100]),
    in_size=st.sampled_from([1, 2, 5, 80, 81]),
    dtype=DTYPES,
    pieces=st.integers(1, 4),
    num_tokens=st.integers(0, 40),
)
def test_gathered_rows_are_those_packed(
    library: ctypes.CDLL, out_size: int, in_size: int, dtype: torch.dtype, pieces: int, num_tokens: int
) -> None:
    torch.manual_seed(num_tokens)
    rows = random_rows(out_size, in_size, dtype=dtype)
    ids = torch.randint(0, out_size, (num_tokens,)).tolist()
    assert torch.equal(gathered(pack(library, rows, pieces=pieces), ids), rows[ids])


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_its_company_nor_on_threads(
    library: ctypes.CDLL, dtype: torch.dtype, gated: bool
) -> None:
    torch.manual_seed(0)
    packed = pack(library, random_rows(98, 131, dtype=dtype), gated=gated)
    x, bias = random_rows(40, 131, dtype=dtype), random_rows(98, dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([product(packed, row, bias) for row in x.split(1)])
    for num_threads in (1, 2, 3, 70):
        torch.set_num_threads(num_threads)
        for num_tokens in range(1, 41):
            assert torch.equal(product(packed, x[:num_tokens], bias), alone[:num_tokens])
            assert torch.equal(product(packed, x[-num_tokens:], bias), alone[-num_tokens:])


@EACH_TARGET
@EACH_DTYPE
def test_a_row_does_not_depend_on_hundreds_of_others(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Where rows and inputs are cut into blocks, too: whole ones, and what is left over."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    for in_size in (512, 1024, 1063):
        packed = pack(library, random_rows(70, in_size, dtype=dtype))
        x = random_rows(600, in_size, dtype=dtype)
        alone = torch.cat([product(packed, row) for row in x.split(1)])
        for num_tokens in (33, 63, 65, 255, 256, 257, 511, 512, 513, 600):
            assert torch.equal(product(packed, x[-num_tokens:]), alone[-num_tokens:])


@EACH_TARGET
@pytest.mark.parametrize(("out_size", "in_size"), [(2_080, 41), (70, 2_113)])
def test_a_row_does_not_depend_on_hundreds_of_others_that_are_copied(
    library: ctypes.CDLL, out_size: int, in_size: int
) -> None:
    """With many outputs or inputs the matrix unit takes rows in another order, into which they are copied."""
    torch.manual_seed(0)
    packed = pack(library, random_rows(out_size, in_size, dtype=torch.bfloat16), gated=True)
    x = random_rows(290, in_size, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    alone = torch.cat([product(packed, rows) for rows in x.split(32)])
    for num_threads, num_tokens in ((1, 129), (3, 290), (2, 161)):
        torch.set_num_threads(num_threads)
        assert torch.equal(product(packed, x[-num_tokens:]), alone[-num_tokens:])


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_comes_out_so_alone(
    library: ctypes.CDLL, dtype: torch.dtype, bad: float
) -> None:
    torch.manual_seed(1)
    others = torch.arange(14) != 3
    for gated in (False, True):
        packed = pack(library, random_rows(40, 81, dtype=dtype).abs(), gated=gated)
        x = random_rows(14, 81, dtype=dtype)
        sound = product(packed, x)
        x[3, 80] = bad
        y = product(packed, x)
        assert not y[3].isfinite().any()
        assert torch.equal(y[others], sound[others])


@EACH_TARGET
@EACH_DTYPE
def test_gates_of_any_size_open_and_shut(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    sizes = torch.cat([torch.linspace(80, 300, 441), 10.0 ** torch.arange(3, 31)])
    gate = torch.cat([-sizes, torch.linspace(-90, 90, 721), sizes]).to(dtype)[:, None]
    packed = pack(library, torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to(dtype), gated=True)
    y = product(packed, torch.cat([gate, torch.ones_like(gate)], dim=1))
    expected = F.silu(gate.double())
    assert_rounded_once(y, expected, 1e-6 * expected.abs() + 1e-34)


@EACH_TARGET
@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    size=st.sampled_from([1, 2, 15, 16, 17, 64, 80, 100, 896]),
    num_tokens=st.integers(0, 40),
    dtype=DTYPES,
    eps=st.sampled_from([1e-6, 1e-5]),
    seed=st.integers(0, 1000),
)
def test_the_norm_is_that_of_torch(
    library: ctypes.CDLL, size: int, num_tokens: int, dtype: torch.dtype, eps: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual = (random_rows(num_tokens, size, dtype=dtype, scale=3) for _ in range(2))
    weight = random_rows(size, dtype=dtype)
    y, stream = normed(library, x, residual, weight, eps)
    assert torch.equal(stream, x + residual)
    wide = stream.double()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    ends = [(scaled * (1 + error)).to(dtype) * weight for error in (-1e-6, 1e-6)]  # rounded twice
    assert ((torch.minimum(*ends) <= y) & (y <= torch.maximum(*ends))).all()


@EACH_TARGET
@EACH_DTYPE
def test_the_norm_of_a_row_depends_on_nothing_else(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, residual = (random_rows(40, 100, dtype=dtype) for _ in range(2))
    weight = random_rows(100, dtype=dtype)
    x[7, 3], residual[9, 99] = math.nan, math.inf
    torch.set_num_threads(1)
    rows = zip(x.split(1), residual.split(1), strict=True)
    alone = [normed(library, *row, weight, 1e-6) for row in rows]
    expected_y, expected_stream = (torch.cat(parts) for parts in zip(*alone, strict=True))
    bad = ~expected_y.isfinite().all(dim=1)
    assert bad.nonzero().flatten().tolist() == [7, 9]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_tokens in (2, 31, 32, 40):
            y, stream = normed(library, x[:num_tokens], residual[:num_tokens], weight, 1e-6)
            kept = ~bad[:num_tokens]
            assert torch.equal(y[kept], expected_y[:num_tokens][kept])
            assert torch.equal(stream[kept], expected_stream[:num_tokens][kept])


@EACH_DTYPE
def test_packing_again_replaces_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    packed = pack(built(), random_rows(40, 7, dtype=dtype))
    rows = packed.rows.clone()
    rows[30:35] = random_rows(5, 7, dtype=dtype)
    fresh = rows[30:35].contiguous()
    built().penstock_pack(fresh.data_ptr(), packed.panels.data_ptr(), 30, 5, 7, PLAIN, TYPES[dtype])
    assert torch.equal(gathered(replace(packed, rows=rows), list(range(40))), rows)
