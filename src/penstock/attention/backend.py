"""The seam between the model and the code that computes attention.

`attention.cpu_paged` is by our kernels, `attention.torch_paged` everywhere else; `attention.latent_paged` is
for models that keep one latent vector of a token in place of keys and values. A backend holds no state of a
request or a step. It alone decides how keys and values lie in memory, for only it reads them.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from penstock.attention.block_codec import BlockCodec
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.kernels.cpu.ops import Sight


class AttentionBackend(Protocol):
    """The seam to an implementation of attention: rotation, and causal attention over paged KV of a layer."""

    def attend(
        self, qkv: Tensor, angles: Any, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        """Rotate, store the step's keys and values, then attend.

        Args:
            qkv: [num_tokens, (num_heads + 2 num_kv_heads) head_dim], not rotated; may be overwritten.
            angles: rotations at the step's positions, from `layers.rope`.
            kv: written at `metadata.slot_mapping`, read at the slots of each row's context.
            sight: that of the layer, sinks included.

        Returns:
            [num_tokens, num_heads * head_dim] in the dtype of `qkv`.
        """
        ...

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of one layer, keys and values."""
        ...

    def layer_kv(self, memory: Tensor) -> AnyKV:
        """Return a layer's zeroed memory, uint8 [num_blocks * block_bytes], as keys and values."""
        ...

    def block_codec(self, block_size: int) -> BlockCodec:
        """Return the codec that copies blocks of a layer out of this memory and back."""
        ...
