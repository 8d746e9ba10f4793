"""Paged attention in plain torch, for CPUs and GPUs.

Decode rows are computed together: their keys are gathered, padded to the longest context, and the query heads
of a KV head form one small matrix (grouped-query attention without repeating keys). Rows that prefill are
computed one by one. Never `scaled_dot_product_attention(enable_gqa=True)`: on CPUs it is many times slower
than either.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata, DecodeGroup, LayerKV, PrefillRow


class TorchPagedAttention:
    """Implements `attention.backend.AttentionBackend`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, metadata: AttentionMetadata
    ) -> Tensor:
        kv.key.index_copy_(0, metadata.slot_mapping, key)
        kv.value.index_copy_(0, metadata.slot_mapping, value)
        output = torch.empty_like(query)
        for group in metadata.decode_groups:
            output[group.start : group.end] = _decode(query[group.start : group.end], kv, group)
        for row in metadata.prefill_rows:
            output[row.start : row.end] = _prefill(query[row.start : row.end], kv, row)
        return output


def _decode(query: Tensor, kv: LayerKV, group: DecodeGroup) -> Tensor:
    """[num_rows, num_heads, head_dim], one token a row -> the same."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv.key.shape[1]
    folded = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    places = _places(group.slots, num_kv_heads)
    keys, values = _gather(kv.key, places), _gather(kv.value, places)
    scores = torch.matmul(folded * head_dim**-0.5, keys.transpose(2, 3))  # [rows, kv heads, group, context]
    weights = scores.float().masked_fill_(group.padding, float("-inf")).softmax(-1).to(query.dtype)
    return torch.matmul(weights, values).view(num_rows, num_heads, head_dim)


def _prefill(query: Tensor, kv: LayerKV, row: PrefillRow) -> Tensor:
    """[num_tokens, num_heads, head_dim] of one row -> the same."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.key.shape[1]
    group_size = num_heads // num_kv_heads
    # KV heads play the batch, the heads of a group share their keys by a stride of 0.
    folded = query.view(num_tokens, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group_size, len(row.slots), head_dim)
    places = _places(row.slots, num_kv_heads)
    keys = _gather(kv.key, places)[:, None].expand(shared)
    values = _gather(kv.value, places)[:, None].expand(shared)
    attended = F.scaled_dot_product_attention(
        folded, keys, values, attn_mask=row.visible, is_causal=row.visible is None
    )
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _places(slots: Tensor, num_kv_heads: int) -> Tensor:
    """[..., context] slots -> [..., num_kv_heads, context] rows of storage seen as [-1, head_dim]."""
    heads = torch.arange(num_kv_heads, device=slots.device)[:, None]
    return slots[..., None, :] * num_kv_heads + heads


def _gather(storage: Tensor, places: Tensor) -> Tensor:
    """[..., num_kv_heads, context, head_dim] with each head's context contiguous, as matmul wants it."""
    head_dim = storage.shape[-1]
    return storage.view(-1, head_dim).index_select(0, places.view(-1)).view(*places.shape, head_dim)
