"""A stage of any causal model of transformers: its layers, with our KV cache and pipeline [A16].

`TransformersModel` does what `models.decoder.Decoder` does, with transformers' own modules: it is built by
`rank.loading` where `ModelSpec.implementation` says so. transformers' loop over the layers runs as it is,
over a list in which other stages' layers are stand-ins. The modules before the layers are real on the first
stage only, and those after them on the last; elsewhere they are stand-ins that give zeros.

    first stage     embedding ▶ positions ▶ layers ▶ stand-ins, the first of which keeps its input
    middle stage    (zeros) ▶ stand-ins, which return what was received ▶ layers ▶ stand-ins
    last stage      (zeros) ▶ stand-ins ▶ layers ▶ norm; then the head, for sampled tokens alone
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from penstock.attention.metadata import AnyKV, AttentionMetadata, LayerKV
from penstock.attention.torch_paged import TorchPagedAttention
from penstock.attention.torch_paged import attend as paged_attend
from penstock.families.spec import ModelSpec
from penstock.kernels.candidates import HeadOutput, HeadRequest, head_output_of
from penstock.kernels.cpu.ops import Sight
from penstock.layers.compute import Compute
from penstock.layers.missing import NotHere, OtherLayer
from penstock.models.interfaces import BeforeLayer
from penstock.models.intermediate import IntermediateTensors, make_empty_intermediate_tensors_factory
from penstock.models.transformers_attention import refused
from penstock.models.transformers_survey import Survey, survey
from penstock.models.transformers_weights import (
    check_layers,
    checkpoint_weights,
    compute_buffers,
    materialise,
    sources_of,
    weight_tree,
)

_OUTPUT = "output"  # name of the tensor behind the final norm, which the last stage's head reads


@dataclass(slots=True)
class _StagePass:
    """One forward pass of a stage; implements `transformers_attention.Passage`.

    Attributes:
        received: [1, num_tokens, hidden], the input of the first own layer.
        given: [1, num_tokens, hidden], the output of the last own layer; None until the stand-in behind that
            layer has got it.
    """

    received: Tensor
    first_layer: int
    kv: Sequence[AnyKV]
    metadata: AttentionMetadata
    before_layer: BeforeLayer | None = None
    given: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.received.shape[1]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        kv = self.kv[layer - self.first_layer]
        assert isinstance(kv, LayerKV)
        if self.before_layer is not None:
            self.before_layer(layer - self.first_layer)
        query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        return paged_attend(query, key, value, kv, self.metadata, sight)[None]


class _Output:
    """The output of a model of transformers: hidden states; any other field that a head reads is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """A stand-in for all that comes before the head: it passes on the hidden states in `inputs_embeds`."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        return _Output(inputs_embeds)


class TransformersModel(nn.Module):
    """The layers `[start, end)` of a model of transformers; its calls are those of `models.decoder.Decoder`.

    Args:
        directory: directory of the checkpoint, for its `config.json`.
        stored: names of all tensors of the checkpoint.
        max_model_len: longest sequence in tokens.

    Raises:
        UnsupportedModelError: the model cannot be cut, or computes in a way that is not built. Nothing has
            been allocated then.
        NotEnoughMemoryError: the device refuses.

    Attributes:
        attention: the attention backend of all layers; knows how their keys and values lie in memory.
    """

    supports_pp: ClassVar[Literal[True]] = True

    def __init__(
        self,
        spec: ModelSpec,
        layer_range: tuple[int, int],
        *,
        directory: Path,
        stored: Collection[str],
        compute: Compute,
        max_model_len: int,
    ) -> None:
        super().__init__()
        self.start_layer, self.end_layer = layer_range
        self._is_last = self.end_layer == spec.num_layers
        seen = survey(directory, spec, compute.dtype, max_model_len)
        self._head = (_head_alone(seen, spec),)
        self._track = seen.track
        self._tree = _load_on(seen, spec, layer_range, stored, compute)
        # In a tuple, so that torch does not register them: `_tree` has the same weights, by the checkpoint's
        # names.
        self._whole = (seen.model, seen.model.get_submodule(seen.body_path), seen.layers)
        self.attention = TorchPagedAttention(seen.heads, compute.dtype)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            spec.hidden_size, dtype=compute.dtype, device=compute.device
        )

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the model, placeholders outside the own range."""
        return self._whole[2]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the weights under the names of the checkpoint."""
        yield from self._tree.named_modules(memo, prefix, remove_duplicate)

    def embed(self, input_ids: Tensor) -> IntermediateTensors:
        """Return the input of the first layers' `forward` for [num_tokens] int64."""
        return _intermediate(self._whole[0].get_input_embeddings()(input_ids[None])[0])

    def record(self, kv: Sequence[AnyKV], max_num_tokens: int) -> None:
        """Do nothing: transformers' layers do not call our kernels."""

    def forward(
        self,
        tensors: IntermediateTensors,
        positions: Tensor,
        kv: Sequence[AnyKV],
        metadata: AttentionMetadata,
        before_layer: BeforeLayer | None = None,
    ) -> IntermediateTensors:
        """Run the own layers; on the last stage the final norm too.

        Args:
            tensors: from `embed` or from the stage before; their `residual` is not read.
            positions: [num_tokens] int64.
            kv: storage of the own layers, in order.
            before_layer: called before the attention of each own layer; None: nothing is.
        """
        received = tensors["hidden_states"][None]
        if not len(positions):  # a step without tokens, such as a probe: transformers cannot compute it
            return self.make_empty_intermediate_tensors(0)
        running = _StagePass(
            received=received,
            first_layer=self.start_layer,
            kv=kv,
            metadata=metadata,
            before_layer=before_layer,
        )
        first = received if self.start_layer == 0 else torch.zeros_like(received)  # may be written over
        with self._track.run(running):
            output = self._whole[1](inputs_embeds=first, position_ids=positions[None], use_cache=False)
        if self._is_last:  # beside what was received: the output may be of another width
            return IntermediateTensors(dict(tensors.items()) | {_OUTPUT: output.last_hidden_state[0]})
        assert running.given is not None
        return _intermediate(running.given[0])

    def final_states(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        """Return the input of the model's head for the tokens `indices` ([n] int64): [n, hidden]."""
        return tensors[_OUTPUT].index_select(0, indices)

    def compute_logits(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        """Return logits [num_rows, vocab] float32 after the tokens `indices` ([num_rows] int64)."""
        rows = self.final_states(tensors, indices)[None]
        logits: Tensor = self._head[0](inputs_embeds=rows, use_cache=False).logits[0]
        return logits.float()

    def compute_candidates(
        self, tensors: IntermediateTensors, indices: Tensor, request: HeadRequest
    ) -> HeadOutput:
        """Return what sampling asks of the logits after the tokens `indices` ([num_rows] int64)."""
        return head_output_of(self.compute_logits(tensors, indices), request)


def _load_on(
    seen: Survey, spec: ModelSpec, layer_range: tuple[int, int], stored: Collection[str], compute: Compute
) -> nn.Module:
    """Give the stage's own modules memory, and put stand-ins in the place of all others.

    Returns:
        The own weights under the names of the checkpoint.
    """
    model, (start, end) = seen.model, layer_range
    sources = sources_of(model, stored)
    check_layers(seen.layers_path, spec.num_layers, sources)
    own = [
        *(seen.layers[index] for index in range(start, end)),
        *(model.get_submodule(name) for name in seen.before if start == 0),
        *(model.get_submodule(name) for name in seen.after if end == spec.num_layers),
    ]
    weights = materialise(model, own, compute)
    tree = weight_tree(model, dict(checkpoint_weights(model, weights, sources)))
    _put_stand_ins(seen, spec, layer_range, compute)
    compute_buffers(model, model.modules(), compute.device)
    return tree


def _put_stand_ins(seen: Survey, spec: ModelSpec, layer_range: tuple[int, int], compute: Compute) -> None:
    model, layers, (start, end) = seen.model, seen.layers, layer_range
    for index, layer in enumerate(list(layers)):
        if not start <= index < end:
            is_earlier = index < start
            layers[index] = OtherLayer(
                layer, seen.track, is_earlier=is_earlier, gives_tuples=seen.gives_tuples
            )
    here: set[str] = set()
    here.update(seen.before if start == 0 else (), seen.after if end == spec.num_layers else ())
    for name, width in (dict(seen.before) | dict(seen.after)).items():
        if name not in here:
            model.set_submodule(name, NotHere(width, seen.track, compute))


def _head_alone(seen: Survey, spec: ModelSpec) -> nn.Module:
    """Return a model with the head alone, which computes what follows the module that runs the layers."""
    if not seen.body_path:
        raise refused(spec.architecture, "its layers are not in a separate module")
    head = node = _shell_of(seen.model)
    *parents, body = seen.body_path.split(".")
    for parent in parents:
        child = _shell_of(node.get_submodule(parent))
        node._modules[parent] = child
        node = child
    node._modules[body] = _Given()
    rows = torch.zeros((1, 1, seen.output_width), dtype=seen.model.dtype, device="meta")
    try:
        head(inputs_embeds=rows, use_cache=False)
    except Exception as error:
        raise refused(spec.architecture, f"its head does not run alone: {error}") from error
    return head


def _shell_of(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose submodules can be replaced without a change of the original."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


def _intermediate(hidden_states: Tensor) -> IntermediateTensors:
    return IntermediateTensors({"hidden_states": hidden_states, "residual": torch.zeros_like(hidden_states)})
