"""Builds a model of transformers without memory for its weights, to find out which parts a stage needs.

The whole model is built on torch's meta device, where tensors have shapes and no bytes, and is run there once
over a few tokens. A module that is called before the first layer belongs to the first stage, and one that is
called after the last layer to the last stage, wherever it stands in the class. The calls of attention show
the shape of each layer's heads. So a model that cannot be served is refused before a byte is allocated.
Called by `models.transformers_backend`. transformers is imported only when a model is surveyed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelConfigError, PenstockError, UnsupportedModelError
from penstock.families.config_fields import read_config
from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.ops import HeadShape, Sight
from penstock.models import transformers_attention
from penstock.models.transformers_attention import Site, Track, refused
from penstock.process.torch_import import load_meta_functions

_NUM_TOKENS = 3
# Their angles depend on the longest sequence of a step: stored keys would have to be rotated anew.
_MOVING_ROPES = frozenset({"dynamic", "longrope"})
_MEETINGS = (nn.Conv1d, nn.Conv2d, nn.RNNBase)  # modules in which a token's result depends on other tokens
# Fields of config.json that name code to run, from the checkpoint or a hub; they are left out.
_NAMES_OF_CODE = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
    }
)
# transformers sets global state while it builds a model; ranks may be threads.
_BUILDING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A model without memory, and what was seen when it ran.

    Attributes:
        model: transformers' model, on the meta device.
        layers_path: name of the list of layers in it.
        before, after: names of the modules with weights that are called before the first layer, and after the
            last one, each with the width of its output.
        heads: numbers and size of the attention heads, the same in every layer.
        gives_tuples: a layer returns a tuple that begins with its hidden states.
        output_width: width of the head's input.
        track: the `Track` that the sites of all layers share.
    """

    model: Any
    layers_path: str
    before: Mapping[str, int]
    after: Mapping[str, int]
    heads: HeadShape
    gives_tuples: bool
    output_width: int
    track: Track

    @property
    def body_path(self) -> str:
        """The name of the module that runs the layers."""
        return self.layers_path.rpartition(".")[0]

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.model.get_submodule(self.layers_path)
        assert isinstance(layers, nn.ModuleList)
        return layers


