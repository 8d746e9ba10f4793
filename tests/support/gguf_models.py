"""Makes GGUF files of checkpoints, as llama.cpp's converter would, and of random blocks.

Names, metadata and the order of rows follow the converter's description, and nothing here calls what reads
them. Weights that are to be in blocks are replaced by random blocks; `plain` checkpoints get their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import write_weights
from gguf_files import Stored, write_gguf, write_parts
from penstock.gguf.block_types import PACKAGE_TYPES, TYPES
from penstock.kernels.block_formats import BLOCK_FORMATS, BlockFormat
from penstock.kernels.block_rows import dequantize
from penstock.weights.gguf_blocks import decode_rows
from penstock.weights.gguf_package import decode_floats

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Ministral3ForCausalLM": "mistral3",
    "GemmaForCausalLM": "gemma",
    "OlmoeForCausalLM": "olmoe",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GlmForCausalLM": "chatglm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Dots1ForCausalLM": "dots1",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeLiteForCausalLM": "deepseek2",
}
_REORDERED = ("llama", "mistral3", "smollm3", "granite")
_ROUTED = ("glm4moe", "dots1", "deepseek2")  # experts as DeepSeek's
_NAMES = [  # the first that fits
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.qkv_proj", "attn_qkv"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.shared_expert\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"(mlp|block_sparse_moe)\.gate", "ffn_gate_inp"),
    (r"input_layernorm", "attn_norm"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
    (r"post_self_attn_layernorm", "post_attention_norm"),
    (r"post_mlp_layernorm", "post_ffw_norm"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attn_\1_a_norm"),
    (r"self_attn\.q_a_proj", "attn_q_a"),
    (r"self_attn\.(q|k|v|kv)_b_proj", r"attn_\1_b"),
    (r"(eh_proj|enorm|hnorm|embed_tokens)", r"nextn.\1"),
    (r"shared_head\.(head|norm)", r"nextn.shared_head_\1"),
]
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_D_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}  # where a block has its float16

FormatOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file with what was written into it, and a checkpoint in float32 with the same numbers."""

    path: Path
    plain: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def random_blocks(
    block_format: BlockFormat, rows: int, columns: int, seed: int, size: float = 0.05
) -> np.ndarray:
    """Return blocks whose weights are about so large: uint8 [rows, bytes of a row]."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, block_format.row_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1, block_format.block_bytes)
    scales = rng.normal(0, 1, (len(blocks), 2)).astype(np.float16)
    places = _D_AT.get(block_format.name, (0, 2) if block_format.has_offsets else (0,))
    for index, at in enumerate(places):
        blocks[:, at : at + 2] = scales[:, index : index + 1].view(np.uint8)
    values = dequantize(decode_rows(block_format, torch.from_numpy(raw), columns))
    factor = size / float(values.std())
    for index, at in enumerate(places):
        small = (scales[:, index : index + 1] * np.float16(factor)).astype(np.float16)
        blocks[:, at : at + 2] = small.view(np.uint8)
    return raw


def as_gguf(
    checkpoint: Path,
    directory: Path,
    format_of: FormatOf = lambda name: None,
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
    num_parts: int = 1,
    *,
    architecture: str = "",
    is_old: bool = False,
    is_fused: bool = False,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    more_metadata: Mapping[str, Any] = MappingProxyType({}),
) -> GgufModel:
    """Write the model of a checkpoint as GGUF.

    Args:
        format_of: the type of a tensor's blocks, by its name in the file; None: float32, as it is. Types of
            the package `gguf` are decoded by it.
        extra: further tensors of floats.
        num_parts: files that the model is split into.
        architecture: as the file is to name it; empty: as the converter would.
        is_old: as before 2025: latent vectors are projected to keys and values by one tensor, and what the
            converter did not yet write is left out.
        is_fused: query, key and value are one tensor, and so are gates and ups of experts.
        metadata: of the architecture, beside or in place of the converter's; None leaves a value out.
        more_metadata: beside those of the model, such as a vocabulary.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    name = architecture or ARCHITECTURES[config["architectures"][0]]
    tensors: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors |= {key: value.float() for key, value in load_file(path).items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    directory.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Stored] = {}
    if name == "deepseek2" and not is_old:
        tensors = _with_latents_apart(tensors, config)
    plain = dict(tensors)
    for gguf_name, members in _grouped(tensors, name).items():
        values = (
            torch.stack([tensors[member] for member in members])
            if ".experts." in members[0]
            else tensors[members[0]]
        )
        heads = _heads(name, gguf_name, config)
        if values.dim() == 2 and "ffn_gate_inp_shexp" in gguf_name:
            values = values[0]
        if "_norm." in gguf_name and name.startswith("gemma"):
            values = values + 1
        block = format_of(gguf_name)
        if block is None:
            stored[gguf_name] = Stored.of(_reordered(values, heads).numpy())
            continue
        kind, raw, numbers = _in_blocks(block, values, seed=sum(gguf_name.encode()))
        stored[gguf_name] = Stored(shape=tuple(values.shape), kind=kind, content=raw.tobytes())
        for member, own in zip(members, numbers if len(members) > 1 else [numbers], strict=True):
            plain[member] = _in_order(own, heads).contiguous()
    stored |= {key: Stored.of(values) for key, values in extra.items()}
    if is_fused:
        stored = _fused(stored)
    own = _metadata(name, config, is_old=is_old) | {f"{name}.{key}": value for key, value in metadata.items()}
    written = {key: value for key, value in (own | dict(more_metadata)).items() if value is not None}
    path = _write(directory, written, stored, num_parts)
    (directory / "plain").mkdir(exist_ok=True)
    (directory / "plain" / "config.json").write_text(json.dumps(config))
    write_weights(directory / "plain", _with_latents_together(plain))
    return GgufModel(path, directory / "plain", written, stored)


