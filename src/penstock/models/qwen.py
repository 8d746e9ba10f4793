"""Qwen2 and Qwen2.5: Llama with biases on query, key and value. Called by `models.registry`."""

from __future__ import annotations

from penstock.models.config_fields import ConfigFields
from penstock.models.llama import read_decoder
from penstock.models.spec import ModelSpec


def qwen2_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """`Qwen2ForCausalLM`; its optional sliding window is not built."""
    if config.flag("use_sliding_window", False):
        raise config.error("use_sliding_window", "false (sliding windows are not supported)", True)
    return read_decoder(config, architecture, qkv_bias=True, o_bias=False, mlp_bias=False)