def survey(directory: Path, spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> Survey:
    """Build the model in `directory` without memory, and return what its run shows.

    Raises:
        UnsupportedModelError: the model has no list of layers, or several, or computes in a way that cannot
            be served.
        ModelConfigError: Penstock has read a number in config.json otherwise than transformers does, or
            max_model_len is more than transformers allows.
    """
    model = build_on_meta(directory, spec, dtype)
    _check_config(model.config, spec, max_model_len)
    _check_memoryless(model, spec)
    path = find_layers(model, spec.num_layers)
    track = Track()
    for index, layer in enumerate(model.get_submodule(path)):
        Site(index, track).bind(layer)
    seen = _Seen(spec.num_layers)
    try:
        with torch.enable_grad(), _watched(model, path, seen), track.run(seen):
            logits = _run_on_meta(model, seen)
    except PenstockError:
        raise
    except Exception as error:
        raise refused(
            spec.architecture,
            f"its code does not run layer by layer with Penstock's attention ({type(error).__name__}: "
            f"{error})",
        ) from error
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    if logits.requires_grad:
        seen.strange.append("its head needs more than the last layer's hidden states")
    _check_numbers(spec, seen, logits)
    _check_windows(model.config, spec, seen)
    _check_all_called(spec, model, path, seen)
    return Survey(
        model=model,
        layers_path=path,
        before=seen.before,
        after=seen.after,
        heads=seen.heads[0],
        gives_tuples=seen.gives_tuples,
        output_width=seen.output_width,
        track=track,
    )


def build_on_meta(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> Any:
    """Return transformers' model, with our attention. Code that the checkpoint brings along is never run."""
    given = read_config(directory / "config.json").values()
    fields = {name: value for name, value in given.items() if name not in _NAMES_OF_CODE}
    with _BUILDING:
        load_meta_functions()
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(transformers_attention.NAME, transformers_attention.attend)
        try:
            config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config,
                    attn_implementation=transformers_attention.NAME,
                    experts_implementation="batched_mm",  # the one whose shapes do not depend on numbers
                    dtype=dtype,
                )
            model.tie_weights()
        except Exception as error:
            raise refused(
                spec.architecture, f"transformers does not accept it: {type(error).__name__}: {error}"
            ) from error
    if type(model).__name__ != spec.architecture:
        raise refused(spec.architecture, f"transformers makes {type(model).__name__} of its config.json")
    return model.requires_grad_(False).eval()


def find_layers(model: nn.Module, num_layers: int) -> str:
    """Return the name of the list of layers: from the model's pipeline plan, or the only list of that length.

    Raises:
        UnsupportedModelError: the model has no such list, or several [S9].
    """
    base = getattr(model, "base_model", model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}." if base is not model else ""
    planned = [
        f"{prefix}{name}"
        for name in getattr(base, "_pp_plan", None) or {}
        if isinstance(getattr(base, name, None), nn.ModuleList)
    ]
    candidates = planned or [name for name, layers in _lists(model) if len(layers) == num_layers]
    if len(candidates) == 1:
        return candidates[0]
    which = (
        f"{len(candidates)} lists of {num_layers} layers ({', '.join(candidates)})"
        if candidates
        else "no list of layers"
    )
    raise UnsupportedModelError(
        f"{type(model).__name__} has {which}, but a pipeline needs a single list.",
        remedy="Use a model with one stack of layers.",
        param="architectures",
    )


def _lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield all lists of modules that are not within another, in the order of their declaration."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}", child
        else:
            yield from _lists(child, f"{prefix}{name}.")


@dataclass(slots=True)
class _Seen:
    """The record of a run on the meta device; it also is the `Passage` of that run."""

    num_layers: int
    num_tokens: int = _NUM_TOKENS
    next_layer: int = 0
    is_within: bool = False
    between: Any = None
    inputs: list[Tensor] = field(default_factory=list)
    gives_tuples: bool = False
    width: int = 0
    output_width: int = 0
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)
    sights: dict[int, Sight] = field(default_factory=dict)
    heads: list[HeadShape] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        if layer in self.sights:
            self.strange.append(f"layer {layer} uses attention twice")
        self.sights[layer] = sight
        self.heads.append(
            HeadShape(num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=query.shape[-1])
        )
        return query.transpose(1, 2).contiguous()

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the call of the module that runs the layers.

        A stage calls that module alone, with vectors and positions: they must not change on the way to it.
        """
        given = list(_tensors((args, dict(kwargs))))
        if any(all(tensor is not known for known in self.inputs) for tensor in given) or len(given) < 2:
            self.strange.append("its vectors or positions change on the way to the layers' module")

    def enter(self, layer: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the call of a layer, and what reaches it beside the hidden states of the layer before."""
        if layer != self.next_layer:
            self.strange.append(f"layer {layer} runs where {self.next_layer} is due")
        hidden_states = args[0] if args else kwargs.get("hidden_states")
        if layer and hidden_states is not self.between:
            self.strange.append(f"hidden states change between layers {layer - 1} and {layer}")
        others = [tensor for tensor in _tensors((args, dict(kwargs))) if tensor is not hidden_states]
        if any(tensor.requires_grad for tensor in others):
            self.strange.append(f"layer {layer} needs more than hidden states")
        self.is_within = True

    def leave(self, output: Any) -> Any:
        """Note the end of a layer.

        Its output is cut off from torch's graph of gradients, and a new graph begins there. A tensor that
        needs a gradient and reaches a later layer beside these hidden states has come by another way.
        """
        self.gives_tuples = isinstance(output, tuple)
        hidden_states, *others = output if isinstance(output, tuple) else (output,)
        if any(other is not None for other in others):
            self.strange.append("a layer returns more than hidden states")
        self.width = hidden_states.shape[-1]
        self.next_layer, self.is_within = self.next_layer + 1, False
        self.between = hidden_states.detach().requires_grad_(self.next_layer < self.num_layers)
        return (self.between, *others) if self.gives_tuples else self.between

    def end(self, output: Any) -> None:
        """Note the end of the module that runs the layers."""
        if hasattr(output, "last_hidden_state"):
            self.output_width = output.last_hidden_state.shape[-1]
        else:
            self.strange.append("its layers' module does not return hidden states by name")

    def called(self, name: str, output: Any) -> None:
        """Note the call of a module outside of the layers."""
        if not isinstance(output, Tensor) or output.shape[:2] != (1, _NUM_TOKENS):
            self.strange.append(f"{name} does not return one vector for each token")
        elif self.is_within or 0 < self.next_layer < self.num_layers:
            self.strange.append(f"{name} is used by all layers")
        else:
            (self.after if self.next_layer else self.before)[name] = output.shape[-1]


