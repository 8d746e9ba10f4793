"""Mistral: Llama with a sliding window, in the versions that have one. Called by `families.registry`."""

from __future__ import annotations

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import read_decoder
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import WindowRule, read_window


def mistral_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """`MistralForCausalLM`; `sliding_window` is null where there is none."""
    windows = WindowRule(window=read_window(config, 4096))
    return read_decoder(config, architecture, windows=windows, max_positions=131_072)
