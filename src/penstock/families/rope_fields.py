"""Reads the rotary embedding of a model from its configuration, in the old form and the new one.

Old: `rope_theta` beside an optional `rope_scaling` object. New (transformers 5): everything in
`rope_parameters`. Called by the family modules; `layers.rope` turns the result into frequencies.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

from penstock.families.config_fields import ConfigFields
from penstock.families.rope_spec import RopeSpec

# "mrope": the parts of a head have positions of their own, which are all the same in a text.
_KINDS = ("default", "linear", "llama3", "yarn", "mrope")
_MAX_FACTOR = 65_536.0
MAX_POSITIONS = 1 << 27

_logger = logging.getLogger(__name__)


def read_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    """Return the `RopeSpec` of a configuration whose `max_position_embeddings` is `max_positions`."""
    return rope_of(config, scaling_section(config), max_positions)


def read_partial_rope(config: ConfigFields, max_positions: int, *, fraction: float) -> RopeSpec:
    """Return the `RopeSpec` for families whose heads may be rotated in part.

    Args:
        fraction: share of a head's dimensions that is rotated if the configuration does not say it.
    """
    scaling, name = scaling_section(config), "partial_rotary_factor"
    fraction = (scaling if scaling.has(name) else config).number(name, 0.0, 1.0, fraction)
    config, scaling = (fields.with_values(partial_rotary_factor=None) for fields in (config, scaling))
    rope = rope_of(config, scaling, max_positions)
    return dataclasses.replace(rope, rotary_fraction=fraction)


def require_whole_pairs(config: ConfigFields, rope: RopeSpec, head_dim: int) -> None:
    """Raise `ModelConfigError` if no dimension of a head is rotated, or an odd number of them."""
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim < 2 or rotary_dim % 2:
        expected = f"a number that rotates an even part of head_dim ({head_dim})"
        raise config.error("partial_rotary_factor", expected, rope.rotary_fraction)


def scaling_section(config: ConfigFields) -> ConfigFields:
    """Return the object that says how positions are scaled, by its old or its new name."""
    return config.section("rope_scaling" if config.has("rope_scaling") else "rope_parameters")


def rope_of(
    config: ConfigFields,
    scaling: ConfigFields,
    max_positions: int,
    *,
    theta_field: str = "rope_theta",
    theta: float = 10_000.0,
) -> RopeSpec:
    """Return the rotary embedding that `scaling` describes, and `config` where that leaves something open.

    Args:
        theta_field: name of theta in `config`; in `scaling` it is `rope_theta`.
        theta: the theta if neither has one.
    """
    kind = _kind(scaling, _KINDS)
    _refuse_partial_rotation(config)
    _refuse_partial_rotation(scaling)
    theta = _theta(config, scaling, theta_field, theta)
    match kind:
        case "linear":
            return RopeSpec(kind="linear", theta=theta, factor=scaling.number("factor", 1.0, _MAX_FACTOR))
        case "llama3":
            return _llama3(scaling, theta, _original_positions(config, scaling, max_positions))
        case "yarn":
            return _yarn(scaling, theta, _original_positions(config, scaling, max_positions), max_positions)
    return RopeSpec(theta=theta)


def rope_of_layers(
    config: ConfigFields, kind: str, max_positions: int, *, theta_field: str = "rope_theta", theta: float
) -> RopeSpec:
    """Return the rotary embedding of the layers of one kind, where each kind has its own.

    The kinds are `full_attention` and `sliding_attention`. In the old form all scaling is that of
    `full_attention`. Other arguments as for `rope_of`.
    """
    parameters = config.section("rope_parameters")
    for name in ("rope_type", "rope_theta"):
        if parameters.has(name):
            expected = "an object with full_attention and sliding_attention"
            raise config.error("rope_parameters", expected, f"an object with {name}")
    scaling = parameters.section(kind)
    if kind == "full_attention" and config.has("rope_scaling"):
        scaling = config.section("rope_scaling")
    return rope_of(config, scaling, max_positions, theta_field=theta_field, theta=theta)


def _kind(scaling: ConfigFields, kinds: Sequence[str]) -> str:
    return scaling.choice("rope_type" if scaling.has("rope_type") else "type", kinds, "default")


def _theta(config: ConfigFields, scaling: ConfigFields, field: str, default: float) -> float:
    if scaling.has("rope_theta"):
        return scaling.number("rope_theta", 1.0, 1e12)
    return config.number(field, 1.0, 1e12, default)


def read_longrope(config: ConfigFields, max_positions: int) -> RopeSpec:
    """Return the `RopeSpec` for families whose positions are plain or scaled by longrope (arXiv 2402.13753).

    Older configurations call longrope "su" or "yarn". Heads may be rotated in part.

    Only the short factors are used: with the long ones all keys of a sequence would have to be rotated anew
    once the sequence has grown past the original context.
    """
    scaling = scaling_section(config)
    kind = _kind(scaling, ("default", "longrope", "su", "yarn"))
    partial = scaling if scaling.has("partial_rotary_factor") else config
    plain = RopeSpec(
        theta=_theta(config, scaling, "rope_theta", 10_000.0),
        rotary_fraction=partial.number("partial_rotary_factor", 0.0, 1.0, 1.0),
    )
    if kind == "default":
        return plain
    original = _original_positions(config, scaling, 4096)
    if original < 2:
        raise scaling.error("original_max_position_embeddings", "at least 2 for longrope", original)
    scaling.number_list("long_factor", 1e-3, 1e6)  # must be right, though not used
    return dataclasses.replace(
        plain,
        kind="longrope",
        original_max_position_embeddings=original,
        short_factors=tuple(scaling.number_list("short_factor", 1e-3, 1e6)),
        attention_factor=_longrope_attention_factor(scaling, original, max_positions),
    )


def _longrope_attention_factor(scaling: ConfigFields, original: int, max_positions: int) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", 1e-3, 1e3)
    factor = scaling.number("factor", 1.0, _MAX_FACTOR, max(max_positions / original, 1.0))
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def stretched_positions(rope: RopeSpec, max_positions: int) -> int:
    """Return the length of the longest sequence.

    With yarn, `max_positions` may be the length before stretching. With longrope a sequence cannot be longer
    than the original context, since only the short factors are used.
    """
    if rope.kind == "longrope" and max_positions > rope.original_max_position_embeddings:
        _logger.warning(
            "config.json: longrope beyond %d tokens is not supported; the context is limited to that",
            rope.original_max_position_embeddings,
        )
        return rope.original_max_position_embeddings
    if rope.kind != "yarn":
        return max_positions
    stretched = int(rope.original_max_position_embeddings * rope.factor)
    return min(max(max_positions, stretched), MAX_POSITIONS)


def _refuse_partial_rotation(fields: ConfigFields) -> None:
    fraction = fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    if fraction != 1.0:
        raise fields.unsupported("partial_rotary_factor", "1 (other values are not supported)", fraction)


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
    """Return the factor of cosines and sines, by default 0.1 ln(factor) + 1 (arXiv 2309.00071, 3.4)."""
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", 1e-3, 1e3)
    mscale = scaling.number("mscale", 0.0, 1e3, 0.0)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
    if mscale and mscale_all_dim:
        return sharpening(factor, mscale) / sharpening(factor, mscale_all_dim)
    return sharpening(factor, 1.0)


def sharpening(factor: float, mscale: float) -> float:
    """Return the factor by which yarn makes queries, or keys, larger in a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0
