"""Seeded random checkpoints, and safetensors files in any state, as a Hugging Face directory would hold them.

The writer is deliberately plain: tests also use it to write files that are wrong on purpose.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.weights.checkpoint import read_header

Family = Literal["llama", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

# Fields that a family's checkpoints have besides those of Llama; an argument wins.
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}

# Rope scaling that bends the frequencies of even a small model.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def make_checkpoint(
    directory: Path,
    *,
    family: Family = "llama",
    tied: bool = False,
    kv_heads: int = 2,
    seed: int = 0,
    layers: int = 4,
    heads: int = 4,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    vocab_size: int = 96,
    max_positions: int = 256,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    **config: Any,
) -> Path:
    """Write `config.json` and seeded random weights into `directory`; further fields go to `config.json`.

    No tokenizer is written. The weights are large enough that greedy tokens wander instead of repeating.
    """
    fields = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_FAMILY_FIELDS.get(family, {}),
        **config,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    shapes = tensor_shapes(fields)
    tensors = random_tensors(shapes, seed=seed, dtype=dtype)
    write_weights(directory, tensors, num_shards=num_shards)
    return directory


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensors of a configuration, in the order in which transformers names them."""
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_qwen = config["model_type"] in ("qwen2", "qwen2_moe")
    qkv_bias = is_qwen or config.get("attention_bias", False)
    o_bias, mlp_bias = config.get("attention_bias", False) and not is_qwen, config.get("mlp_bias", False)
    projections = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, o_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        mlp = {name: (*shape, mlp_bias) for name, shape in _mlp_shapes(config, layer).items()}
        for name, (rows, columns, has_bias) in (projections | mlp).items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if config["model_type"] == "qwen3_moe":
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _mlp_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, int]]:
    """Of a layer's MLP, or of its experts."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "mixtral":
        block, (gate, up, down), count = "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"]
    else:
        block, (gate, up, down), count = "mlp", ("gate_proj", "up_proj", "down_proj"), 0
    if config["model_type"] in ("qwen2_moe", "qwen3_moe") and _is_sparse(config, layer):
        inner, count = config["moe_intermediate_size"], config["num_experts"]
    expert = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    if not count:
        return {f"{block}.{name}": shape for name, shape in expert.items()}
    shapes = {f"{block}.gate": (count, hidden)}
    shapes |= {
        f"{block}.experts.{index}.{name}": shape for index in range(count) for name, shape in expert.items()
    }
    if config["model_type"] == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        shapes |= {f"{block}.shared_expert.{name}": (shared, hidden) for name in (gate, up)}
        shapes[f"{block}.shared_expert.{down}"] = (hidden, shared)
        shapes[f"{block}.shared_expert_gate"] = (1, hidden)
    return shapes


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """One generator draws all tensors in order, so a seed names the model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random_tensor(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if len(shape) == 1:
        return 0.3 * noise
    if "embed_tokens" in name:
        return 0.5 * noise
    return noise * (1.5 / math.sqrt(shape[1]))


def write_weights(directory: Path, tensors: Mapping[str, Tensor], *, num_shards: int = 1) -> None:
    """`model.safetensors`, or shards of consecutive tensors with their index."""
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        own = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        write_safetensors(directory / file, {name: tensors[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with the tensors in the given order."""
    header, chunks, offset = {}, [], 0
    for name, tensor in tensors.items():
        chunk = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        chunks.append(chunk)
        offset += len(chunk)
    write_raw_safetensors(path, header, b"".join(chunks))


def write_raw_safetensors(path: Path, header: object, data: bytes) -> None:
    """Any header over any data; a str or bytes header is written as it is."""
    if isinstance(header, str):
        header = header.encode()
    content = (
        header
        if isinstance(header, bytes)
        else json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    )
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


# --- Quantised checkpoints: written by the formulas of the formats, without a look at the reader ---------

QuantizedLayout = Literal["gptq", "gptq_v2", "awq", "packed", "int8"]

_PROJECTIONS = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlp|mlp\.shared_expert)\.\w+_proj|\w+\.experts\.\d+\.\w+)\.weight"
)
_AWQ_COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True, kw_only=True)
class QuantizedWeights:
    """A matrix in pieces: w[o, i] = scales[o, g] * (values[o, i] - zeros[o, g]) with g = groups[i]."""

    bits: int
    values: Tensor  # [out, in] int64, unsigned
    scales: Tensor  # [out, groups] of the dtype in the file
    zeros: Tensor  # [out, groups] int64, unsigned
    groups: Tensor  # [in] int64

    def dequantized(self) -> Tensor:
        """[out, in] in float32: exact, for a scale has few enough bits."""
        shifted = (self.values - self.zeros[:, self.groups]).to(torch.float32)
        return shifted * self.scales.to(torch.float32)[:, self.groups]


def quantize_at_random(
    weight: Tensor,
    *,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    generator: torch.Generator,
    scatter: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantizedWeights:
    """Round a matrix to groups of columns; zeros of an asymmetric one are drawn, so all of them occur.

    `scatter` deals the columns to the groups at random, as a quantiser does that goes by activations.
    """
    out_size, in_size = weight.shape
    size = group_size or in_size
    groups = torch.arange(in_size) // size
    num_groups = int(groups[-1]) + 1
    if scatter:
        groups = groups[torch.randperm(in_size, generator=generator)]
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    zeros = torch.full((out_size, num_groups), middle)
    if not symmetric:
        zeros = torch.randint(0, top + 1, (out_size, num_groups), generator=generator)
    largest = torch.zeros(out_size, num_groups)
    largest = largest.scatter_reduce(1, groups.expand(out_size, -1), weight.float().abs(), "amax")
    scales = (largest.clamp(min=1e-3) / (middle - 1)).to(scale_dtype)
    ratio = weight.float() / scales.float()[:, groups]
    values = (ratio.round().to(torch.int64) + zeros[:, groups]).clamp(0, top)
    return QuantizedWeights(bits=bits, values=values, scales=scales, zeros=zeros, groups=groups)


def pack_words(values: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int64 [rows, columns] -> int32 [rows, words]; the i-th bits of a word hold its column order[i]."""
    per_word = 32 // bits
    order = order or range(per_word)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    words = values.view(values.shape[0], -1, per_word)
    packed = sum(words[:, :, column] << (bits * place) for place, column in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def quantized_tensors(
    layout: QuantizedLayout, weights: QuantizedWeights, *, symmetric: bool, scattered: bool = False
) -> dict[str, Tensor]:
    """The tensors of one projection, by the last part of their names."""
    bits, middle = weights.bits, 1 << (weights.bits - 1)
    values, zeros, scales = weights.values, weights.zeros, weights.scales
    if layout in ("gptq", "gptq_v2"):
        lacking = 1 if layout == "gptq" else 0
        return {
            "qweight": pack_words(values, bits).t().contiguous(),
            "qzeros": pack_words((zeros.t() - lacking) % (1 << bits), bits),
            "scales": scales.t().contiguous(),
            "g_idx": weights.groups.to(torch.int32),
        }
    if layout == "awq":
        return {
            "qweight": pack_words(values.t().contiguous(), bits, _AWQ_COLUMN_OF_NIBBLE),
            "qzeros": pack_words(zeros.t().contiguous(), bits, _AWQ_COLUMN_OF_NIBBLE),
            "scales": scales.t().contiguous(),
        }
    if layout == "int8":
        tensors = {"weight": (values - middle).to(torch.int8), "weight_scale": scales}
        return tensors | ({} if symmetric else {"weight_zero_point": (zeros - middle).to(torch.int8)})
    tensors = {
        "weight_packed": pack_words(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(values.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(zeros.t().contiguous(), bits).t().contiguous()
    return tensors | ({"weight_g_idx": weights.groups.to(torch.int32)} if scattered else {})


def quantization_config(
    layout: QuantizedLayout, *, bits: int, group_size: int | None, symmetric: bool, scattered: bool = False
) -> dict[str, Any]:
    """The `quantization_config` that the writers of these formats give."""
    if layout in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size or -1,
            "desc_act": scattered,
            "sym": symmetric,
            "checkpoint_format": layout,
            "lm_head": False,
        }
    if layout == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group_size or -1,
            "zero_point": not symmetric,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
        "dynamic": False,
        "actorder": "group" if scattered else None,
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if layout == "packed" else "int-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if layout == "int8" else None,
                "output_activations": None,
            }
        },
    }


def make_quantized_checkpoint(
    directory: Path,
    layout: QuantizedLayout,
    *,
    bits: int = 4,
    group_size: int | None = 16,
    symmetric: bool = True,
    scatter: bool = False,
    seed: int = 0,
    num_shards: int = 1,
    plain: Path | None = None,
    **config: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint whose layers are quantised, and give all its tensors dequantised, in float32.

    Args:
        bits, group_size, symmetric, scatter: see `quantize_at_random`; `awq` has 4 bits, `int8` has 8.
        plain: also write the dequantised tensors, as an ordinary checkpoint in float32, into this directory.
        config: further arguments of `make_checkpoint`. Sizes of projections must be multiples of 32 / bits.
    """
    shape = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    fields = quantization_config(layout, **shape, scattered=scatter)
    config_file = {"torch_dtype": "float16", "quantization_config": fields} | config
    make_checkpoint(directory, seed=seed, num_shards=num_shards, **config_file)  # its weights are replaced
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in random_tensors(tensor_shapes(written), seed=seed).items():
        if not _PROJECTIONS.fullmatch(name):
            stored[name] = tensor.to(torch.float16)
            dequantized[name] = stored[name].to(torch.float32)
            continue
        weights = quantize_at_random(tensor, **shape, scatter=scatter, generator=generator)
        parts = quantized_tensors(layout, weights, symmetric=symmetric, scattered=scatter)
        stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        dequantized[name] = weights.dequantized()
    write_weights(directory, stored, num_shards=num_shards)
    if plain is not None:
        make_checkpoint(plain, seed=seed, **config)
        write_weights(plain, dequantized)
    return dequantized


def change_one_element(directory: Path, tensor: str) -> None:
    """Change the element in the middle of a tensor by the lowest bit."""
    entry = read_header(directory / "model.safetensors")[tensor]
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek((entry.begin + entry.end) // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
