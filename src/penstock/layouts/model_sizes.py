"""The sizes of a model, rank by rank: parameters, bytes of weights as they are held, and bytes of KV cache.

`ModelSpec` counts the parameters, and `families.sharding` cuts them for the ranks of a stage. How many bits a
parameter takes follows from the quantisation of the checkpoint, or from the types in a GGUF file. Only
configurations and the headers of GGUF files are read, never weights; for other models than GGUF files, the
weights need not be on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from penstock.config.engine import ModelConfig, Quantization
from penstock.errors import ModelConfigError
from penstock.families.quantization_spec import BlockQuantization, QuantizationSpec
from penstock.families.registry import load_spec, resolve_model_directory
from penstock.families.sharding import rank_spec, router_parameters_elsewhere
from penstock.families.spec import ITEM_SIZES, ModelSpec
from penstock.kernels.quantized_groups import INT4_GROUP_SIZE

CONFIG_FILE = "config.json"
_SCALE_BITS = 16.0
_LOAD_BITS = {"int8": 8.0, "int4": 4.0 + _SCALE_BITS / INT4_GROUP_SIZE}  # of weights quantised at load
_GGUF_LAYER = re.compile(r"blk\.([0-9]{1,6})\.")
_GGUF_EMBEDDING, _GGUF_HEAD = "token_embd.", "output."


@dataclass(frozen=True, slots=True)
class RankShard:
    """The number of a rank in its stage, and the number of ranks of that stage."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """The amounts that one rank holds, and the amounts that it reads and computes for tokens.

    Attributes:
        num_layers: number of the rank's layers.
        parameters: number of all its parameters.
        weight_bytes: bytes of all its parameters.
        layer_bytes: bytes of its layers' parameters.
        expert_bytes: the part of `layer_bytes` that routed experts have; a step reads only the experts that
            its tokens go through.
        head_bytes: bytes of the output head, which is read when a step samples; 0 on other stages than the
            last.
        token_parameters: parameters of its layers that one token is multiplied with.
        head_parameters: parameters of the output head; 0 on other stages than the last.
        attended_flops: operations of all its layers for each position that a token attends to.
        kv_bytes_per_token: bytes of KV cache for one token, over all its layers.
    """

    num_layers: int
    parameters: int
    weight_bytes: int
    layer_bytes: int
    expert_bytes: int
    head_bytes: int
    token_parameters: int
    head_parameters: int
    attended_flops: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model and the form in which its weights are held.

    Attributes:
        name: name or path of the model, as the user gave it.
        item_bytes: bytes of one number in hidden states and in the KV cache.
        layer_bits: for each layer, the mean bits of a parameter.
        embedding_bits, head_bits: mean bits of a parameter of the embedding, and of the output head.
        form: the form of the weights, in words, such as the name of their quantisation.
    """

    name: str
    spec: ModelSpec
    item_bytes: int
    layer_bits: tuple[float, ...]
    embedding_bits: float
    head_bits: float
    form: str
    _tables: dict[tuple[RankShard, bool], _RankTable] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parameters(self) -> int:
        return self.spec.stage_parameters(0, self.spec.num_layers)

    @property
    def weight_bytes(self) -> int:
        return self.of_rank(0, self.spec.num_layers).weight_bytes

    def of_rank(
        self, start: int, end: int, shard: RankShard = RankShard(0, 1), *, expert_parallel: bool = False
    ) -> RankSizes:
        """Return the sizes of one rank of the stage that has the layers `[start, end)`.

        Args:
            shard: which of the stage's ranks it is; by default the stage has one rank.
            expert_parallel: the ranks of the stage have whole experts, not slices of each.
        """
        key = (shard, expert_parallel)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _RankTable.of(self, shard, expert_parallel=expert_parallel)
        return table.sizes(start, end)

    def hop_bytes(self, num_tokens: int) -> int:
        """Return the bytes of hidden states and residual together, both of which leave a stage [I8].

        A link carries only the sum of the two, which has half of these bytes.
        """
        return self.spec.hidden_state_bytes(num_tokens, self.item_bytes)

    def all_reduce_bytes(self, num_layers: int, num_tokens: int) -> int:
        """Return the bytes that the ranks of a stage add up in a step: hidden states, twice a layer [I9]."""
        return 2 * num_layers * num_tokens * self.spec.hidden_size * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTable:
    """Running sums over the layers, from which the sizes of a rank with any run of layers follow.

    Entry `n` of a list is the sum over the first `n` layers.

    Attributes:
        own: the model with the rank's part of each layer.
    """

    model: ModelSizes
    own: ModelSpec
    parameters: list[int]
    layer_bytes: list[float]
    expert_bytes: list[float]
    token_parameters: list[int]

    @classmethod
    def of(cls, model: ModelSizes, shard: RankShard, *, expert_parallel: bool) -> _RankTable:
        spec = model.spec
        own = rank_spec(spec, shard, expert_parallel=expert_parallel)
        layers, bits = range(spec.num_layers), model.layer_bits
        held = [
            own.layer_parameters(layer) + router_parameters_elsewhere(spec, own, layer) for layer in layers
        ]
        return cls(
            model=model,
            own=own,
            parameters=[0, *accumulate(held)],
            layer_bytes=[0.0, *accumulate(held[layer] * bits[layer] / 8 for layer in layers)],
            expert_bytes=[
                0.0,
                *accumulate(_expert_parameters(own, layer) * bits[layer] / 8 for layer in layers),
            ],
            token_parameters=[
                0,
                *accumulate(_token_parameters(spec, own, layer, shard.size) for layer in layers),
            ],
        )

    def sizes(self, start: int, end: int) -> RankSizes:
        """Return the sizes of the rank if its stage has the layers `[start, end)`."""
        model, own = self.model, self.own
        ends = own.end_parameter_counts(start, end)
        head = own.embedding_parameters() if end == own.num_layers else 0
        parameters = self.parameters[end] - self.parameters[start]
        layer_bytes = self.layer_bytes[end] - self.layer_bytes[start]
        end_bytes = (
            ends["embedding"] * model.embedding_bits / 8
            + ends["head"] * model.head_bits / 8
            + ends["norm"] * model.item_bytes
        )
        return RankSizes(
            num_layers=end - start,
            parameters=parameters + sum(ends.values()),
            weight_bytes=round(layer_bytes + end_bytes),
            layer_bytes=round(layer_bytes),
            expert_bytes=round(self.expert_bytes[end] - self.expert_bytes[start]),
            head_bytes=round(head * model.head_bits / 8),
            token_parameters=self.token_parameters[end] - self.token_parameters[start],
            head_parameters=head,
            attended_flops=4 * own.attended_size * (end - start),
            kv_bytes_per_token=own.kv_bytes_per_token(end - start, model.item_bytes),
        )


