"""The paged attention over latent vectors by our own kernels, which put them into tiles as they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.metadata import AnyKV, AttentionMetadata, LatentKV
from penstock.families.latent_spec import LatentSpec
from penstock.kernels.cpu.ops import CpuKernels, Sight


class CpuLatentAttention(LatentPagedAttention):
    """Implements `attention.backend.AttentionBackend`; keys lie as `LatentPagedAttention` has them.

    A query's result depends on nothing but the query and its context, as with `CpuPagedAttention`.
    """

    def __init__(self, num_heads: int, latent: LatentSpec, dtype: torch.dtype, kernels: CpuKernels) -> None:
        super().__init__(num_heads, latent, dtype)
        self._kernels = kernels

    def attend(
        self, qkv: Tensor, angles: Any, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        assert isinstance(kv, LatentKV)
        self._store(qkv, angles, kv, metadata)
        step = metadata.kernel_step or metadata.step.struct
        heads, rank = self._num_heads, self._latent.rank
        return self._kernels.latent_attention(qkv, kv.latent, heads, sight, metadata.block_size, rank, step)
