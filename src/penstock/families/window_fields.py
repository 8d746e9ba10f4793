"""Reads from a configuration which layers have a sliding window. Called by `families.known.llama`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.families.config_fields import ConfigFields
from penstock.families.rope_fields import MAX_POSITIONS

_KINDS = ("full_attention", "sliding_attention")


def every_layer(layer: int) -> bool:
    """Return True: each layer has the window."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRule:
    """The windows of a family.

    Attributes:
        window: number of tokens that a token sees in the layers with a window; 0: no layer has one, and a
            configuration may not say otherwise.
        is_sliding: whether a layer has the window, if the configuration does not list the layers.
    """

    window: int = 0
    is_sliding: Callable[[int], bool] = every_layer


NO_WINDOWS = WindowRule()


def read_window(config: ConfigFields, default: int) -> int:
    """Return `sliding_window`; 0, which a file writes as null: there is none."""
    if config.is_null("sliding_window"):
        return 0
    return config.integer("sliding_window", 1, MAX_POSITIONS, default)


def read_windows(config: ConfigFields, num_layers: int, rule: WindowRule) -> tuple[int, ...]:
    """Return the window of each layer, 0 for those that see all; empty if none has one."""
    is_sliding = list(map(rule.is_sliding, range(num_layers)))
    if config.has("layer_types"):
        is_sliding = _listed(config, num_layers)
        if any(is_sliding) and not rule.window:
            raise config.unsupported("layer_types", "full_attention everywhere", "sliding_attention")
    windows = tuple(rule.window if slides else 0 for slides in is_sliding)
    return windows if any(windows) else ()


def _listed(config: ConfigFields, num_layers: int) -> list[bool]:
    kinds = config.text_list("layer_types")
    for kind in kinds:
        if kind not in _KINDS:
            raise config.unsupported("layer_types", f"a list of {' and '.join(_KINDS)}", kind)
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"a list of num_hidden_layers ({num_layers}) kinds", len(kinds))
    return [kind == "sliding_attention" for kind in kinds]
