"""Matrices in block formats: the kernels compute what the decoded numbers say, row by row, in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gguf_models import random_blocks
from kernel_builds import built, targets
from penstock.errors import ModelError
from penstock.kernels.block_formats import BLOCK_FORMATS, SUPER_BLOCK_INPUTS, BlockFormat
from penstock.kernels.block_rows import BlockRows, dequantize
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.block_matrix import BlockForms, BlockMatrix, RoundedBlocks
from penstock.layers.matrix import GATE, PLAIN, UP
from penstock.weights.gguf_blocks import decode_rows

NUM_ROWS = (1, 2, 3, 7, 48, 50)  # of activations: those of a pass, of a tile, and more
FLOATS = (torch.float32, torch.bfloat16)


@pytest.fixture(params=targets())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(built(request.param), frozenset(KERNEL_NAMES))


def rows_of(block_format: BlockFormat, n: int, in_size: int, seed: int = 0) -> BlockRows:
    raw = torch.from_numpy(random_blocks(block_format, n, in_size, seed))
    return decode_rows(block_format, raw, in_size)


def in_size_of(block_format: BlockFormat) -> int:
    """A size that ends within the 128 inputs that the kernel takes at once, where the format can."""
    return 512 if block_format.inputs == SUPER_BLOCK_INPUTS else 416


def filled(matrix: BlockMatrix | RoundedBlocks, *parts: tuple[int, BlockRows, int]) -> None:
    for first, rows, role in parts:
        matrix.put_blocks(first, rows, role)


def inputs(num_rows: int, in_size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, in_size, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def assert_alike(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("other", [None, "Q6_K", "Q8_0"])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_product_is_that_of_the_decoded_weights(
    kernels: CpuKernels, name: str, other: str | None, dtype: torch.dtype
) -> None:
    """Another format in the same matrix decides how activations are rounded."""
    block_format = BLOCK_FORMATS[name]
    n, in_size = 80, in_size_of(block_format)
    formats = (block_format,) if other is None else (block_format, BLOCK_FORMATS[other])
    forms, rows = BlockForms(formats), rows_of(block_format, n, in_size)
    pieces = [(first, rows.cut(slice(first, first + 32), None), PLAIN) for first in (32, 0, 64)]
    matrix = BlockMatrix(n, in_size, dtype, forms, kernels)
    rounded = RoundedBlocks(n, in_size, dtype, forms)
    filled(matrix, *pieces)
    filled(rounded, *pieces)
    bias = torch.linspace(-1, 1, n).to(dtype)
    for num_rows in NUM_ROWS:
        x = inputs(num_rows, in_size, dtype)
        found = matrix.multiply(x, bias)
        assert_alike(found, rounded.multiply(x, bias), dtype)
        alone = torch.cat([matrix.multiply(row[None], bias) for row in x])
        assert torch.equal(alone, found)
    ids = torch.tensor([0, 79, 33, 5])
    assert torch.equal(matrix.gather(ids), dequantize(rows)[ids].to(dtype))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_gate_and_up_share_panels(kernels: CpuKernels, name: str) -> None:
    block_format = BLOCK_FORMATS[name]
    in_size, forms = in_size_of(block_format), BlockForms((block_format,))
    gate, up = (rows_of(block_format, 48, in_size, seed) for seed in (1, 2))
    parts = [(0, gate, GATE), (0, up, UP)]
    matrix = BlockMatrix(96, in_size, torch.float32, forms, kernels, gated=True)
    rounded = RoundedBlocks(96, in_size, torch.float32, forms, gated=True)
    filled(matrix, *parts)
    filled(rounded, *parts)
    x = inputs(5, in_size, torch.float32)
    assert_alike(matrix.multiply(x, None), rounded.multiply(x, None), torch.float32)


def test_parts_of_several_formats_are_one_matrix(kernels: CpuKernels) -> None:
    first, second = BLOCK_FORMATS["Q4_K"], BLOCK_FORMATS["Q6_K"]
    forms = BlockForms((first, second))
    parts = [(0, rows_of(first, 64, 512), PLAIN), (64, rows_of(second, 32, 512), PLAIN)]
    matrix = BlockMatrix(96, 512, torch.float32, forms, kernels)
    rounded = RoundedBlocks(96, 512, torch.float32, forms)
    filled(matrix, *parts)
    filled(rounded, *parts)
    x = inputs(9, 512, torch.float32)
    assert_alike(matrix.multiply(x, None), rounded.multiply(x, None), torch.float32)
    with pytest.raises(ModelError, match=r"outputs 64 to 96 .* are stored as Q4_K and in other formats"):
        matrix.put_blocks(64, rows_of(first, 32, 512), PLAIN)


def test_several_formats_need_parts_that_fill_panels() -> None:
    both = BlockForms((BLOCK_FORMATS["Q4_K"], BLOCK_FORMATS["Q6_K"]))
    assert both.activation_group == 16
    assert both.may_share({"q": 128, "v": 64}, 2, gated=False)
    assert not both.may_share({"q": 128, "v": 64}, 4, gated=False)
    assert not both.may_share({"gate": 128, "up": 128}, 1, gated=True)
    assert BlockForms((BLOCK_FORMATS["Q4_K"],)).may_share({"gate": 5, "up": 5}, 4, gated=True)


def test_a_row_that_is_not_finite_harms_no_other(kernels: CpuKernels) -> None:
    forms = BlockForms((BLOCK_FORMATS["Q4_K"],))
    matrix = BlockMatrix(64, 256, torch.float32, forms, kernels)
    filled(matrix, (0, rows_of(BLOCK_FORMATS["Q4_K"], 64, 256), PLAIN))
    x = inputs(4, 256, torch.float32)
    expected = matrix.multiply(x, None)
    x[2, 7] = torch.inf
    found = matrix.multiply(x, None)
    assert torch.isnan(found[2]).all()
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
