"""Parameters of a rotary position embedding. Apart from `layers.rope` because it must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, with every default filled in. `layers.rope` holds the formulas.

    Attributes:
        kind: which formula turns `theta` into frequencies; "none": all of them are 0, and nothing is rotated.
        theta: base of the wavelengths.
        factor: how many times as long the stretched context is (linear, llama3, yarn).
        original_max_position_embeddings: context of the pre-training (llama3, yarn, growth).
        low_freq_factor, high_freq_factor: bounds of llama3's blend, in turns over the original context.
        beta_fast, beta_slow: bounds of yarn's ramp, in turns over the original context.
        truncate: round yarn's bounds to whole dimensions.
        attention_factor: cosines and sines are multiplied by it (yarn, longrope).
        short_factors: for each pair of dimensions, the factor of its wavelength (longrope).
        rotary_fraction: share of a head's dimensions that is rotated; these are the first ones.
        rounds_angles: cosines and sines are rounded to the dtype of the computation.
        interleaved: the dimensions of a pair are neighbours; else half of the rotated dimensions lie between
            them.
        query_growth: queries are multiplied by 1 + query_growth * ln(1 + floor(position / original context)).
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    rotary_fraction: float = 1.0
    rounds_angles: bool = True
    interleaved: bool = False
    query_growth: float = 0.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(head_dim * self.rotary_fraction)


NO_ROTATION = RopeSpec(kind="none")