def _expert_parameters(own: ModelSpec, layer: int) -> int:
    """Return the parameters of a layer's routed experts, without the router and the shared expert."""
    experts = own.experts_of(layer)
    return 0 if experts is None else 3 * own.hidden_size * experts.num_experts * experts.inner_size


def _token_parameters(spec: ModelSpec, own: ModelSpec, layer: int, num_ranks: int) -> int:
    """Return the parameters of a rank's layer that one token is multiplied with.

    With experts it is a mean over the ranks: the experts that a token goes through are on some of them.
    """
    experts = spec.experts_of(layer)
    if experts is None:
        return own.token_parameters(layer)
    return own.attention_parameters() + experts.parameters_of_token(spec.hidden_size) // num_ranks


def read_sizes(config: ModelConfig) -> ModelSizes:
    """Return the sizes of the model that a config names.

    It names a directory, a model that is on this machine, a GGUF file, or a `config.json`.

    Raises:
        ModelError: there is no such model, or it is not supported.
    """
    path = _path_of(config.model)
    spec = load_spec(path, config.model_impl, dequantize=config.gguf_dequantize)
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    item_bytes = ITEM_SIZES.get(dtype, ITEM_SIZES["float32"])
    if spec.quantization is not None and isinstance(spec.quantization, BlockQuantization):
        bits = _gguf_bits(path, spec, 8.0 * item_bytes)
    else:
        bits = _checkpoint_bits(spec, config.quantization, 8.0 * item_bytes)
    return ModelSizes(
        name=config.model,
        spec=spec,
        item_bytes=item_bytes,
        layer_bits=bits.layers,
        embedding_bits=bits.embedding,
        head_bits=bits.head,
        form=_form(spec, config.quantization, dtype),
    )


