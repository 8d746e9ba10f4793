"""The sizes of a model, rank by rank: parameters, bytes of weights as they are held, and bytes of KV cache.

Made of what the families know: `ModelSpec` counts parameters, `families.sharding` cuts them for the ranks of
a stage, the quantisation of a checkpoint or the types of a GGUF file say how many bits they take. Reads
configurations and headers; no weights, and none need be there.
"""

from __future__ import annotations

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
_LOAD_BITS = {"int8": 8.0, "int4": 4.0 + _SCALE_BITS / INT4_GROUP_SIZE}
_GGUF_LAYER = re.compile(r"blk\.([0-9]{1,6})\.")
_GGUF_EMBEDDING, _GGUF_HEAD = "token_embd.", "output."


@dataclass(frozen=True, slots=True)
class RankShard:
    """A rank among those of its stage."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """The amounts that one rank holds, and that it reads and computes for tokens.

    Attributes:
        weight_bytes: bytes of all its parameters.
        layer_bytes: bytes of its layers.
        expert_bytes: bytes of all experts in its layers; they are read as far as tokens need them.
        head_bytes: bytes of the output head, where it is here; read when a step samples.
        token_parameters: parameters of its layers that one token is multiplied with.
        head_parameters: parameters of the output head.
        attended_flops: operations for each position that a token attends to, over its layers.
        kv_bytes_per_token: bytes over its layers.
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
        name: as the user gave it.
        item_bytes: bytes of a number that is computed with, also in the KV cache.
        layer_bits: bits of a parameter of each layer, on average.
        embedding_bits, head_bits: bits of a parameter of these.
        form: the form of the weights, in words.
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
        """Return the sizes of a rank of the stage with layers `[start, end)`."""
        key = (shard, expert_parallel)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _RankTable.of(self, shard, expert_parallel=expert_parallel)
        return table.sizes(start, end)

    def hop_bytes(self, num_tokens: int) -> int:
        """Return the bytes of hidden states and residual between two stages [I8].

        A link carries their sum, which is half.
        """
        return self.spec.hidden_state_bytes(num_tokens, self.item_bytes)

    def all_reduce_bytes(self, num_layers: int, num_tokens: int) -> int:
        """Return the bytes that ranks of a stage sum in a step: hidden states, twice a layer [I9]."""
        return 2 * num_layers * num_tokens * self.spec.hidden_size * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTable:
    """Sums over the layers up to each, for one rank of a stage that had all of them.

    Attributes:
        own: the model as the rank has it.
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
        """Return the sizes of the rank with layers `[start, end)`."""
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
    """Return the parameters of a layer's experts, without router and the shared one."""
    experts = own.experts_of(layer)
    return 0 if experts is None else 3 * own.hidden_size * experts.num_experts * experts.inner_size


def _token_parameters(spec: ModelSpec, own: ModelSpec, layer: int, num_ranks: int) -> int:
    """Return the parameters of a rank's layer that one token is multiplied with; of experts on average."""
    experts = spec.experts_of(layer)
    if experts is None:
        return own.token_parameters(layer)
    return own.attention_parameters() + experts.parameters_of_token(spec.hidden_size) // num_ranks


def read_sizes(config: ModelConfig) -> ModelSizes:
    """Return the sizes of a model: a directory, a name of this machine, a GGUF file, or a `config.json`.

    Raises:
        ModelError: there is no such model, or it is not served.
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
    """Return the directory of a model; a `config.json` alone stands for the directory it is in."""
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        if path.name != CONFIG_FILE:
            raise ModelConfigError(
                f"{path} is not called {CONFIG_FILE}.",
                remedy=f"Give the {CONFIG_FILE} of a model, or its directory.",
                param="model",
            )
        return path.resolve().parent
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
    """Return the bits of a checkpoint in safetensors; all that is multiplied is quantised at load."""
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
    # Checkpoints of gptq and awq leave the head in floats; compressed-tensors names the head where it does.
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
    """Return the bits of a weight of one projection, with its share of scales and zero points."""
    scheme = quantization.scheme(projection)
    if scheme is None:
        return plain
    if scheme.group_size is None:
        return float(scheme.bits)
    zero_bits = 0 if scheme.symmetric else scheme.bits
    return scheme.bits + (_SCALE_BITS + zero_bits) / scheme.group_size


def _mixed(spec: ModelSpec, layer: int, attention: float, mlp: float, plain: float) -> float:
    """Return the mean bits of a layer's parameters."""
    whole, norms = spec.layer_parameters(layer), spec.norm_parameters()
    of_attention = spec.attention_parameters()
    of_mlp = whole - norms - of_attention
    return (of_attention * attention + of_mlp * mlp + norms * plain) / whole


def _gguf_bits(path: Path, spec: ModelSpec, plain: float) -> _Bits:
    """Return the bits of the tensors of a GGUF file; floats become numbers of the dtype at load."""
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
