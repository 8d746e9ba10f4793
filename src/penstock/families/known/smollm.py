"""The spec of SmolLM3: a Llama in which every fourth layer rotates nothing. Called by `families.registry`."""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import MAX_LAYERS, llama_spec
from penstock.families.spec import ModelSpec


def smollm3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `SmolLM3ForCausalLM`.

    Despite its name, the field `no_rope_layers` has 1 for a layer that rotates.
    """
    if config.flag("use_sliding_window", False):
        raise config.unsupported("use_sliding_window", "false (sliding windows are not supported)", True)
    config = config.with_defaults(
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        rope_theta=2e6,
        tie_word_embeddings=True,
    )
    spec = llama_spec(config, architecture)
    return dataclasses.replace(spec, unrotated_layers=_unrotated_layers(config, spec.num_layers))


def _unrotated_layers(config: ConfigFields, num_layers: int) -> frozenset[int]:
    if not config.has("no_rope_layers"):
        step = config.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0)
    rotates = config.integer_list("no_rope_layers", 0, 1)
    if len(rotates) != num_layers:
        expected = f"a list of num_hidden_layers ({num_layers}) numbers"
        raise config.error("no_rope_layers", expected, len(rotates))
    return frozenset(layer for layer, does_rotate in enumerate(rotates) if not does_rotate)
