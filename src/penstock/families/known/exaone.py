"""The spec of EXAONE 4: norms after attention and MLP.

In the large size three layers of four have windows, and only these rotate queries and keys. Called by
`families.registry`.
"""

from __future__ import annotations

import dataclasses

from penstock.families.config_fields import ConfigFields
from penstock.families.known.llama import MAX_LAYERS, read_decoder
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import WindowRule, read_window


def exaone4_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Exaone4ForCausalLM`; without a window all layers rotate."""
    window = read_window(config, 4096)
    step = _pattern(config) if window else 1
    windows = WindowRule(window=window, is_sliding=lambda layer: (layer + 1) % step != 0)
    spec = read_decoder(config, architecture, windows=windows, eps=1e-5)
    full = frozenset(layer for layer in range(spec.num_layers) if window and not spec.window(layer))
    return dataclasses.replace(spec, qk_norm="each_head", norm_places="after", unrotated_layers=full)


def _pattern(config: ConfigFields) -> int:
    """Return the number of layers of a pattern, of which the last sees all; a file may write it as "LLLG"."""
    name = "sliding_window_pattern"
    if config.has("layer_types"):
        return 1  # no matter: `layer_types` says which layers have a window
    value = config.values().get(name)
    if not isinstance(value, str):
        return config.integer(name, 1, MAX_LAYERS, 4)
    if value != "L" * (len(value) - 1) + "G":
        raise config.error(name, "a number, or L for each layer with a window and then G", value)
    return len(value)
