"""The specs of Qwen2, Qwen2.5 and Qwen3, and MiMo, which is a Qwen2.

Each is a Llama with biases on query, key and value projections (Qwen2), or with norms on queries and keys
(Qwen3). The upper layers have a window if the configuration switches it on. Called by `families.registry`.
"""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import MAX_LAYERS, read_decoder
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import WindowRule, read_window


def qwen2_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Qwen2ForCausalLM`."""
    return read_decoder(config, architecture, qkv_bias=True, max_positions=32_768, windows=_windows(config))


def qwen3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Qwen3ForCausalLM`; one flag gives all four attention projections a bias."""
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        architecture,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_dim=128,
        max_positions=32_768,
        windows=_windows(config),
    )
    return dataclasses.replace(spec, qk_norm="each_head")


def _windows(config: ConfigFields) -> WindowRule:
    """Return the windows: the first `max_window_layers` layers see all."""
    if not config.flag("use_sliding_window", False):
        return WindowRule()
    num_full = config.integer("max_window_layers", 0, MAX_LAYERS, 28)
    return WindowRule(window=read_window(config, 4096), is_sliding=lambda layer: layer >= num_full)
