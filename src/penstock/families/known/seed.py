"""The spec of Seed-OSS: a Llama whose config gives the width of heads, and a flag for each bias."""

from __future__ import annotations

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import read_decoder
from penstock.families.spec import ModelSpec


def seed_oss_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `SeedOssForCausalLM`."""
    return read_decoder(
        config.with_defaults(num_key_value_heads=8),
        architecture,
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        head_dim=128,
        max_positions=524_288,
    )
