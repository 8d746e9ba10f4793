"""The memory for the part of a model of transformers that a stage holds, under the names of the checkpoint.

`materialise` gives weights memory, and `compute_buffers` gives buffers their numbers. `weight_tree` puts the
weights into modules whose names are the checkpoint's, for `weights.loader`. Checkpoints of older versions or
of other programs have other names than transformers' modules: they are converted as transformers does it.
Called by `models.transformers_backend`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.layers.compute import Compute
from penstock.models.transformers_attention import refused

_LOADED = "_is_hf_initialized"  # transformers leaves tensors alone that are marked so
_NUMBERED = re.compile(r"(\D+)(\d*)")


def materialise(model: Any, modules: Iterable[nn.Module], compute: Compute) -> dict[str, nn.Parameter]:
    """Give every weight of `modules` its own memory, and every buffer that checkpoints store.

    Args:
        model: the whole model, on the meta device. A weight that has several names stays one weight.

    Returns:
        The weights by their names in the model.

    Raises:
        NotEnoughMemoryError: the device refuses.
    """
    names: dict[int, list[str]] = {}
    for name, old in model.state_dict(keep_vars=True).items():
        names.setdefault(id(old), []).append(name)
    wide = _kept_wide(model, compute.dtype)
    made: dict[int, nn.Parameter] = {}
    for part in dict.fromkeys(part for module in modules for part in module.modules()):
        stores: tuple[dict[str, Any], dict[str, Any]] = (part._parameters, part._buffers)
        for tensors in stores:
            for key, old in tensors.items():
                if old is None or id(old) not in names:
                    continue
                if id(old) not in made:
                    is_wide = any(wide(name) for name in names[id(old)])
                    dtype = torch.float32 if is_wide else old.dtype
                    made[id(old)] = dataclasses.replace(compute, dtype=dtype).parameter(*old.shape)
                    setattr(made[id(old)], _LOADED, True)
                new = made[id(old)]
                tensors[key] = new if tensors is part._parameters else new.data
    return {name: weight for old, weight in made.items() for name in names[old]}


def _kept_wide(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function that says whether transformers keeps a weight of this name in float32."""
    kept = [] if dtype == torch.float32 else list(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept += model._keep_in_fp32_modules or ()
    patterns = [re.compile(text.replace("*", ".*")) for text in kept]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def compute_buffers(model: Any, modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give buffers memory, and let the model work their numbers out, as transformers does after loading.

    Raises:
        UnsupportedModelError: the model does not fill some of its buffers, so that their numbers are unknown.
    """
    for module in modules:
        empty = {name: old for name, old in module._buffers.items() if old is not None and old.is_meta}
        for name, old in empty.items():
            fill = math.nan if old.is_floating_point() else -1
            module._buffers[name] = torch.full(old.shape, fill, dtype=old.dtype, device=device)
        if empty:
            model._init_weights(module)
        unknown = [name for name in empty if not _is_filled(module._buffers[name])]
        stray = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        for name in (*unknown, *stray):
            raise refused(type(model).__name__, f"the values of {type(module).__name__}.{name} are not known")


def _is_filled(buffer: Tensor | None) -> bool:
    if buffer is None:
        return False
    return not bool(buffer.isnan().any() if buffer.is_floating_point() else (buffer == -1).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A tensor of the checkpoint from which a tensor of the model is made.

    Attributes:
        name: its name in the checkpoint.
        converter: transformers' rule that makes a tensor of the model from several; None: the two are the
            same.
        part: index of the rule's pattern of names that this tensor's name matches.
    """

    name: str
    converter: Any
    part: int


def sources_of(model: Any, checkpoint_names: Collection[str]) -> dict[str, list[TensorSource]]:
    """Return the checkpoint tensors of each name of the model, as transformers names them.

    Args:
        model: the whole model, on the meta device.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {
        pattern: (converter, part)
        for converter in converters
        for part, pattern in enumerate(converter.source_patterns)
    }
    known = model.state_dict()
    sources: dict[str, list[TensorSource]] = {}
    for name in sorted(checkpoint_names, key=_by_number):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        converter, part = of_pattern[pattern] if pattern is not None else (None, 0)
        sources.setdefault(target, []).append(TensorSource(name=name, converter=converter, part=part))
    return sources


def _by_number(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts expert 10 after expert 9."""
    return [(text, int(digits or -1)) for text, digits in _NUMBERED.findall(name)]


def weight_tree(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return modules that hold `weights`, by their names in the checkpoint, and nothing else."""
    root = nn.Module()
    for name, weight in weights.items():
        *parents, kind = name.split(".")
        node = root
        for parent in parents:
            if parent not in node._modules:
                node.add_module(parent, nn.Module())
            node = node.get_submodule(parent)
        if not parents or not weight.dim():
            raise refused(type(model).__name__, f"{name} is a weight outside any module, or a single number")
        node.register_parameter(kind, weight)
    return root


def checkpoint_weights(
    model: nn.Module, weights: Mapping[str, nn.Parameter], sources: Mapping[str, Sequence[TensorSource]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names of tensors in the checkpoint, each with the memory into which it is to be loaded.

    Args:
        weights: weights by their names in the model, of any shape. A tied weight has several names.
        sources: from `sources_of`.

    Raises:
        UnsupportedModelError: transformers makes a weight of others in a way that is not built.
    """
    names: dict[int, list[str]] = {}
    for name, weight in weights.items():
        names.setdefault(id(weight), []).append(name)
    for same in names.values():
        stored = next((name for name in same if name in sources), same[0])
        yield from _pieces(model, stored, weights[stored], sources.get(stored, []))


def _pieces(
    model: nn.Module, name: str, weight: nn.Parameter, sources: Sequence[TensorSource]
) -> Iterator[tuple[str, nn.Parameter]]:
    plain = [source.name for source in sources if source.converter is None]
    if plain or not sources:  # if the checkpoint has no such tensor, the loader reports that it is missing
        yield (name if name in plain or not plain else plain[0]), weight
        return
    converter = sources[0].converter
    kinds, steps = len(converter.source_patterns), [_step(each) for each in converter.operations]
    rest: tuple[int, ...] = tuple(weight.shape)
    if steps not in (["merge 0"], ["merge 0", "concatenate 1"]) or len(sources) != kinds * rest[0]:
        how = ", ".join(steps)
        raise refused(
            type(model).__name__, f"{name} is made of {len(sources)} tensors of the checkpoint by {how}"
        )
    for part in range(kinds):
        rows = rest[1] // kinds
        for expert, source in enumerate(each for each in sources if each.part == part):
            piece = weight.data[expert, part * rows : (part + 1) * rows]
            yield source.name, nn.Parameter(piece, requires_grad=False)


def _step(operation: Any) -> str:
    kind = {"MergeModulelist": "merge", "Concatenate": "concatenate"}.get(type(operation).__name__)
    return f"{kind} {operation.dim}" if kind else type(operation).__name__


def check_layers(layers_path: str, num_layers: int, sources: Mapping[str, Sequence[TensorSource]]) -> None:
    """Raise `CheckpointError` if the checkpoint has layers after the last one."""
    for target, layer_sources in sources.items():
        number = target.removeprefix(f"{layers_path}.").partition(".")[0]
        if target.startswith(f"{layers_path}.") and number.isdecimal() and int(number) >= num_layers:
            raise CheckpointError(
                file="model",
                tensor=layer_sources[0].name,
                expected=f"{num_layers} layers by config.json",
                found=f"layer {number}",
                remedy="config.json and the weights belong to different models.",
            )
