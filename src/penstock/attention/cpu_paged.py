"""The paged attention of our own kernels: rotation, storing and attending in two calls a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.attention.block_codec import LayerBlock, check_records
from penstock.attention.metadata import AnyKV, AttentionMetadata, BlockKV
from penstock.kernels.cpu.ops import DTYPES, HALVES, CpuKernels, HeadShape, Sight, Turning


class CpuPagedAttention:
    """Implements `attention.backend.AttentionBackend`.

    A query's result depends on nothing but the query and its context: not on the rest of the step, the
    number of threads, or the chunks that its prompt was cut into.
    """

    def __init__(
        self,
        shape: HeadShape,
        dtype: torch.dtype,
        block_size: int,
        kernels: CpuKernels,
        turning: Turning = HALVES,
    ) -> None:
        self._shape, self._dtype, self._block_size, self._kernels = shape, dtype, block_size, kernels
        self._turning = turning

    def attend(
        self, qkv: Tensor, angles: Tensor, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        assert isinstance(kv, BlockKV)
        step = metadata.kernel_step or metadata.step.struct
        size, turning = self._block_size, self._turning
        self._kernels.rope_store(qkv, angles, kv.blocks, self._shape, size, step, turning)
        return self._kernels.attention(qkv, kv.blocks, self._shape, sight, self._block_size, step)

    def block_bytes(self, block_size: int) -> int:
        assert block_size == self._block_size, (block_size, self._block_size)
        size: int = self._kernels.library.penstock_kv_block_bytes(
            self._shape.num_kv_heads, self._shape.head_dim, block_size, DTYPES[self._dtype]
        )
        return size

    def layer_kv(self, memory: Tensor) -> BlockKV:
        return BlockKV(blocks=memory)

    def block_codec(self, block_size: int) -> PackedCodec:
        return PackedCodec(self._shape, self._dtype, block_size, self.block_bytes(block_size), self._kernels)


class PackedCodec:
    """Implements `attention.block_codec.BlockCodec`.

    It calls the kernel library directly: `CpuKernels` may be recording a step on another thread.
    """

    def __init__(
        self, shape: HeadShape, dtype: torch.dtype, block_size: int, block_bytes: int, kernels: CpuKernels
    ) -> None:
        self._library, self._dtype = kernels.library, dtype
        self._block_bytes = block_bytes  # of a block as the kernels store it
        self._sizes = (shape.num_kv_heads, shape.head_dim, block_size)

    @property
    def num_records(self) -> int:
        return self._sizes[0]

    @property
    def record_bytes(self) -> int:
        _, head_dim, block_size = self._sizes
        return 2 * block_size * head_dim * self._dtype.itemsize

    def export_blocks(self, layer_blocks: Sequence[LayerBlock]) -> list[bytes]:
        size, count = self.record_bytes, len(layer_blocks) * self.num_records
        whole = bytearray(count * size)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(whole)) if whole else 0
        records = (ctypes.c_void_p * count)(*range(begin, begin + count * size, size))
        self._copy(self._library.penstock_kv_export, layer_blocks, records)
        return [bytes(whole[index * size : (index + 1) * size]) for index in range(count)]

    def import_blocks(self, layer_blocks: Sequence[LayerBlock], records: Sequence[bytes]) -> None:
        check_records(self, len(layer_blocks), records)
        self._copy(self._library.penstock_kv_import, layer_blocks, (ctypes.c_char_p * len(records))(*records))

    def _copy(self, kernel: Any, layer_blocks: Sequence[LayerBlock], records: ctypes.Array[Any]) -> None:
        blocks = (ctypes.c_void_p * len(layer_blocks))(
            *(self._memory(*layer_block) for layer_block in layer_blocks)
        )
        kernel(blocks, records, len(layer_blocks), *self._sizes, DTYPES[self._dtype])

    def _memory(self, kv: AnyKV, block: int) -> int:
        assert isinstance(kv, BlockKV)
        assert 0 <= block < len(kv.blocks) // self._block_bytes, block
        return kv.blocks.data_ptr() + block * self._block_bytes
