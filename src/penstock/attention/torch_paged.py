"""The paged attention in plain torch, for CPUs and GPUs.

Decode rows are computed together: their keys are gathered, padded to the longest context, and the query heads
of a KV head form one small matrix (grouped-query attention without repeating keys). Rows that prefill are
computed one by one. Neither uses `scaled_dot_product_attention(enable_gqa=True)`: on CPUs it is many times
slower.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.attention.block_codec import SlotCodec
from penstock.attention.metadata import AnyKV, AttentionMetadata, DecodeGroup, LayerKV, PrefillRow
from penstock.kernels.cpu.ops import HeadShape, Sight


class TorchPagedAttention:
    """Implements `attention.backend.AttentionBackend`. Keys and values lie slot by slot."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype

    def attend(
        self, qkv: Tensor, angles: Any, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        assert isinstance(kv, LayerKV)
        num_heads, num_kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, self._shape.head_dim)
        rotated, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        query, key = angles.rotate_both(rotated, num_heads)
        return attend(query, key, value, kv, metadata, sight).flatten(1)

    def block_bytes(self, block_size: int) -> int:
        return 2 * block_size * self._shape.num_kv_heads * self._shape.head_dim * self._dtype.itemsize

    def layer_kv(self, memory: Tensor) -> LayerKV:
        slots = memory.view(self._dtype).view(2, -1, self._shape.num_kv_heads, self._shape.head_dim)
        return LayerKV(key=slots[0], value=slots[1])

    def block_codec(self, block_size: int) -> SlotCodec:
        return SlotCodec(
            num_heads=self._shape.num_kv_heads,
            num_parts=2,
            width=self._shape.head_dim,
            dtype=self._dtype,
            block_size=block_size,
        )


def attend(
    query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, metadata: AttentionMetadata, sight: Sight
) -> Tensor:
    """Store the step's keys and values, then attend.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated.
        key, value: [num_tokens, num_kv_heads, head_dim], the key rotated.

    Returns:
        The shape of `query`.
    """
    kv.key.index_copy_(0, metadata.slot_mapping, key)
    kv.value.index_copy_(0, metadata.slot_mapping, value)
    output = torch.empty_like(query)
    reads = metadata.reads(sight.window)
    for group in reads.decode_groups:
        output[group.start : group.end] = _decode(query[group.start : group.end], kv, group, sight)
    for row in reads.prefill_rows:
        output[row.start : row.end] = _prefill(query[row.start : row.end], kv, row, sight)
    return output


def _decode(query: Tensor, kv: LayerKV, group: DecodeGroup, sight: Sight) -> Tensor:
    """Return the attention output of one token a row, [num_rows, num_heads, head_dim] like `query`."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv.key.shape[1]
    folded = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    head_rows = _places(group.slots, num_kv_heads)
    keys, values = _gather(kv.key, head_rows), _gather(kv.value, head_rows)
    sinks = None if sight.sinks is None else sight.sinks.view(num_kv_heads, -1)
    attended = weighted(folded, keys, values, group.padding, sight, sinks)
    return attended.view(num_rows, num_heads, head_dim)


def weighted(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, sight: Sight, sinks: Tensor | None
) -> Tensor:
    """Return the values weighted by attention: [..., queries, value_dim].

    Args:
        query: [..., queries, head_dim].
        keys, values: [..., context, head_dim] and [..., context, value_dim].
        hidden: [..., queries or 1, context] bool, True where a query does not see a position.
        sinks: the sink of each query's head, to be broadcast to [..., queries]; None: there are none.
    """
    scores = torch.matmul(query * sight.scale, keys.transpose(-2, -1)).float()
    if sight.soft_cap:
        scores = scores.div_(sight.soft_cap).tanh_().mul_(sight.soft_cap)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink_scores = sinks.float()[..., None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink_scores), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(query.dtype), values)


def _prefill(query: Tensor, kv: LayerKV, row: PrefillRow, sight: Sight) -> Tensor:
    """Return the attention output of one row, [num_tokens, num_heads, head_dim] like `query`."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv.key.shape[1]
    group_size = num_heads // num_kv_heads
    # KV heads are the batch dimension. The query heads of one KV head share its keys, by a stride of 0.
    folded = query.view(num_tokens, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group_size, len(row.slots), head_dim)
    head_rows = _places(row.slots, num_kv_heads)
    keys = _gather(kv.key, head_rows)[:, None].expand(shared)
    values = _gather(kv.value, head_rows)[:, None].expand(shared)
    if sight.soft_cap or sight.sinks is not None:  # torch's own attention knows neither
        sinks = None if sight.sinks is None else sight.sinks.view(num_kv_heads, group_size, 1)
        attended = weighted(folded, keys, values, ~row.sight(), sight, sinks)
    else:
        attended = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=row.visible, is_causal=row.visible is None, scale=sight.scale
        )
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _places(slots: Tensor, num_kv_heads: int) -> Tensor:
    """Return where each head of each slot is in storage seen as [-1, head_dim]: [..., num_kv_heads, context].

    Args:
        slots: [..., context].
    """
    heads = torch.arange(num_kv_heads, device=slots.device)[:, None]
    return slots[..., None, :] * num_kv_heads + heads


def _gather(storage: Tensor, head_rows: Tensor) -> Tensor:
    """Return [..., num_kv_heads, context, head_dim], each head's context contiguous, as matmul wants it."""
    head_dim = storage.shape[-1]
    return storage.view(-1, head_dim).index_select(0, head_rows.view(-1)).view(*head_rows.shape, head_dim)
