"""The specs of OLMo 2 and 3: norms after attention and MLP, and over all heads of queries and keys.

OLMoE has such norms of queries and keys, and experts. Called by `families.registry`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import llama_spec, read_decoder
from penstock.families.known.qwen_moe import with_experts
from penstock.families.rope_fields import read_rope, rope_of_layers
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import NO_WINDOWS, WindowRule, read_window


def olmo2_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Olmo2ForCausalLM`."""
    return _olmo_spec(config, architecture, NO_WINDOWS, read_rope)


def olmoe_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `OlmoeForCausalLM`."""
    if config.has("clip_qkv"):
        clip = config.number("clip_qkv", 0, 1e9)
        raise config.unsupported("clip_qkv", "null (clipping is not supported)", clip)
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    # The inner width of an expert is in the field that other families have for their MLPs.
    width = config.integer("intermediate_size", 1, 1 << 20, 2048)
    fields = config.with_values(moe_intermediate_size=width)
    spec = dataclasses.replace(llama_spec(config, architecture), qk_norm="all_heads")
    return with_experts(spec, fields, num_experts=64, num_chosen=8, inner_size=width)


def olmo3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Olmo3ForCausalLM`: three layers of four have windows and unscaled positions."""
    windows = WindowRule(window=read_window(config, 4096), is_sliding=lambda layer: (layer + 1) % 4 != 0)
    spec = _olmo_spec(config, architecture, windows, _far_rope)
    near = rope_of_layers(config, "sliding_attention", spec.max_position_embeddings, theta=5e5)
    return dataclasses.replace(spec, local_rope=dataclasses.replace(near, rounds_angles=False))


def _far_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    return rope_of_layers(config, "full_attention", max_positions, theta=5e5)


def _olmo_spec(
    config: ConfigFields,
    architecture: str,
    windows: WindowRule,
    read_rope: Callable[[ConfigFields, int], RopeSpec],
) -> ModelSpec:
    """Return what OLMo 2 and 3 have in common; one flag gives all four attention projections a bias."""
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        architecture,
        qkv_bias=has_bias,
        o_bias=has_bias,
        windows=windows,
        read_rope=read_rope,
        eps=1e-5,
    )
    return dataclasses.replace(
        spec,
        rope=dataclasses.replace(spec.rope, rounds_angles=False),
        qk_norm="all_heads",
        norm_kind="wide",
        norm_places="after",
    )
