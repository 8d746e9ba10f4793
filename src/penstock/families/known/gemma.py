"""The specs of Gemma: scaled embeddings; since Gemma 2, norms before and after, and some sliding windows.

Of Gemma 3 the text model is read. Called by `families.registry`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import MAX_LAYERS, read_decoder
from penstock.families.rope_fields import read_rope, rope_of_layers
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import NO_WINDOWS, WindowRule, read_window


def gemma_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `GemmaForCausalLM`; its "gelu" has always meant the approximation by tanh."""
    config = config.with_values(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=None)
    spec = _gemma_spec(config, architecture, NO_WINDOWS, max_positions=8192)
    return dataclasses.replace(spec, attention_scale=0.0, norm_places="before")


def gemma2_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Gemma2ForCausalLM`: even layers have a window; scores and logits are capped."""
    windows = WindowRule(window=read_window(config, 4096), is_sliding=lambda layer: layer % 2 == 0)
    return dataclasses.replace(
        _gemma_spec(config, architecture, windows, max_positions=8192),
        attention_soft_cap=_soft_cap(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", 30.0),
    )


def gemma3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Gemma3ForCausalLM`.

    All layers but each sixth have a window, and a rotary embedding of their own.
    """
    pattern = config.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = WindowRule(
        window=read_window(config, 4096), is_sliding=lambda layer: (layer + 1) % pattern != 0
    )
    if config.has("attn_logit_softcapping"):
        cap = config.number("attn_logit_softcapping", 0, 1e6)
        raise config.unsupported("attn_logit_softcapping", "null", cap)
    spec = _gemma_spec(config, architecture, windows, max_positions=131_072, read_rope=_far_rope)
    return dataclasses.replace(
        spec,
        qk_norm="each_head",
        local_rope=_near_rope(config, spec.max_position_embeddings),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", 0.0),
    )


def _gemma_spec(
    config: ConfigFields,
    architecture: str,
    windows: WindowRule,
    *,
    max_positions: int,
    read_rope: Callable[[ConfigFields, int], RopeSpec] = read_rope,
) -> ModelSpec:
    """Return what all three have in common, with norms as in Gemma 2 and 3."""
    if config.flag("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention", "false", True)
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        architecture,
        qkv_bias=has_bias,
        o_bias=has_bias,
        windows=windows,
        read_rope=read_rope,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        head_dim=256,
        max_positions=max_positions,
        is_tied=True,
    )
    return dataclasses.replace(
        spec,
        attention_scale=config.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0) ** -0.5,
        norm_kind="one_plus",
        norm_places="both",
        embedding_multiplier=spec.hidden_size**0.5,
        rounds_embedding_multiplier=True,
    )


def _soft_cap(config: ConfigFields, name: str, default: float) -> float:
    """Return a cap; 0, which a file writes as null: there is none."""
    return 0.0 if config.is_null(name) else config.number(name, 0.0, 1e6, default)


def _far_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    """Return the rotary embedding of the layers that see all."""
    return rope_of_layers(config, "full_attention", max_positions, theta=1e6)


def _near_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    """Return the rotary embedding of the layers with a window."""
    return rope_of_layers(
        config, "sliding_attention", max_positions, theta_field="rope_local_base_freq", theta=1e4
    )
