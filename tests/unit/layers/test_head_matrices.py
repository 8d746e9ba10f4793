"""Products of each head with its own matrices against float64, and bit for bit against themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernel_builds import built, targets
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.head_matrices import HeadMatrices
from penstock.weights.mapping import RowSink

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
EACH_TARGET = pytest.mark.parametrize("flags", targets(emulated=True))
SIZES = [(1, 6, 5, 10), (3, 16, 40, 33), (16, 64, 64, 96)]  # heads, key, value, rank


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(
    flags: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[HeadMatrices, Tensor, Tensor]:
    """The matrices, read in pieces as a loader does; and the two of each head, in float64."""
    num_heads, key_size, value_size, rank = sizes
    matrices = HeadMatrices(*sizes, dtype, CpuKernels(built(flags), frozenset(KERNEL_NAMES)))
    assert isinstance(matrices, RowSink)
    rows = noise(num_heads * (key_size + value_size), rank, seed=1).to(dtype)
    for first in range(0, len(rows), 7):
        matrices.put(first, rows[first : first + 7], 0)
    matrices.finish()
    to_key, to_value = rows.double().view(num_heads, -1, rank).split([key_size, value_size], dim=1)
    return matrices, to_key, to_value


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_queries_go_to_latent_width_and_results_to_values(
    flags: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    """Queries may lie among other numbers of a head."""
    matrices, to_key, to_value = filled(flags, sizes, dtype)
    num_heads, key_size, _, rank = sizes
    tolerance = 1e-4 if dtype == torch.float32 else 8e-3
    for num_tokens in (0, 1, 13, 40):
        query = noise(num_tokens, num_heads, key_size + 3, seed=2).to(dtype)[..., :key_size]
        expected = torch.einsum("thk,hkr->thr", query.double(), to_key)
        torch.testing.assert_close(matrices.absorb(query).double(), expected, rtol=tolerance, atol=tolerance)
        attended = noise(num_tokens, num_heads, rank, seed=3).to(dtype)
        expected = torch.einsum("thr,hvr->thv", attended.double(), to_value)
        torch.testing.assert_close(
            matrices.values(attended).double(), expected, rtol=tolerance, atol=tolerance
        )


@EACH_TARGET
@EACH_DTYPE
def test_neither_other_tokens_nor_threads_change_a_bit(flags: str, dtype: torch.dtype) -> None:
    matrices, _, _ = filled(flags, SIZES[2], dtype)
    query = noise(300, 16, 64, seed=4).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([matrices.absorb(token) for token in torch.split(query, 1)])
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for count in (2, 12, 33, 300):
            assert torch.equal(matrices.absorb(query[-count:]), alone[-count:])


def test_what_is_held_is_packed_once() -> None:
    matrices, to_key, to_value = filled("-march=native", SIZES[2], torch.bfloat16)
    assert matrices.nbytes == 2 * (to_key.numel() + to_value.numel())
    with pytest.raises(AssertionError, match="finished"):
        matrices.put(0, torch.zeros(1, 96, dtype=torch.bfloat16), 0)
