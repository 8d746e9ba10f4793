"""Reads the rotary embedding of a model from its configuration, in the old form and the new one.

Old: `rope_theta` beside an optional `rope_scaling` object. New (transformers 5): everything in
`rope_parameters`. Called by the family modules; `layers.rope` turns the result into frequencies.
"""

from __future__ import annotations

import math

from penstock.layers.rope_spec import RopeSpec
from penstock.models.config_fields import ConfigFields

_KINDS = ("default", "linear", "llama3", "yarn")
_MAX_FACTOR = 65_536.0
MAX_POSITIONS = 1 << 27


def read_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    """The `RopeSpec` of a configuration whose `max_position_embeddings` is `max_positions`."""
    name = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    scaling = config.section(name)
    kind = scaling.choice("rope_type" if scaling.has("rope_type") else "type", _KINDS, "default")
    _refuse_partial_rotation(config)
    _refuse_partial_rotation(scaling)
    theta = (scaling if scaling.has("rope_theta") else config).number("rope_theta", 1.0, 1e12, 10_000.0)
    match kind:
        case "linear":
            return RopeSpec(kind="linear", theta=theta, factor=scaling.number("factor", 1.0, _MAX_FACTOR))
        case "llama3":
            return _llama3(scaling, theta, _original_positions(config, scaling, max_positions))
        case "yarn":
            return _yarn(scaling, theta, _original_positions(config, scaling, max_positions), max_positions)
    return RopeSpec(theta=theta)


def stretched_positions(rope: RopeSpec, max_positions: int) -> int:
    """Longest sequence: yarn checkpoints may state the length before stretching."""
    if rope.kind != "yarn":
        return max_positions
    stretched = int(rope.original_max_position_embeddings * rope.factor)
    return min(max(max_positions, stretched), MAX_POSITIONS)


def _refuse_partial_rotation(fields: ConfigFields) -> None:
    fraction = fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    if fraction != 1.0:
        raise fields.error("partial_rotary_factor", "1 (other values are not supported)", fraction)


def _original_positions(config: ConfigFields, scaling: ConfigFields, max_positions: int) -> int:
    name = "original_max_position_embeddings"
    return (config if config.has(name) else scaling).integer(name, 1, MAX_POSITIONS, max_positions)


def _llama3(scaling: ConfigFields, theta: float, original: int) -> RopeSpec:
    low = scaling.number("low_freq_factor", 1e-3, 1e6)
    high = scaling.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        raise scaling.error("high_freq_factor", f"above low_freq_factor ({low:g})", high)
    return RopeSpec(
        kind="llama3",
        theta=theta,
        factor=scaling.number("factor", 1.0, _MAX_FACTOR),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: ConfigFields, theta: float, original: int, max_positions: int) -> RopeSpec:
    if theta <= 1.0:
        raise scaling.error("rope_theta", "above 1 for yarn", theta)
    ratio = max(max_positions / original, 1.0)
    factor = scaling.number("factor", 1.0, _MAX_FACTOR, min(ratio, _MAX_FACTOR))
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=scaling.number("beta_slow", 1e-3, 1e6, 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: ConfigFields, factor: float) -> float:
    """Arxiv 2309.00071, section 3.4: attention is sharpened by 0.1 ln(factor) + 1."""
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", 1e-3, 1e3)
    mscale = scaling.number("mscale", 0.0, 1e3, 0.0)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
    if mscale and mscale_all_dim:
        return _sharpening(factor, mscale) / _sharpening(factor, mscale_all_dim)
    return _sharpening(factor, 1.0)


def _sharpening(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
