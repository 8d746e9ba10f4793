"""The rotary position embedding: frequencies from a `RopeSpec`, angles from positions, rotation of heads.

The angles of a step are worked out once and shared by all its layers; no table over the whole context is
kept. Formulas: RoPE arXiv 2104.09864, halves rotated as in transformers; linear arXiv 2306.15595; yarn arXiv
2309.00071; longrope arXiv 2402.13753; llama3 as in Meta's release of Llama 3.1. They are evaluated in float32
in the order that transformers uses, because a last-bit difference of a frequency grows with the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.families.rope_spec import RopeSpec
from penstock.layers.compute import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryAngles:
    """The cosines and sines of a step's positions, laid out for rotating halves."""

    cos: Tensor  # [num_tokens, 1, rotary_dim]
    sin: Tensor  # [num_tokens, 1, rotary_dim], first half negated
    interleaved: bool = False

    def rotate_both(self, heads: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
        """Rotate heads of queries and, behind them, of keys: [num_tokens, num_heads, head_dim]."""
        rotated = self.rotate(heads)
        return rotated[:, :num_queries], rotated[:, num_queries:]

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate each pair (i, i + rotary_dim / 2) of [num_tokens, num_heads, head_dim] by its angle.

        Interleaved heads have pairs (2 i, 2 i + 1). The result has the first numbers of all pairs, then the
        second ones: the order does not matter, as long as queries and keys have the same.
        """
        rotary_dim = self.cos.shape[-1]
        if rotary_dim < heads.shape[-1]:
            rotated = self.rotate(heads[..., :rotary_dim])
            return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
        if self.interleaved:
            heads = heads.reshape(*heads.shape[:-1], rotary_dim // 2, 2).transpose(-1, -2).flatten(-2)
        wide, half = heads.to(self.cos.dtype), rotary_dim // 2
        swapped = torch.cat((wide[..., half:], wide[..., :half]), dim=-1)
        return (wide * self.cos).add_(swapped.mul_(self.sin)).to(heads.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingAngles(RotaryAngles):
    """The angles for models that also multiply queries by a factor which grows with the position."""

    growth: Tensor  # [num_tokens, 1, 1] float32

    def rotate_both(self, heads: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
        query, key = RotaryAngles.rotate_both(self, heads, num_queries)
        return (query * self.growth).to(query.dtype), key


class RotaryEmbedding:
    """The angles for any position; holds [rotary_dim / 2] frequencies and no parameters."""

    def __init__(self, rope: RopeSpec, head_dim: int, *, compute: Compute) -> None:
        self._rotary_dim = rope.rotary_dim(head_dim)
        frequencies = inverse_frequencies(rope, self._rotary_dim)
        self._frequencies = frequencies.to(compute.device)  # [rotary_dim / 2] float32
        self._attention_factor = rope.attention_factor
        self._dtype = compute.dtype if rope.rounds_angles else torch.float32
        self._interleaved = rope.interleaved
        self._growth = rope.query_growth, rope.original_max_position_embeddings
        self._kernels = compute.kernels_for("attention")

    def angles(self, positions: Tensor) -> RotaryAngles | Tensor:
        """Return the angles at positions ([num_tokens] int64), computed in float32 and rounded at most once.

        For our attention kernels they are a tensor [num_tokens, rotary_dim] float32 of cosines and sines,
        with one column more if a factor of queries grows with the position.
        """
        if self._kernels is not None:
            factor = self._attention_factor
            return self._kernels.rope_angles(
                positions, self._frequencies, factor, self._rotary_dim, self._dtype, self._growth
            )
        turns = positions[:, None].float() * self._frequencies
        cos = (turns.cos() * self._attention_factor).to(self._dtype)
        sin = (turns.sin() * self._attention_factor).to(self._dtype)
        cos = torch.cat((cos, cos), dim=-1)[:, None]
        sin = torch.cat((-sin, sin), dim=-1)[:, None]
        beta, start = self._growth
        if not beta:
            return RotaryAngles(cos=cos, sin=sin, interleaved=self._interleaved)
        growth = (1 + beta * torch.log(1 + torch.floor(positions / start)))[:, None, None]
        return GrowingAngles(cos=cos, sin=sin, interleaved=self._interleaved, growth=growth)


def inverse_frequencies(rope: RopeSpec, rotary_dim: int) -> Tensor:
    """Return the radians per position for each pair of dimensions: [rotary_dim / 2] float32."""
    if rope.kind == "none":
        return torch.zeros(rotary_dim // 2)
    wavelengths = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    match rope.kind:
        case "linear":
            return 1.0 / wavelengths / rope.factor
        case "llama3":
            return _llama3(rope, 1.0 / wavelengths)
        case "yarn":
            return _yarn(rope, wavelengths, rotary_dim)
        case "longrope":
            return 1.0 / (torch.tensor(rope.short_factors) * wavelengths)
    return 1.0 / wavelengths


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Keep frequencies that turn often over the original context; divide those that turn seldom by a factor.

    Frequencies in between are blended.
    """
    context = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    seldom = wavelengths > context / rope.low_freq_factor
    often = wavelengths < context / rope.high_freq_factor
    weight = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - weight) * frequencies / rope.factor + weight * frequencies
    stretched = torch.where(seldom, frequencies / rope.factor, frequencies)
    return torch.where(~often & ~seldom, blended, stretched)


def _yarn(rope: RopeSpec, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Do as `_llama3`, with a ramp over the dimensions instead of over the wavelengths."""
    low = _dimension_that_turns(rope, rope.beta_fast, head_dim)
    high = _dimension_that_turns(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((dimensions - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def _dimension_that_turns(rope: RopeSpec, num_turns: float, head_dim: int) -> float:
    """Return the index of the pair that turns `num_turns` times over the original context."""
    context = rope.original_max_position_embeddings
    return head_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))
