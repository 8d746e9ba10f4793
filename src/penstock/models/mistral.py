"""Mistral: Llama with a sliding window, in the versions that have one. Called by `models.registry`."""

from __future__ import annotations

from penstock.models.config_fields import ConfigFields
from penstock.models.llama import read_decoder
from penstock.models.spec import ModelSpec
from penstock.models.window_fields import WindowRule, read_window


def mistral_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """`MistralForCausalLM`; `sliding_window` is null where there is none."""
    windows = WindowRule(window=read_window(config, 4096))
    return read_decoder(config, architecture, windows=windows, max_positions=131_072)
