"""The paged attention over latent vectors in plain torch, for CPUs and GPUs (arXiv 2405.04434, 2.1.2).

The projections from a latent vector to keys and values are applied to queries and results instead
(`models.latent_attention`). All query heads then look at one key, and the value is the front of that key:

    query [rank | rotary]      key [latent: rank | rotary]      value = latent

So `LatentSpec.width` numbers of a token are kept in each layer, however many heads there are. Each rank of a
stage keeps all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.attention.block_codec import SlotCodec
from penstock.attention.metadata import AnyKV, AttentionMetadata, DecodeGroup, LatentKV, PrefillRow
from penstock.attention.torch_paged import weighted
from penstock.families.latent_spec import LatentSpec
from penstock.kernels.cpu.ops import Sight

# The most scores that are computed together, unless one token has more: bounds the temporary memory of long
# prompts.
MAX_SCORES = 1 << 24


class LatentPagedAttention:
    """Implements `attention.backend.AttentionBackend`. Keys lie slot by slot; values are parts of keys."""

    def __init__(self, num_heads: int, latent: LatentSpec, dtype: torch.dtype) -> None:
        self._num_heads, self._latent, self._dtype = num_heads, latent, dtype

    def attend(
        self, qkv: Tensor, angles: Any, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        """Attend as the protocol says, but over one key for all heads.

        `qkv` has queries and one key, each [rank | rotary]: [num_tokens, (num_heads + 1) width]; the result
        is [num_tokens, num_heads * rank].
        """
        assert isinstance(kv, LatentKV)
        query = self._store(qkv, angles, kv, metadata)[:, :-1]
        output = torch.empty(*query.shape[:-1], self._latent.rank, dtype=qkv.dtype, device=qkv.device)
        reads = metadata.reads(sight.window)
        for group in reads.decode_groups:
            rows = slice(group.start, group.end)
            output[rows] = self._decode(query[rows], kv, group, sight)
        for row in reads.prefill_rows:
            self._prefill(query[row.start : row.end], kv, row, sight, output[row.start : row.end])
        return output.flatten(1)

    def block_bytes(self, block_size: int) -> int:
        return block_size * self._latent.width * self._dtype.itemsize

    def layer_kv(self, memory: Tensor) -> LatentKV:
        return LatentKV(latent=memory.view(self._dtype).view(-1, self._latent.width))

    def block_codec(self, block_size: int) -> SlotCodec:
        width = self._latent.width
        return SlotCodec(num_heads=1, num_parts=1, width=width, dtype=self._dtype, block_size=block_size)

    def _store(self, qkv: Tensor, angles: Any, kv: LatentKV, metadata: AttentionMetadata) -> Tensor:
        """Rotate queries and key of `qkv` in place, store the key, and return both, head by head.

        Returns:
            [num_tokens, num_heads + 1, width], of which the last head is the key.
        """
        heads = qkv.view(len(qkv), self._num_heads + 1, self._latent.width)
        rotary = heads[..., self._latent.rank :]
        rotary.copy_(angles.rotate(rotary))
        kv.latent.index_copy_(0, metadata.slot_mapping, heads[:, -1])
        return heads

    def _decode(self, query: Tensor, kv: LatentKV, group: DecodeGroup, sight: Sight) -> Tensor:
        """Attend with one token a row: [num_rows, num_heads, width] -> [num_rows, num_heads, rank]."""
        slots = group.slots
        keys = kv.latent.index_select(0, slots.view(-1)).view(*slots.shape, self._latent.width)
        values = keys[..., : self._latent.rank]
        return weighted(query, keys, values, group.padding.squeeze(1), sight, sight.sinks)

    def _prefill(self, query: Tensor, kv: LatentKV, row: PrefillRow, sight: Sight, output: Tensor) -> None:
        """Attend with the tokens of one row, and write the result to `output`.

        Args:
            query: [num_tokens, num_heads, width].
            output: [num_tokens, num_heads, rank].
        """
        keys = kv.latent.index_select(0, row.slots)
        values, hidden = keys[:, : self._latent.rank], ~row.sight()[:, None]
        for piece in self._pieces(len(query), len(keys)):
            output[piece] = weighted(query[piece], keys, values, hidden[piece], sight, sight.sinks)

    def _pieces(self, num_tokens: int, context: int) -> Iterator[slice]:
        """Yield slices of the tokens of a row that are computed together."""
        step = max(1, MAX_SCORES // (self._num_heads * context))
        return (slice(first, first + step) for first in range(0, num_tokens, step))
