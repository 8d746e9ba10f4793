"""The architectures of GGUF files that are served: what each is called elsewhere, and how its file differs.

A GGUF file names its architecture, such as `qwen2`, and its tensors by ggml's scheme. A kind says which
family (`families.known`) reads the same model, which fields of `config.json` its metadata stand for, and what
the converter has changed in the tensors. Called by `families.gguf_config` and `families.gguf_names`.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import CheckpointError
from penstock.gguf.file import GgufFile

Fields = dict[str, Any]

# Parts of a layer: ggml's name -> the name in a Hugging Face checkpoint.
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AROUND = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufKind:
    """One architecture of GGUF files.

    Attributes:
        architecture: of the family that reads it.
        fields: of `config.json` beside those that all architectures share.
        names: of parts of a layer that are called otherwise than in a Llama.
        has_reordered_heads: rows of queries and keys are in the order that ggml's rotation wants.
        has_one_plus_norms: norms are stored as 1 + weight.
    """

    architecture: str
    fields: Callable[[GgufFile], Fields] = lambda file: {}
    names: Mapping[str, str] = field(default_factory=dict)
    has_reordered_heads: bool = False
    has_one_plus_norms: bool = False

    def name_of(self, part: str) -> str | None:
        """Return the checkpoint's name of a part of a layer; None: it is not known."""
        return self.names.get(part) or _LAYER_NAMES.get(part)


def kind_of_file(file: GgufFile) -> GgufKind | None:
    """Return the kind of a file's architecture; None: it is not served."""
    name = architecture_name(file)
    if name == "llama" and whole_number(file, "expert_count", 0):
        name = "llama with experts"
    return _KINDS.get(name)


def known_architectures() -> list[str]:
    """Return the names of the architectures that are served, as files give them."""
    return [name for name in _KINDS if " " not in name]


def architecture_name(file: GgufFile) -> str:
    """Return what the file calls its architecture."""
    return file.metadata.text("general.architecture")


def whole_number(file: GgufFile, name: str, default: int | None = None) -> int:
    """Return a number of the architecture. Where the file has one for each layer, they must be equal."""
    key = f"{architecture_name(file)}.{name}"
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return file.metadata.integer(key, default)
    if len(value) and value.dtype.kind in "iu" and (value == value[0]).all():
        return int(value[0])
    raise CheckpointError(
        file=file.path.name,
        key=key,
        expected="one number for all layers",
        found=f"{len(set(value.tolist()))} numbers",
        remedy="Use another model; layers of unequal shapes are not built.",
    )


def number(file: GgufFile, name: str, default: float | None = None) -> float:
    """Return a number of the architecture that may have a fraction."""
    return float(file.metadata.number(f"{architecture_name(file)}.{name}", default))


def has(file: GgufFile, name: str) -> bool:
    """Return whether the file gives this number of its architecture."""
    return f"{architecture_name(file)}.{name}" in file.metadata


def _biases(file: GgufFile) -> Fields:
    tensors = file.tensors
    return {
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _mixtral(file: GgufFile) -> Fields:
    return {
        "num_local_experts": whole_number(file, "expert_count"),
        "num_experts_per_tok": whole_number(file, "expert_used_count"),
    }


def _experts(file: GgufFile, *, normalized: bool) -> Fields:
    return {
        "num_experts": whole_number(file, "expert_count"),
        "num_experts_per_tok": whole_number(file, "expert_used_count"),
        "moe_intermediate_size": whole_number(file, "expert_feed_forward_length"),
        "norm_topk_prob": normalized,
    }


def _qwen2_moe(file: GgufFile) -> Fields:
    shared = whole_number(file, "expert_shared_feed_forward_length")
    return _experts(file, normalized=False) | {
        "shared_expert_intermediate_size": shared,
        "intermediate_size": shared,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _qwen3_moe(file: GgufFile) -> Fields:
    return _experts(file, normalized=True)


# Of these sizes scores are divided by the root of hidden_size / heads; the files do not say so.
_GEMMA_2_27B_LAYERS, _GEMMA_3_27B_LAYERS = 46, 62


def _gemma(file: GgufFile, large: int) -> Fields:
    is_large = whole_number(file, "block_count") == large
    num_heads = whole_number(file, "attention.head_count")
    by_width = whole_number(file, "embedding_length") // max(num_heads, 1)
    head_dim = whole_number(file, "attention.key_length", 256)
    fields: Fields = {"query_pre_attn_scalar": by_width if is_large else head_dim}
    if has(file, "attention.sliding_window"):
        fields["sliding_window"] = whole_number(file, "attention.sliding_window")
    return fields


def _gemma2(file: GgufFile) -> Fields:
    return _gemma(file, _GEMMA_2_27B_LAYERS) | {
        "attn_logit_softcapping": number(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": number(file, "final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Fields:
    fields = _gemma(file, _GEMMA_3_27B_LAYERS)
    fields["rope_local_base_freq"] = number(file, "rope.freq_base_swa", 10_000.0)
    if has(file, "final_logit_softcapping"):
        fields["final_logit_softcapping"] = number(file, "final_logit_softcapping")
    return fields


def _phi3(file: GgufFile) -> Fields:
    fields: Fields = {}
    if has(file, "attention.sliding_window"):
        window = whole_number(file, "attention.sliding_window")
        fields["sliding_window"] = window or None
    return fields


def _granite(file: GgufFile) -> Fields:
    return _biases(file) | {
        "embedding_multiplier": number(file, "embedding_scale", 1.0),
        "residual_multiplier": number(file, "residual_scale", 1.0),
        "attention_multiplier": number(file, "attention.scale", 1.0),
        "logits_scaling": number(file, "logit_scale", 1.0),
    }


_KINDS: Mapping[str, GgufKind] = {
    "llama": GgufKind(architecture="LlamaForCausalLM", fields=_biases, has_reordered_heads=True),
    "llama with experts": GgufKind(
        architecture="MixtralForCausalLM",
        fields=_mixtral,
        names={"ffn_gate_inp": "block_sparse_moe.gate"},
        has_reordered_heads=True,
    ),
    "qwen2": GgufKind(architecture="Qwen2ForCausalLM"),
    "qwen2moe": GgufKind(architecture="Qwen2MoeForCausalLM", fields=_qwen2_moe),
    "qwen3": GgufKind(architecture="Qwen3ForCausalLM", fields=_biases),
    "qwen3moe": GgufKind(architecture="Qwen3MoeForCausalLM", fields=_qwen3_moe),
    "gemma2": GgufKind(
        architecture="Gemma2ForCausalLM", fields=_gemma2, names=_NORMS_AROUND, has_one_plus_norms=True
    ),
    "gemma3": GgufKind(
        architecture="Gemma3ForCausalLM", fields=_gemma3, names=_NORMS_AROUND, has_one_plus_norms=True
    ),
    "phi3": GgufKind(architecture="Phi3ForCausalLM", fields=_phi3, names={"ffn_up": "mlp.gate_up_proj"}),
    "granite": GgufKind(architecture="GraniteForCausalLM", fields=_granite, has_reordered_heads=True),
    "olmo2": GgufKind(architecture="Olmo2ForCausalLM", fields=_biases, names=_NORMS_BEHIND),
}
