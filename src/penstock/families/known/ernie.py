"""The spec of ERNIE 4.5: a Llama that rotates neighbouring dimensions, by angles that are not rounded.

Called by `families.registry`.
"""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import read_decoder
from penstock.families.spec import ModelSpec


def ernie4_5_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Ernie4_5ForCausalLM`; one flag gives all projections a bias."""
    has_bias = config.flag("use_bias", False)
    spec = read_decoder(
        config.with_defaults(num_key_value_heads=2, rope_theta=5e5),
        architecture,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        head_dim=128,
        max_positions=131_072,
        eps=1e-5,
        is_tied=True,
    )
    rope = dataclasses.replace(spec.rope, interleaved=True, rounds_angles=False)
    return dataclasses.replace(spec, rope=rope)
