"""The spec of Granite: a Llama with factors for its embeddings, scores, residual stream and logits.

Called by `families.registry`.
"""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import llama_spec
from penstock.families.spec import ModelSpec

_SMALLEST, _LARGEST = 1e-6, 1e6


def granite_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `GraniteForCausalLM`; a factor that is not given is 1, that of scores too."""

    def factor(name: str) -> float:
        return config.number(name, _SMALLEST, _LARGEST, 1.0)

    return dataclasses.replace(
        llama_spec(config, architecture),
        embedding_multiplier=factor("embedding_multiplier"),
        residual_multiplier=factor("residual_multiplier"),
        attention_scale=factor("attention_multiplier"),
        logit_multiplier=1.0 / factor("logits_scaling"),
    )
