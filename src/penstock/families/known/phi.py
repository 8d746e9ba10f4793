"""The specs of Phi-3, Phi-3.5 and Phi-4: a Llama, stored with fused projections."""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import read_decoder
from penstock.families.rope_fields import read_longrope, require_whole_pairs, scaling_section
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import WindowRule, read_window


def phi3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Phi3ForCausalLM`: heads may be rotated in part, positions scaled by longrope."""
    windows = WindowRule(window=read_window(config, 0) if config.has("sliding_window") else 0)
    spec = read_decoder(
        config, architecture, windows=windows, read_rope=read_longrope, max_positions=4096, eps=1e-5
    )
    _check_rotation(config, spec)
    return dataclasses.replace(spec, stored_together="all")


def _check_rotation(config: ConfigFields, spec: ModelSpec) -> None:
    require_whole_pairs(config, spec.rope, spec.head_dim)
    rotary_dim = spec.rope.rotary_dim(spec.head_dim)
    factors = spec.rope.short_factors
    if spec.rope.kind == "longrope" and len(factors) != rotary_dim // 2:
        expected = f"a list of {rotary_dim // 2} numbers, one for each rotated pair"
        raise scaling_section(config).error("short_factor", expected, len(factors))
