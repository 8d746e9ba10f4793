"""The self-attention of a layer, in every variant of a `ModelSpec` except latent attention.

Built by `models.decoder_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.distributed.share import Share
from penstock.families.sharding import HeadShares
from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.ops import Sight
from penstock.layers.compute import Compute
from penstock.layers.linear import FusedLinear, Linear
from penstock.layers.norm import HeadNorms, RMSNorm, SharedHeadNorms
from penstock.layers.rope import RotaryAngles, RotaryEmbedding
from penstock.layers.scale import unchanged

Angles = Sequence[RotaryAngles | Tensor]  # of each of `ModelSpec.ropes`


@dataclass(frozen=True, slots=True)
class LayerSite:
    """The place of a layer: its number, and its name in the checkpoint."""

    layer: int
    name: str


class Attention(nn.Module):
    """The self-attention of one layer, for this rank's heads."""

    def __init__(self, spec: ModelSpec, backend: AttentionBackend, compute: Compute, site: LayerSite) -> None:
        super().__init__()
        heads, parent = HeadShares.of(spec, compute.group), f"{site.name}.self_attn"
        queries, keys = heads.queries.scaled(spec.head_dim), heads.keys.scaled(spec.head_dim)
        self.qkv_proj = FusedLinear(
            spec.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=spec.qkv_bias,
            compute=compute,
            parent=parent,
            stored_as="qkv_proj" if spec.stored_together == "all" else "",
        )
        if spec.qk_norm != "none":
            self.q_norm, self.k_norm = (_head_norm(spec, rows, compute) for rows in (queries, keys))
        self.o_proj = Linear(
            queries,
            spec.hidden_size,
            bias=spec.o_bias,
            compute=compute,
            parts={f"{parent}.o_proj": spec.hidden_size},
        )
        self.backend = backend
        self._norm_heads = self._head_norms(spec, (queries.size, keys.size), compute)
        self._sight = sight_of(spec, site.layer)
        self._rope = spec.rope_index(site.layer)

    def forward(
        self, hidden_states: Tensor, angles: Angles, kv: AnyKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend: [num_tokens, hidden_size] -> the same, summed over the ranks.

        Args:
            angles: from `Rotation.angles`, at the step's positions.
            kv: this layer's storage; the step's keys and values are written to it.
        """
        qkv = self._norm_heads(self.qkv_proj(hidden_states))
        attended = self.backend.attend(qkv, angles[self._rope], kv, metadata, self._sight)
        output: Tensor = self.o_proj(attended)
        return output

    def _head_norms(
        self, spec: ModelSpec, sizes: tuple[int, int], compute: Compute
    ) -> Callable[[Tensor], Tensor]:
        if spec.qk_norm == "none":
            return unchanged
        is_shared = spec.qk_norm == "all_heads" and compute.group.size > 1
        norms = SharedHeadNorms if is_shared else HeadNorms
        return norms(self.q_norm, self.k_norm, sizes, compute=compute)


def _head_norm(spec: ModelSpec, rows: Share, compute: Compute) -> RMSNorm:
    share = rows if spec.qk_norm == "all_heads" else Share.all(spec.head_dim)
    return RMSNorm(share, spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)


def sight_of(spec: ModelSpec, layer: int) -> Sight:
    """Return the scale, the soft cap and the window of a layer's attention scores."""
    return Sight(
        scale=spec.attention_scale or spec.head_dim**-0.5,
        soft_cap=spec.attention_soft_cap,
        window=spec.window(layer),
    )


class Rotation:
    """The rotary embeddings of a model's layers: one, or more where layers differ."""

    def __init__(self, spec: ModelSpec, compute: Compute) -> None:
        head_dim = spec.head_dim
        if spec.latent is not None:  # latent attention takes angles that torch has computed
            head_dim, compute = spec.latent.rotary_dim, replace(compute, kernels=None)
        self._embeddings = [RotaryEmbedding(rope, head_dim, compute=compute) for rope in spec.ropes]

    def angles(self, positions: Tensor) -> Angles:
        """Return the angles at positions ([num_tokens] int64), for each of `ModelSpec.ropes`."""
        return [embedding.angles(positions) for embedding in self._embeddings]