def _write(
    directory: Path, metadata: Mapping[str, Any], stored: Mapping[str, Stored], num_parts: int
) -> Path:
    if num_parts == 1:
        return write_gguf(directory / "model.gguf", metadata, stored)
    names = list(stored)
    parts = [{name: stored[name] for name in names[part::num_parts]} for part in range(num_parts)]
    return write_parts(directory, "model", metadata, parts)[0]


def _in_blocks(name: str, values: Tensor, seed: int) -> tuple[int, np.ndarray, Tensor]:
    """Return the type's number, random blocks of it for a tensor, and the numbers that they stand for."""
    columns = values.shape[-1]
    rows = values.numel() // columns
    if name in PACKAGE_TYPES:
        raw = random_package_blocks(name, rows, columns, seed)
        number = next(kind.number for kind in TYPES.values() if kind.name == name)
        return number, raw, decode_floats(name, torch.from_numpy(raw)).view(values.shape)
    form = BLOCK_FORMATS[name]
    raw = random_blocks(form, rows, columns, seed=seed, size=float(values.std()))
    numbers = dequantize(decode_rows(form, torch.from_numpy(raw), columns))
    return form.number, raw, numbers.view(values.shape)


def random_package_blocks(name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return blocks of a type that the package `gguf` decodes, with small scales: uint8 [rows, row bytes]."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    raw = np.random.default_rng(seed).integers(0, 256, (rows, kind.num_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1, kind.block_bytes)
    scale = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 121  # 2 ** (121 - 128)
    elif name == "IQ1_M":  # four bits in each of four words
        nibbles = np.array([scale[0] & 15, scale[0] >> 4, scale[1] & 15, scale[1] >> 4])
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | (nibbles << 4).astype(np.uint8)
    else:
        at = kind.block_bytes - 2 if name.startswith("TQ") else 0
        blocks[:, at : at + 2] = scale
    return raw


def pieces_metadata(tokenizer: Path) -> dict[str, Any]:
    """Return a `tokenizer.json` of pieces and merges as the keys of a SentencePiece vocabulary.

    A piece's score is higher the earlier a merge makes it, and the first tokens are the special ones.
    """
    document = json.loads(tokenizer.read_text())
    model, added = document["model"], {token["content"] for token in document["added_tokens"]}
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    last = len(model["merges"])
    kinds = [_kind_of_piece(name, model["unk_token"], added) for name in names]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": np.array([-ranks.get(name, last) for name in names], "<f4"),
        "tokenizer.ggml.token_type": np.array(kinds, "<i4"),
        "tokenizer.ggml.unknown_token_id": model["vocab"][model["unk_token"]],
    }


