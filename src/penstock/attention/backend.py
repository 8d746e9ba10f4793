"""The seam between the model and whoever computes attention.

One implementation so far: `attention.torch_paged`. A backend holds no state of a request or a step.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.attention.metadata import AttentionMetadata, LayerKV


class AttentionBackend(Protocol):
    """Causal attention over the paged KV of one layer."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Store the step's keys and values, then attend.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            key, value: [num_tokens, num_kv_heads, head_dim], the key rotated.
            kv: written at `metadata.slot_mapping`, read at the slots of each row's context.

        Returns:
            [num_tokens, num_heads, head_dim] in the dtype of `query`.
        """
        ...
