"""Seeded random checkpoints, and safetensors files in any state, as a Hugging Face directory would hold them.

The writer is deliberately plain: tests also use it to write files that are wrong on purpose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Family = Literal["llama", "qwen2"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
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
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_qwen = config["model_type"] == "qwen2"
    qkv_bias = is_qwen or config.get("attention_bias", False)
    o_bias, mlp_bias = config.get("attention_bias", False) and not is_qwen, config.get("mlp_bias", False)
    projections = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, o_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


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