def _kind_of_piece(name: str, unknown: str, added: Container[str]) -> int:
    """Return what the format calls normal (1), unknown (2), control (3) or byte (6)."""
    if name == unknown:
        return 2
    if name in added:
        return 3
    return 6 if re.fullmatch(r"<0x[0-9A-F]{2}>", name) else 1


def _with_latents_apart(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The projections from latent vectors, head by head: to keys transposed, and to values."""
    apart: dict[str, Tensor] = {}
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    for name, values in tensors.items():
        if not name.endswith(".kv_b_proj.weight"):
            apart[name] = values
            continue
        heads = values.view(config["num_attention_heads"], sum(sizes), values.shape[1])
        to_keys, to_values = heads.split(sizes, dim=1)
        apart[name.replace("kv_b_proj", "k_b_proj")] = to_keys.transpose(1, 2).contiguous()
        apart[name.replace("kv_b_proj", "v_b_proj")] = to_values.contiguous()
    return apart


def _with_latents_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as a checkpoint has it."""
    together = {name: values for name, values in tensors.items() if not re.search(r"\.[kv]_b_proj\.", name)}
    for name in tensors.keys() - together.keys():
        if ".k_b_proj." in name:
            pair = tensors[name].transpose(1, 2), tensors[name.replace("k_b_proj", "v_b_proj")]
            together[name.replace("k_b_proj", "kv_b_proj")] = torch.cat(pair, dim=1).flatten(0, 1)
    return together


def _fused(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Query, key and value below each other, and of each expert gate and up."""
    fused = dict(stored)
    for name in stored:
        if ".attn_q." in name:
            parts = [fused.pop(name.replace("attn_q.", f"attn_{part}.")) for part in "qkv"]
            rows = sum(part.shape[0] for part in parts)
            fused[name.replace("attn_q.", "attn_qkv.")] = Stored(
                shape=(rows, *parts[0].shape[1:]),
                kind=parts[0].kind,
                content=b"".join(part.content for part in parts),
            )
        elif ".ffn_gate_exps." in name:
            parts = [fused.pop(name), fused.pop(name.replace("gate", "up"))]
            count, rows, columns = parts[0].shape
            size = len(parts[0].content) // count
            fused[name.replace("gate", "gate_up")] = Stored(
                shape=(count, 2 * rows, columns),
                kind=parts[0].kind,
                content=b"".join(
                    part.content[index * size : (index + 1) * size]
                    for index in range(count)
                    for part in parts
                ),
            )
    return fused


def _grouped(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, list[str]]:
    """Name in the file -> names in the checkpoint, several for experts."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        if match := _EXPERT.fullmatch(name):
            group = f"blk.{match[1]}.ffn_{_EXPERT_PARTS[match[3]]}_exps.weight"
            groups.setdefault(group, []).append(name)
        else:
            groups[_name(name, tensors, architecture)] = [name]
    for members in groups.values():
        members.sort(key=lambda member: int(match[2]) if (match := _EXPERT.fullmatch(member)) else 0)
    return groups


def _name(name: str, tensors: Mapping[str, Tensor], architecture: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    start = f"blk.{layer[1]}." if layer else ""
    rest = name[layer.end() :] if layer else name
    has_both = any("pre_feedforward" in each for each in tensors)
    is_behind = any("post_feedforward" in each for each in tensors)
    if rest.startswith("post_attention_layernorm"):
        is_other = has_both or is_behind or architecture in ("seed_oss", "glm4moe")
        return f"{start}{'post_attention_norm' if is_other else 'ffn_norm'}.weight"
    for pattern, other in _NAMES:
        if match := re.match(pattern, rest):
            return start + match.expand(other) + rest[match.end() :]
    raise AssertionError(name)


def _heads(name: str, tensor: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows the converter reorders; 0: none."""
    if name not in _REORDERED:
        return 0
    if ".attn_q." in tensor:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in tensor else 0


def _reordered(values: Tensor, heads: int) -> Tensor:
    if not heads:
        return values.contiguous()
    by_half = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return by_half.swapaxes(1, 2).reshape(values.shape).contiguous()


def _in_order(values: Tensor, heads: int) -> Tensor:
    if not heads:
        return values
    by_pair = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)


def _metadata(name: str, config: Mapping[str, Any], *, is_old: bool) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    far = rope.get("full_attention", rope)
    theta = far.get("rope_theta") or config.get("rope_theta", 10_000.0)
    own: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(theta),
    }
    optional = {
        "head_dim": ("attention.key_length", int),
        "sliding_window": ("attention.sliding_window", int),
        "attn_logit_softcapping": ("attn_logit_softcapping", float),
        "final_logit_softcapping": ("final_logit_softcapping", float),
        "embedding_multiplier": ("embedding_scale", float),
        "residual_multiplier": ("residual_scale", float),
        "attention_multiplier": ("attention.scale", float),
        "logits_scaling": ("logit_scale", float),
        "num_experts": ("expert_count", int),
        "num_local_experts": ("expert_count", int),
        "num_experts_per_tok": ("expert_used_count", int),
        "moe_intermediate_size": ("expert_feed_forward_length", int),
        "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int),
    }
    for field, (key, kind) in optional.items():
        if config.get(field) is not None:
            own[key] = kind(config[field])
    own |= _position_metadata(name, config, far)
    if config.get("layer_types") and name in ("exaone4", "olmo2"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        own["attention.sliding_window_pattern"] = np.array(slides)
    if name == "mistral3":
        own["rope.scaling.yarn_log_multiplier"] = float(far["mscale_all_dim"])
        own["attention.temperature_scale"] = float(far["llama_4_scaling_beta"])
    if name == "chatglm":
        del own["attention.key_length"]
    if name in _ROUTED:
        own |= _routed_metadata(name, config, is_old=is_old)
    if name == "deepseek2":
        own |= _latent_metadata(config, far, is_old=is_old)
    return {
        "general.architecture": name,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        **{f"{name}.{key}": value for key, value in own.items()},
    }


def _position_metadata(name: str, config: Mapping[str, Any], far: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if far.get("rope_type") in ("linear", "yarn"):
        own |= {"rope.scaling.type": far["rope_type"], "rope.scaling.factor": float(far["factor"])}
    if far.get("rope_type") == "yarn":
        own["rope.scaling.original_context_length"] = far["original_max_position_embeddings"]
        for field in ("beta_fast", "beta_slow"):
            if far.get(field) is not None:
                own[f"rope.scaling.yarn_{field}"] = float(far[field])
    part = far.get("partial_rotary_factor") or (0.5 if name in ("chatglm", "glm4", "glm4moe") else None)
    if part:
        own["rope.dimension_count"] = int(config["head_dim"] * part)
    return own


def _routed_metadata(name: str, config: Mapping[str, Any], *, is_old: bool) -> dict[str, Any]:
    further = config.get("num_nextn_predict_layers") or 0
    own: dict[str, Any] = {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": float(config.get("routed_scaling_factor") or 1.0),
    }
    if config.get("norm_topk_prob"):
        own["expert_weights_norm"] = True
    if further:
        own |= {
            "block_count": config["num_hidden_layers"] + further,
            "nextn_predict_layers": further,
        }
    if not is_old:
        is_softmax = config["architectures"][0] == "DeepseekV2ForCausalLM"
        own |= {
            "expert_gating_func": 1 if is_softmax else 2,
            "expert_group_count": config.get("n_group") or 1,
            "expert_group_used_count": config.get("topk_group") or 1,
        }
    return own


def _latent_metadata(config: Mapping[str, Any], rope: Mapping[str, Any], *, is_old: bool) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    keys, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    own: dict[str, Any] = {"attention.kv_lora_rank": rank, "rope.dimension_count": rotated}
    if config.get("q_lora_rank"):
        own["attention.q_lora_rank"] = config["q_lora_rank"]
    if rope.get("mscale_all_dim") is not None:
        own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if is_old:
        heads = config["num_attention_heads"]
        return own | {
            "attention.head_count_kv": heads,
            "attention.key_length": keys,
            "attention.value_length": values,
        }
    return own | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": keys,
        "attention.value_length_mla": values,
    }
