"""The self-attention of a layer that keeps latent vectors (arXiv 2405.04434, section 2.1).

Built by `models.decoder_layer` in place of `models.attention`.

Keys and values of the heads are never made. Let u be the projection from a latent vector c to a head's key, w
the one to its value, q a query and p the attention's weights. Then q (u c) = (q u) c, and sum(p (w c)) =
w sum(p c). So queries are projected to the width of c, all heads attend to c itself, and their results are
projected to the width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.attention.backend import AttentionBackend
from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.distributed.share import Share
from penstock.families.latent_spec import LatentSpec
from penstock.families.sharding import HeadShares
from penstock.families.spec import ModelSpec
from penstock.layers.compute import Compute
from penstock.layers.head_matrices import HeadMatrices
from penstock.layers.linear import FusedLinear, Linear
from penstock.layers.norm import RMSNorm
from penstock.models.attention import Angles, LayerSite, sight_of


class LatentExpansion(nn.Module):
    """The projections from latent vectors to keys and values, of this rank's heads.

    Their weight is never quantised, because it is multiplied from both sides, head by head.
    """

    def __init__(self, latent: LatentSpec, heads: Share, compute: Compute) -> None:
        super().__init__()
        self._share = heads.scaled(latent.plain_dim + latent.value_dim)
        self._sizes, self._rank = [latent.plain_dim, latent.value_dim], latent.rank
        kernels = compute.kernels_for("linear")
        self.weight: nn.Parameter | HeadMatrices = (
            compute.parameter(self._share.size, latent.rank)
            if kernels is None
            else HeadMatrices(
                heads.size, latent.plain_dim, latent.value_dim, latent.rank, compute.dtype, kernels
            )
        )

    def absorb(self, query: Tensor) -> Tensor:
        """Project queries: [num_tokens, num_heads, plain_dim] -> [num_tokens, num_heads, rank]."""
        if isinstance(self.weight, HeadMatrices):
            return self.weight.absorb(query)
        to_key, _ = self._heads(self.weight)
        return torch.bmm(query.transpose(0, 1), to_key).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """Project results: [num_tokens, num_heads * rank] -> [num_tokens, num_heads * value_dim]."""
        heads = attended.view(len(attended), attended.shape[1] // self._rank, self._rank)
        if isinstance(self.weight, HeadMatrices):
            return self.weight.values(heads).flatten(1)
        _, to_value = self._heads(self.weight)
        return torch.bmm(heads.transpose(0, 1), to_value.transpose(1, 2)).transpose(0, 1).flatten(1)

    def shares(self, part: str, rows: int) -> tuple[Share, Share | None]:
        """Return which rows of the checkpoint's tensor the weight is."""
        return self._share, None

    def _heads(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return views [num_heads, plain_dim, rank] and [num_heads, value_dim, rank]."""
        return torch.split(weight.view(-1, sum(self._sizes), self._rank), self._sizes, dim=1)


class LatentAttention(nn.Module):
    """The attention of this rank's heads; each rank has the projections to latent vectors whole."""

    def __init__(self, spec: ModelSpec, backend: AttentionBackend, compute: Compute, site: LayerSite) -> None:
        super().__init__()
        assert spec.latent is not None
        latent, parent = spec.latent, f"{site.name}.self_attn"
        heads = HeadShares.of(spec, compute.group).queries
        if latent.query_rank:
            self.q_a_proj = _whole(spec, latent.query_rank, compute, f"{parent}.q_a_proj")
            self.q_a_layernorm = _norm(latent.query_rank, latent.eps, compute)
        name, in_size = ("q_b_proj", latent.query_rank) if latent.query_rank else ("q_proj", spec.hidden_size)
        queries = {name: heads.scaled(latent.head_dim)}
        self.query_proj = FusedLinear(in_size, queries, bias=False, compute=compute, parent=parent)
        self.kv_a_proj_with_mqa = _whole(spec, latent.width, compute, f"{parent}.kv_a_proj_with_mqa")
        self.kv_a_layernorm = _norm(latent.rank, latent.eps, compute)
        self.kv_b_proj = LatentExpansion(latent, heads, compute)
        self.o_proj = Linear(
            heads.scaled(latent.value_dim),
            spec.hidden_size,
            bias=spec.o_bias,
            compute=compute,
            parts={f"{parent}.o_proj": spec.hidden_size},
        )
        self.backend = backend
        self._num_heads, self._latent, self._sight = heads.size, latent, sight_of(spec, site.layer)

    def forward(
        self, hidden_states: Tensor, angles: Angles, kv: AnyKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend: [num_tokens, hidden_size] -> the same, summed over the ranks.

        Args:
            angles: from `Rotation.angles`, at the step's positions.
            kv: this layer's storage; the step's latent keys are written to it.
        """
        queries_and_key = torch.cat((self._queries(hidden_states), self._key(hidden_states)), dim=-1)
        attended = self.backend.attend(queries_and_key, angles[0], kv, metadata, self._sight)
        output: Tensor = self.o_proj(self.kv_b_proj.values(attended))
        return output

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries, [num_tokens, num_heads * width], not rotated."""
        if self._latent.query_rank:
            x = self.q_a_layernorm(self.q_a_proj(x))
        heads = self.query_proj(x).view(len(x), self._num_heads, self._latent.head_dim)
        plain, rotary = heads.split([self._latent.plain_dim, self._latent.rotary_dim], dim=-1)
        return torch.cat((self.kv_b_proj.absorb(plain), rotary), dim=-1).flatten(1)

    def _key(self, x: Tensor) -> Tensor:
        """Return the latent keys, [num_tokens, width], before rotation."""
        projected, rank = self.kv_a_proj_with_mqa(x), self._latent.rank
        return torch.cat((self.kv_a_layernorm(projected[:, :rank]), projected[:, rank:]), dim=-1)


def _whole(spec: ModelSpec, out_size: int, compute: Compute, name: str) -> Linear:
    """Return a projection of the hidden states that every rank has whole."""
    parts = {name: out_size}
    return Linear(Share.all(spec.hidden_size), out_size, bias=spec.qkv_bias, compute=compute, parts=parts)


def _norm(size: int, eps: float, compute: Compute) -> RMSNorm:
    return RMSNorm(Share.all(size), eps, compute=compute, kind="plain")