def _path_of(model: str) -> Path:
    """Return the directory of a model; the path of a `config.json` stands for the directory that it is in."""
    path = Path(os.path.expanduser(model))
    if path.suffix == ".json" and os.path.isfile(path):  # an impossible name is absent, and no error
        if path.name != CONFIG_FILE:
            raise ModelConfigError(
                f"{path} is not called {CONFIG_FILE}.",
                remedy=f"Give the {CONFIG_FILE} of a model, or its directory.",
                param="model",
            )
        return path.parent.resolve()  # the file itself may be a link to one with another name, in a cache
    return resolve_model_directory(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bits:
    layers: tuple[float, ...]
    embedding: float
    head: float


def _form(spec: ModelSpec, quantization: Quantization, dtype: str) -> str:
    if spec.quantization is not None:
        return spec.quantization.describe()
    return dtype if quantization == "none" else quantization


def _checkpoint_bits(spec: ModelSpec, load: Quantization, plain: float) -> _Bits:
    """Return the bits of a parameter in a checkpoint of safetensors, as ranks hold it.

    Args:
        load: how weights are quantised at load, if the checkpoint is not quantised: all matrices that tokens
            are multiplied with, and not the embedding and the norms.
        plain: bits of a weight that is not quantised.
    """
    if spec.quantization is None and load != "none":
        bits = _LOAD_BITS[load]
        layers = tuple(_mixed(spec, layer, bits, bits, plain) for layer in range(spec.num_layers))
        return _Bits(layers=layers, embedding=plain, head=bits)
    if not isinstance(spec.quantization, QuantizationSpec):
        return _Bits(layers=(plain,) * spec.num_layers, embedding=plain, head=plain)
    quantization = spec.quantization
    layers = tuple(
        _mixed(
            spec,
            layer,
            _scheme_bits(quantization, f"model.layers.{layer}.self_attn.o_proj", plain),
            _scheme_bits(quantization, f"model.layers.{layer}.{_down_name(spec, layer)}", plain),
            plain,
        )
        for layer in range(spec.num_layers)
    )
    # Checkpoints of gptq and awq leave the head in floats. One of compressed-tensors says whether it does.
    says_head = quantization.method == "compressed-tensors"
    return _Bits(
        layers=layers,
        embedding=plain,
        head=_scheme_bits(quantization, "lm_head", plain) if says_head else plain,
    )


def _down_name(spec: ModelSpec, layer: int) -> str:
    experts = spec.experts_of(layer)
    if experts is None:
        return "mlp.down_proj"
    return f"{experts.names.block}.experts.0.{experts.names.down}"


def _scheme_bits(quantization: QuantizationSpec, projection: str, plain: float) -> float:
    """Return the bits of a weight of one projection, including its share of the scales and zero points."""
    scheme = quantization.scheme(projection)
    if scheme is None:
        return plain
    if scheme.group_size is None:
        return float(scheme.bits)
    zero_bits = 0 if scheme.symmetric else scheme.bits
    return scheme.bits + (_SCALE_BITS + zero_bits) / scheme.group_size


def _mixed(spec: ModelSpec, layer: int, attention: float, mlp: float, plain: float) -> float:
    """Return the mean bits of a layer's parameters.

    Args:
        attention, mlp, plain: bits of a parameter of these two parts, and of the norms.
    """
    whole, norms = spec.layer_parameters(layer), spec.norm_parameters()
    of_attention = spec.attention_parameters()
    of_mlp = whole - norms - of_attention
    return (of_attention * attention + of_mlp * mlp + norms * plain) / whole


def _gguf_bits(path: Path, spec: ModelSpec, plain: float) -> _Bits:
    """Return the mean bits of a parameter in a GGUF file, as ranks hold it.

    Args:
        plain: bits of a float tensor's parameter, which is converted to the dtype at load.
    """
    from penstock.families.gguf_types import FLOAT_TYPES  # here: numpy is slow to import
    from penstock.gguf.file import GgufFile

    held: dict[str, tuple[float, int]] = {}
    for name, tensor in GgufFile.open(path).tensors.items():
        values = 1
        for size in tensor.shape:
            values *= size
        bits = plain * values if tensor.type.name in FLOAT_TYPES else 8.0 * tensor.num_bytes
        for part in _parts_of(name):
            before = held.get(part, (0.0, 0))
            held[part] = (before[0] + bits, before[1] + values)

    def mean(part: str, default: float) -> float:
        bits, values = held.get(part, (0.0, 0))
        return bits / values if values else default

    embedding = mean("embedding", plain)
    return _Bits(
        layers=tuple(mean(str(layer), plain) for layer in range(spec.num_layers)),
        embedding=embedding,
        head=mean("head", embedding),
    )


def _parts_of(name: str) -> Iterator[str]:
    match = _GGUF_LAYER.match(name)
    if match:
        yield str(int(match[1]))
    elif name.startswith(_GGUF_EMBEDDING):
        yield "embedding"
    elif name.startswith(_GGUF_HEAD):
        yield "head"
