"""Paged attention by our own kernels: rotation, storing and attending in two calls a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, AttentionMetadata, BlockKV
from penstock.kernels.cpu.ops import DTYPES, CpuKernels, HeadShape, Sight


class CpuPagedAttention:
    """Implements `attention.backend.AttentionBackend`.

    A query's result depends on nothing but itself and its own context: not on the rest of the step, the
    number of threads or how its prompt was cut.
    """

    def __init__(self, shape: HeadShape, dtype: torch.dtype, block_size: int, kernels: CpuKernels) -> None:
        self._shape, self._dtype, self._block_size, self._kernels = shape, dtype, block_size, kernels

    def attend(
        self, qkv: Tensor, angles: Tensor, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        assert isinstance(kv, BlockKV)
        step = metadata.kernel_step or metadata.step.struct
        self._kernels.rope_store(qkv, angles, kv.blocks, self._shape, self._block_size, step)
        return self._kernels.attention(qkv, kv.blocks, self._shape, sight, self._block_size, step)

    def block_bytes(self, block_size: int) -> int:
        assert block_size == self._block_size, (block_size, self._block_size)
        size: int = self._kernels.library.penstock_kv_block_bytes(
            self._shape.num_kv_heads, self._shape.head_dim, block_size, DTYPES[self._dtype]
        )
        return size

    def layer_kv(self, memory: Tensor) -> BlockKV:
        return BlockKV(blocks=memory)
