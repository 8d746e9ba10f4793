"""Which checkpoint tensor goes into which memory of a model (rows A12-A14).

A parameter keeps its checkpoint name; a module with `parts` (`layers.linear.FusedLinear`) takes several
checkpoint tensors, one below the other. The model asks for what it holds, so a stage never looks at another
stage's tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

# Left over in old checkpoints: `layers.rope` works it out, the tied head is the embedding.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_TIED_HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_AFTER_LAYERS = "model.norm.weight"  # held by the last stage


@runtime_checkable
class Fused(Protocol):
    """A module whose weight and bias are several checkpoint tensors, stacked by rows."""

    parts: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Contiguous memory of a parameter, and the checkpoint tensor that belongs there."""

    name: str
    target: Tensor


def tensor_slots(model: nn.Module) -> list[TensorSlot]:
    """All memory of the model, each piece once; together they cover every parameter."""
    return [slot for path, module in model.named_modules() for slot in _module_slots(path, module)]


def _module_slots(path: str, module: nn.Module) -> Iterator[TensorSlot]:
    for kind, parameter in module.named_parameters(recurse=False):
        if not isinstance(module, Fused):
            yield TensorSlot(name=f"{path}.{kind}", target=parameter.data)
            continue
        parent = path.rpartition(".")[0]
        for part, (start, end) in module.parts.items():
            yield TensorSlot(name=f"{parent}.{part}.{kind}", target=parameter.data[start:end])


def unexpected_names(slots: Iterable[TensorSlot], checkpoint_names: Iterable[str]) -> list[str]:
    """Tensors that this stage should have a place for, and has not.

    Such a tensor means that configuration and weights are not of the same model: a bias that would silently
    be left out, or layers after the last one. Tensors of other stages are none of our business.
    """
    wanted = {slot.name for slot in slots}
    components = {_component(name) for name in wanted}
    last_layer = max(map(_layer, wanted)) if _AFTER_LAYERS in wanted else sys.maxsize
    return sorted(
        name
        for name in checkpoint_names
        if name not in wanted
        and (_component(name) in components or _layer(name) > last_layer)
        and not _DERIVED.search(name)
        and name != _TIED_HEAD
    )


def _component(name: str) -> str:
    """The layer, or the module outside the layers, that a tensor belongs to."""
    match = _LAYER.match(name)
    return match.group() if match else name.rpartition(".")[0]


def _layer(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 outside the layers."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else -1
