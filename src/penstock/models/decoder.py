"""The decoder: a for-loop over its own range of layers.

Built by `executor.rank` from a `ModelSpec` and a layer range, filled by `weights.loader`. Parts outside
the range are `MissingLayer`s, so that names of parameters are those of the checkpoint on every stage. Knows
nothing of ranks, links or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AttentionMetadata, LayerKV
from penstock.layers.activation import silu_and_multiply
from penstock.layers.embedding import OutputHead, VocabEmbedding
from penstock.layers.linear import FusedLinear, Linear
from penstock.layers.missing import MissingLayer
from penstock.layers.norm import AddRMSNorm
from penstock.layers.rope import RotaryAngles, RotaryEmbedding
from penstock.models.intermediate import IntermediateTensors, make_empty_intermediate_tensors_factory
from penstock.models.spec import ModelSpec


class Attention(nn.Module):
    """Self-attention of one layer."""

    def __init__(
        self, spec: ModelSpec, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        out_sizes = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        self.qkv_proj = FusedLinear(
            spec.hidden_size, out_sizes, bias=spec.qkv_bias, dtype=dtype, device=device
        )
        self.o_proj = Linear(spec.query_size, spec.hidden_size, bias=spec.o_bias, dtype=dtype, device=device)
        self.head_shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.backend = backend

    def forward(
        self, hidden_states: Tensor, angles: RotaryAngles, kv: LayerKV, metadata: AttentionMetadata
    ) -> Tensor:
        num_heads, num_kv_heads, head_dim = self.head_shape
        heads = self.qkv_proj(hidden_states).view(len(hidden_states), num_heads + 2 * num_kv_heads, head_dim)
        rotated, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        query, key = torch.split(angles.rotate(rotated), [num_heads, num_kv_heads], dim=1)
        attended = self.backend.forward(query, key, value, kv, metadata)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inner, bias = spec.intermediate_size, spec.mlp_bias
        out_sizes = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = FusedLinear(spec.hidden_size, out_sizes, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, spec.hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.split(self.gate_up_proj(hidden_states))
        output: Tensor = self.down_proj(silu_and_multiply(gate, up))
        return output


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP. The residual stream travels beside the branch (row A11)."""

    def __init__(
        self, spec: ModelSpec, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        eps = spec.rms_norm_eps
        self.input_layernorm = AddRMSNorm(spec.hidden_size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(spec, backend, dtype=dtype, device=device)
        self.post_attention_layernorm = AddRMSNorm(spec.hidden_size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(spec, dtype=dtype, device=device)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        angles: RotaryAngles,
        kv: LayerKV,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, angles, kv, metadata)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Backbone(nn.Module):
    """Everything but the output head; its name in checkpoints is `model`."""

    def __init__(
        self,
        spec: ModelSpec,
        start_layer: int,
        end_layer: int,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        is_first, is_last = start_layer == 0, end_layer == spec.num_layers
        self.embed_tokens: VocabEmbedding | MissingLayer = MissingLayer()
        if is_first or (is_last and spec.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, backend, dtype=dtype, device=device)
            if start_layer <= index < end_layer
            else MissingLayer()
            for index in range(spec.num_layers)
        )
        self.norm: AddRMSNorm | MissingLayer = MissingLayer()
        if is_last:
            self.norm = AddRMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype, device=device)


class Decoder(nn.Module):
    """The layers `[start, end)` of a model, with the embedding and the head where they belong (rows A4, A6).

    A stage calls `embed` (first stage only), `forward`, and `compute_logits` (last stage only).

    Args:
        layer_range: `(start, end)` or a `range`.
        dtype, device: of weights and computation.
        attention: shared by all layers.
    """

    supports_pp: ClassVar[Literal[True]] = True

    def __init__(
        self,
        spec: ModelSpec,
        layer_range: range | tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        attention: AttentionBackend,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.start_layer, self.end_layer = _bounds(layer_range)
        assert 0 <= self.start_layer < self.end_layer <= spec.num_layers, layer_range
        self.model = Backbone(spec, self.start_layer, self.end_layer, attention, dtype=dtype, device=device)
        self.lm_head: OutputHead | MissingLayer = MissingLayer()
        if self.end_layer == spec.num_layers and not spec.tie_word_embeddings:
            self.lm_head = OutputHead(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.rope = RotaryEmbedding(spec.rope, spec.head_dim, dtype=dtype, device=device)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            spec.hidden_size, dtype=dtype, device=device
        )

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the model, placeholders outside the own range."""
        return self.model.layers

    def embed(self, input_ids: Tensor) -> IntermediateTensors:
        """[num_tokens] int64 -> what the first layer takes; the residual stream starts at zero."""
        vectors = self.model.embed_tokens(input_ids)
        return IntermediateTensors({"hidden_states": vectors, "residual": torch.zeros_like(vectors)})

    def forward(
        self,
        tensors: IntermediateTensors,
        positions: Tensor,
        kv: Sequence[LayerKV],
        metadata: AttentionMetadata,
    ) -> IntermediateTensors:
        """Run the own layers.

        Args:
            tensors: from `embed` or from the stage before; not changed.
            positions: [num_tokens] int64.
            kv: storage of the own layers, in order.
        """
        hidden_states, residual = tensors["hidden_states"], tensors["residual"]
        angles = self.rope.angles(positions)
        own_layers = islice(self.layers, self.start_layer, self.end_layer)
        for layer, layer_kv in zip(own_layers, kv, strict=True):
            hidden_states, residual = layer(hidden_states, residual, angles, layer_kv, metadata)
        return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

    def compute_logits(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        """Logits after the tokens `indices` ([num_rows] int64) of a step: [num_rows, vocab] float32."""
        hidden_states, residual = (
            tensors[name].index_select(0, indices) for name in ("hidden_states", "residual")
        )
        hidden_states, _ = self.model.norm(hidden_states, residual)
        return self._head.logits(hidden_states).float()

    @property
    def _head(self) -> OutputHead | VocabEmbedding:
        head = self.model.embed_tokens if isinstance(self.lm_head, MissingLayer) else self.lm_head
        assert not isinstance(head, MissingLayer), "only the last stage computes logits"
        return head


def _bounds(layer_range: range | tuple[int, int]) -> tuple[int, int]:
    if isinstance(layer_range, range):
        assert layer_range.step == 1, layer_range
        return layer_range.start, layer_range.stop
    return layer_range
