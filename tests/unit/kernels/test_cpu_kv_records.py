"""Blocks of keys and values out of their packing and back, on every target."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from kernel_builds import built, targets
from penstock.kernels.cpu import abi
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import DTYPES, CpuKernels, HeadShape

NUM_BLOCKS = 3
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Block sizes with and without a tile of 16 tokens that is not full, odd ones too; head sizes likewise.
SIZES = [(1, 1, 2), (2, 5, 16), (3, 16, 20), (2, 17, 64), (1, 32, 80), (2, 40, 34)]
EACH_SIZE = pytest.mark.parametrize(("num_kv_heads", "block_size", "head_dim"), SIZES)


@pytest.fixture(params=targets())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return built(request.param)


def any_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of every kind, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    width = shape[-1] * dtype.itemsize
    return torch.randint(256, (*shape[:-1], width), dtype=torch.uint8, generator=generator).view(dtype)


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def memory(
    library: ctypes.CDLL, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Tensor:
    """uint8 [NUM_BLOCKS, block_bytes] of all ones."""
    size = library.penstock_kv_block_bytes(num_kv_heads, head_dim, block_size, DTYPES[dtype])
    return torch.full((NUM_BLOCKS, size), 0xFF, dtype=torch.uint8)


def addresses(tensors: Iterable[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    found = [tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(found))(*found)


def exported(library: ctypes.CDLL, kv: Tensor, block: int, like: Tensor, block_size: int) -> Tensor:
    records = torch.empty_like(like)
    num_kv_heads, _, _, head_dim = like.shape
    library.penstock_kv_export(
        addresses([kv[block]]), addresses(records), 1, num_kv_heads, head_dim, block_size, DTYPES[like.dtype]
    )
    return records


def imported(library: ctypes.CDLL, kv: Tensor, block: int, records: Tensor) -> None:
    num_kv_heads, _, block_size, head_dim = records.shape
    dtype = DTYPES[records.dtype]
    library.penstock_kv_import(
        addresses([kv[block]]), addresses(records), 1, num_kv_heads, head_dim, block_size, dtype
    )


@EACH_DTYPE
@EACH_SIZE
def test_d15_keys_and_values_come_out_in_the_order_of_heads_and_tokens(
    library: ctypes.CDLL, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    """What `rope_store` has put there: the whole of block 1, all but its last token of block 2."""
    shape = HeadShape(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    slots = torch.arange(block_size, 3 * block_size - 1)
    torch.manual_seed(0)
    qkv = torch.randn(len(slots), shape.qkv_size).to(dtype)
    angles = torch.tensor([1.0, 0.0]).repeat_interleave(head_dim // 2).repeat(len(slots), 1)  # not turned
    kv = memory(library, num_kv_heads, head_dim, block_size, dtype)
    step = abi.Step(num_tokens=len(slots), slot_mapping=slots.data_ptr())
    kernels = CpuKernels(library, frozenset(KERNEL_NAMES))
    kernels.rope_store(qkv, angles, kv, shape, block_size, step)
    _, *parts = qkv.view(len(slots), 3, num_kv_heads, head_dim).unbind(1)
    wanted = torch.stack(parts, dim=1).permute(2, 1, 0, 3)  # [num_kv_heads, 2, tokens, head_dim]
    like = torch.empty(num_kv_heads, 2, block_size, head_dim, dtype=dtype)
    assert torch.equal(exported(library, kv, 1, like, block_size), wanted[:, :, :block_size])
    partly = exported(library, kv, 2, like, block_size)
    assert torch.equal(partly[:, :, :-1], wanted[:, :, block_size:])
    assert partly[:, :, -1].isnan().all()  # as it was before


@EACH_DTYPE
@EACH_SIZE
def test_d15_what_goes_in_comes_out_bit_for_bit_and_nothing_else_is_written(
    library: ctypes.CDLL, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    kv = memory(library, num_kv_heads, head_dim, block_size, dtype)
    records = any_bits(num_kv_heads, 2, block_size, head_dim, dtype=dtype)
    imported(library, kv, 1, records)
    assert torch.equal(bits(exported(library, kv, 1, records, block_size)), bits(records))
    assert (kv[[0, 2]] == 0xFF).all()
    padding = kv.shape[1] - bits(records).numel()
    imported(library, kv, 1, torch.zeros_like(records))
    assert (kv[1] != 0).sum() == padding  # lanes that fill up tiles keep what they had


@EACH_DTYPE
def test_d15_blocks_of_several_layers_go_in_one_call(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    heads, block_size, head_dim = 2, 20, 34
    layers = [memory(library, heads, head_dim, block_size, dtype) for _ in range(3)]
    records = any_bits(3, heads, 2, block_size, head_dim, dtype=dtype)
    places = addresses([layers[0][2], layers[1][0], layers[2][1]])
    sizes = 3, heads, head_dim, block_size, DTYPES[dtype]
    library.penstock_kv_import(places, addresses(records.flatten(0, 1)), *sizes)
    for layer, block, own in zip(layers, (2, 0, 1), records, strict=True):
        assert torch.equal(bits(exported(library, layer, block, own, block_size)), bits(own))
    found = torch.empty_like(records)
    library.penstock_kv_export(places, addresses(found.flatten(0, 1)), *sizes)
    assert torch.equal(bits(found), bits(records))


@EACH_DTYPE
def test_d15_threads_of_their_own_copy_blocks_at_once(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    kv = memory(library, 2, 64, 40, dtype)
    records = [any_bits(2, 2, 40, 64, dtype=dtype, seed=seed) for seed in range(NUM_BLOCKS)]
    outcomes: list[bool] = []

    def copy(block: int) -> None:
        for _ in range(20):
            imported(library, kv, block, records[block])
            outcomes.append(
                torch.equal(bits(exported(library, kv, block, records[block], 40)), bits(records[block]))
            )

    threads = [threading.Thread(target=copy, args=(block,)) for block in range(NUM_BLOCKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 60
