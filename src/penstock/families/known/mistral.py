"""The specs of Mistral, a Llama that has a sliding window in some versions, and of Ministral 3.

The queries of Ministral 3 grow with their positions. Called by `families.registry`.
"""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import read_decoder
from penstock.families.rope_fields import read_rope, scaling_section
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import WindowRule, read_window

_POSITIONS = 262_144
# The scaling of positions if a configuration has none.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `MistralForCausalLM`; without a window, `sliding_window` is null."""
    windows = WindowRule(window=read_window(config, 4096))
    return read_decoder(config, architecture, windows=windows, max_positions=131_072)


def ministral3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Ministral3ForCausalLM`: beyond the original context queries grow with positions."""
    windows = WindowRule(window=read_window(config, 0) if config.has("sliding_window") else 0)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.with_values(rope_parameters=_YARN)
    return read_decoder(
        config,
        architecture,
        windows=windows,
        read_rope=_growing_rope,
        head_dim=128,
        max_positions=_POSITIONS,
        eps=1e-5,
    )


def _growing_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    rope, scaling = read_rope(config, max_positions), scaling_section(config)
    growth = scaling.number("llama_4_scaling_beta", 0.0, 1e3, 0.0)
    start = scaling.integer("original_max_position_embeddings", 1, 1 << 27, max_positions)
    return dataclasses.replace(rope, query_growth=growth, original_max_position_embeddings=start)
