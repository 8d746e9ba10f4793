"""The spec of dots.llm1: attention of Qwen3, experts of DeepSeek-V3. Called by `families.registry`."""

from __future__ import annotations

from dataclasses import replace

from penstock.families.config_fields import ConfigFields
from penstock.families.known.grouped_experts import corrected, read_experts, with_experts
from penstock.families.known.llama import MAX_LAYERS, read_decoder
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import WindowRule, read_window


def dots1_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Dots1ForCausalLM`; the first `max_window_layers` layers see all."""
    num_full = config.integer("max_window_layers", 0, MAX_LAYERS, 62)
    windows = WindowRule(window=read_window(config, 4096), is_sliding=lambda layer: layer >= num_full)
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(config, architecture, qkv_bias=has_bias, o_bias=has_bias, windows=windows)
    spec = replace(spec, qk_norm="each_head")
    experts = read_experts(config, spec, (None, None), inner_size=1408, num_shared=0, first=0)
    return with_experts(spec, corrected(config, experts, factor=1.0, normalized=False))