@contextmanager
def _watched(model: nn.Module, path: str, seen: _Seen) -> Iterator[None]:
    """Report to `seen` all calls of layers and of modules with weights until the end of the block."""
    with ExitStack() as stack:
        for index, layer in enumerate(model.get_submodule(path).children()):
            enter = layer.register_forward_pre_hook(
                lambda _, args, kwargs, layer=index: seen.enter(layer, args, kwargs), with_kwargs=True
            )
            stack.callback(enter.remove)
            stack.callback(layer.register_forward_hook(lambda _, __, output: seen.leave(output)).remove)
        body = model.get_submodule(path.rpartition(".")[0])
        begin = body.register_forward_pre_hook(
            lambda _, args, kwargs: seen.begin(args, kwargs), with_kwargs=True
        )
        stack.callback(begin.remove)
        stack.callback(body.register_forward_hook(lambda _, __, output: seen.end(output)).remove)
        for name, module in with_weights(model, path):
            hook = module.register_forward_hook(lambda _, __, output, name=name: seen.called(name, output))
            stack.callback(hook.remove)
        yield


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def with_weights(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the modules outside of the layers that have weights of their own."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if not name.startswith(f"{path}.") and any(True for _ in module.parameters(recurse=False))
    ]


def _run_on_meta(model: Any, seen: _Seen) -> Tensor:
    ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    vectors = model.get_input_embeddings()(ids).requires_grad_().clone()
    seen.inputs = [vectors, positions]
    logits = model(inputs_embeds=vectors, position_ids=positions, use_cache=False).logits
    assert isinstance(logits, Tensor)
    return logits


def _check_config(config: Any, spec: ModelSpec, max_model_len: int) -> None:
    ropes = getattr(config, "rope_parameters", None) or {}
    sections = [ropes, *(part for part in ropes.values() if isinstance(part, dict))]
    kinds = {str(part.get("rope_type")) for part in sections} & _MOVING_ROPES
    if kinds:
        raise refused(
            spec.architecture, f"rope_type {', '.join(kinds)} rotates keys again as a sequence grows"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < max_model_len:
        raise ModelConfigError(
            f"max_model_len is {max_model_len}; transformers gives this model {longest} positions.",
            remedy=f"Use --max-model-len {longest} or less.",
            param="max_model_len",
        )


def _check_memoryless(model: Any, spec: ModelSpec) -> None:
    """Refuse a model whose tokens depend on others by more than attention: no KV cache would keep that."""
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, _MEETINGS)]
    if kinds or getattr(model, "_is_stateful", False):
        what = f"by {kinds[0]}" if kinds else "by a state"
        raise refused(spec.architecture, f"its tokens depend on others {what}, not by attention alone")


def _check_numbers(spec: ModelSpec, seen: _Seen, logits: Tensor) -> None:
    """Raise unless what the run has shown agrees with the spec, and can be served."""
    if seen.strange:
        raise refused(spec.architecture, seen.strange[0])
    if len(seen.sights) != spec.num_layers or seen.next_layer != spec.num_layers:
        raise refused(
            spec.architecture, f"{len(seen.sights)} of its {spec.num_layers} layers call the attention"
        )
    if len(set(seen.heads)) > 1:
        raise refused(spec.architecture, "its layers have different numbers of heads")
    for name, own, built in (
        ("hidden_size", spec.hidden_size, seen.width),
        ("vocab_size", spec.vocab_size, logits.shape[-1]),
    ):
        if own != built:
            raise ModelConfigError(
                f"config.json: {name} was read as {own}, but transformers builds {built}.", param=name
            )


def _check_windows(config: Any, spec: ModelSpec, seen: _Seen) -> None:
    """Refuse a model whose windows do not reach the attention: they would be in a mask, which is not made."""
    kinds = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        reported = "sliding_attention" if seen.sights[layer].window else "full_attention"
        if kind != reported:
            raise refused(spec.architecture, f"layer {layer} is of {kind}, but its attention gets {reported}")
    is_windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if is_windowed and not kinds and not all(sight.window for sight in seen.sights.values()):
        raise refused(spec.architecture, "its attention does not get the sliding window")


def _check_all_called(spec: ModelSpec, model: nn.Module, path: str, seen: _Seen) -> None:
    called = seen.before.keys() | seen.after.keys()
    names: Iterable[str] = (name for name, _ in with_weights(model, path) if name not in called)
    for name in names:
        raise refused(
            spec.architecture, f"the weights of {name or 'the model itself'} are used by other modules"
        )
