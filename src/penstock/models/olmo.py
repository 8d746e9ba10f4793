"""OLMo 2: norms after attention and MLP instead of before, and over all heads of queries and keys. Called by
`models.registry`.
"""

from __future__ import annotations

import dataclasses

from penstock.models.config_fields import ConfigFields
from penstock.models.llama import read_decoder
from penstock.models.spec import ModelSpec


def olmo2_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """`Olmo2ForCausalLM`; one flag gives all four attention projections a bias."""
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(config, architecture, qkv_bias=has_bias, o_bias=has_bias, eps=1e-5)
    return dataclasses.replace(
        spec,
        rope=dataclasses.replace(spec.rope, rounds_angles=False),
        qk_norm="all_heads",
        norm_kind="wide",
        norm_places="after",
    )
