"""A layer of a decoder: attention and MLP or experts, with norms around them. Built by `models.decoder`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.distributed.share import Share, even_share
from penstock.families.spec import ModelSpec
from penstock.layers.compute import Compute
from penstock.layers.experts import RoutedExperts
from penstock.layers.linear import GatedLinear, Linear
from penstock.layers.norm import Add, AddRMSNorm, RMSNorm
from penstock.layers.scale import scale_by
from penstock.models.attention import Angles, Attention, LayerSite
from penstock.models.latent_attention import LatentAttention

# The names that checkpoints give to the norms before attention, after it, before the MLP, and after it; ""
# where there is no norm.
_NORM_NAMES = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class GatedMLP(nn.Module):
    """The MLP down(activation(gate(x)) * up(x)), with this rank's columns of the middle."""

    def __init__(self, spec: ModelSpec, compute: Compute, parent: str) -> None:
        super().__init__()
        group, bias = compute.group, spec.mlp_bias
        inner = even_share(spec.intermediate_size, group.rank, group.size)
        self.gate_up_proj = GatedLinear(
            spec.hidden_size,
            inner,
            bias=bias,
            compute=compute,
            parent=parent,
            stored_as="" if spec.stored_together == "nothing" else "gate_up_proj",
            activation=spec.activation,
        )
        self.down_proj = Linear(
            inner,
            spec.hidden_size,
            bias=bias,
            compute=compute,
            parts={f"{parent}.down_proj": spec.hidden_size},
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the MLP: [num_tokens, hidden_size] -> the same, summed over the ranks."""
        output: Tensor = self.down_proj(self.gate_up_proj(hidden_states))
        return output


class DecoderLayer(nn.Module):
    """A layer: attention and MLP or experts, with norms before, after or around each.

    The output of attention or MLP, the branch, is not added to the residual stream at once. Both are passed
    on, and the norm that comes next adds them [A11].
    """

    def __init__(self, spec: ModelSpec, backend: AttentionBackend, compute: Compute, site: LayerSite) -> None:
        super().__init__()
        # Tuples for `forward`; norms are also registered by their names in the checkpoint.
        self._before = _before(spec, compute), _before(spec, compute)
        self._after = _after(spec, compute), _after(spec, compute)
        around = self._before[0], self._after[0], self._before[1], self._after[1]
        for name, norm in zip(spec.norm_names or _NORM_NAMES[spec.norm_places], around, strict=True):
            if isinstance(norm, nn.Module):
                self.add_module(name, norm)
        attention = Attention if spec.latent is None else LatentAttention
        self.self_attn = attention(spec, backend, compute, site)
        experts = spec.experts_of(site.layer)
        self._mlp_name = "mlp" if experts is None else experts.names.block
        block = f"{site.name}.{self._mlp_name}"
        if experts is None:
            self.mlp = GatedMLP(spec, compute, block)
        else:
            self.add_module(self._mlp_name, RoutedExperts(experts, spec.hidden_size, compute, block))

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        angles: Angles,
        kv: AnyKV,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; return its branch, which is not added yet, and the residual stream.

        Args:
            hidden_states: [num_tokens, hidden_size], the branch of the layer before.
            residual: [num_tokens, hidden_size], the stream to which it is added; may be overwritten.
            angles: from `Rotation.angles`, at the step's positions.
            kv: this layer's storage.

        Returns:
            Two [num_tokens, hidden_size].
        """
        before_attention, before_mlp = self._before
        after_attention, after_mlp = self._after
        hidden_states, residual = before_attention(hidden_states, residual)
        hidden_states = after_attention(self.self_attn(hidden_states, angles, kv, metadata))
        hidden_states, residual = before_mlp(hidden_states, residual)
        return after_mlp(getattr(self, self._mlp_name)(hidden_states)), residual


def _before(spec: ModelSpec, compute: Compute) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function that adds the branch to the stream, and makes the input of attention or MLP."""
    if spec.norm_places == "after":
        return Add(compute=compute)
    return AddRMSNorm(spec.hidden_size, spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)


def _after(spec: ModelSpec, compute: Compute) -> Callable[[Tensor], Tensor]:
    """Return a function that changes the output of attention or MLP before it is added to the stream."""
    if spec.norm_places == "before":
        return scale_by(spec.residual_multiplier, compute)
    assert spec.residual_multiplier == 1.0, "no family has both"
    return RMSNorm(Share.all(spec.hidden_size), spec.rms_norm_eps, compute=compute, kind=spec.norm_kind)
