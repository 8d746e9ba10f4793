"""The interface between the model and the code that computes attention.

`attention.cpu_paged` and `attention.cpu_latent` run our kernels; `attention.torch_paged` and
`attention.latent_paged` run torch, on any device. The two latent ones are for models that keep one latent
vector of a token in place of keys and values. A backend holds no state of a request or a step. It alone
decides how keys and values lie in memory, since only it and its block codec read them.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from penstock.attention.block_codec import BlockCodec
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.kernels.cpu.ops import Sight


class AttentionBackend(Protocol):
    """The interface of attention in one layer: rotation, and causal attention over paged keys and values."""

    def attend(
        self, qkv: Tensor, angles: Any, kv: AnyKV, metadata: AttentionMetadata, sight: Sight
    ) -> Tensor:
        """Rotate, store the step's keys and values, then attend.

        Args:
            qkv: [num_tokens, (num_heads + 2 num_kv_heads) head_dim], not rotated; may be overwritten.
            angles: rotations at the step's positions, from `layers.rope`.
            kv: the layer's storage, written at `metadata.slot_mapping` and read at the slots of each row's
                context.
            metadata: the rows of the step.
            sight: how the layer's queries see keys: scale, cap, window and sinks.

        Returns:
            [num_tokens, num_heads * head_dim] in the dtype of `qkv`.
        """
        ...

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that the keys and values of a block take in one layer."""
        ...

    def layer_kv(self, memory: Tensor) -> AnyKV:
        """Return a layer's zeroed memory, uint8 [num_blocks * block_bytes], as keys and values."""
        ...

    def block_codec(self, block_size: int) -> BlockCodec:
        """Return the codec that copies blocks out of the storage of layers and back."""
        ...
