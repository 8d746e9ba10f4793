"""The architectures of GGUF files that are served: which family reads each, and how its files differ.

A GGUF file names its architecture, such as `qwen2`, and its tensors by ggml's scheme. A kind says which
family (`families.known`) reads the same model, which fields of `config.json` its metadata stand for, and what
the converter has changed in the tensors. Called by `families.gguf_config` and `families.gguf_names`.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.families.gguf_experts import (
    deepseek_v2_fields,
    deepseek_v3_fields,
    dots1_fields,
    glm4_moe_fields,
    is_corrected,
    mixtral_fields,
    olmoe_fields,
    qwen2_moe_fields,
    qwen3_moe_fields,
)
from penstock.families.gguf_fields import (
    Fields,
    architecture_name,
    has,
    has_tensor,
    head_width,
    kinds_of_layers,
    num_layers,
    number,
    unsupported,
    whole_number,
    width_per_head,
)
from penstock.families.gguf_rope import rope_scaling, sharpened
from penstock.gguf.file import GgufFile

# Parts of a layer: ggml's name -> the name in a Hugging Face checkpoint.
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_SHARED_NAMES = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_NORM_BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AROUND = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_GATE_AND_UP = {"ffn_up": "mlp.gate_up_proj"}
_GLM4_NAMES = {
    **_GATE_AND_UP,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufKind:
    """One architecture of GGUF files, or a variant of one.

    Attributes:
        architecture: name by which `families.registry` finds the family that reads it.
        fields: returns the fields of `config.json` beside those that all architectures share.
        names: ggml's names of parts of a layer -> the checkpoint's, where these are not a Llama's.
        has_reordered_heads: the rows of query and key projections are in the order of ggml's rotation.
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
    variant_of = _VARIANTS.get(name)
    variant = variant_of(file) if variant_of else ""
    return _KINDS.get(f"{name} {variant}" if variant else name)


def known_architectures() -> list[str]:
    """Return the names of the architectures that are served, as files give them."""
    return [name for name in _KINDS if " " not in name]


def _llama_variant(file: GgufFile) -> str:
    return "with experts" if whole_number(file, "expert_count", 0) else ""


def _olmo2_variant(file: GgufFile) -> str:
    return "with windows" if whole_number(file, "attention.sliding_window", 0) else ""


def _deepseek2_variant(file: GgufFile) -> str:
    return "corrected" if is_corrected(file) else ""


def _biases(file: GgufFile) -> Fields:
    return {
        "attention_bias": has_tensor(file, "attn_output.bias"),
        "mlp_bias": has_tensor(file, "ffn_down.bias"),
    }


def _mistral3(file: GgufFile) -> Fields:
    """Return the fields of Mistral Small 3.1 and Ministral 3; in the latter queries grow with positions."""
    scaling = sharpened(file, rope_scaling(file), 1.0) or {"rope_type": "default"}
    growth = number(file, "attention.temperature_scale", 0.0)
    return {
        "head_dim": head_width(file),
        "rope_scaling": scaling | {"llama_4_scaling_beta": growth},
    }


# Models with so many layers divide scores by the root of hidden_size / heads. The files do not say so.
_GEMMA_2_27B_LAYERS, _GEMMA_3_27B_LAYERS = 46, 62


def _gemma(file: GgufFile, large: int) -> Fields:
    is_large = whole_number(file, "block_count") == large
    head_dim = whole_number(file, "attention.key_length", 256)
    fields: Fields = {"query_pre_attn_scalar": width_per_head(file) if is_large else head_dim}
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
    # Ollama's converter has names of its own for the two bases.
    fields["rope_theta"] = number(file, "rope.freq_base", number(file, "rope.global.freq_base", 1e6))
    local = number(file, "rope.local.freq_base", 10_000.0)
    fields["rope_local_base_freq"] = number(file, "rope.freq_base_swa", local)
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


def _olmo3(file: GgufFile) -> Fields:
    return _biases(file) | {
        "sliding_window": whole_number(file, "attention.sliding_window"),
        "layer_types": kinds_of_layers(file),
    }


def _glm(file: GgufFile) -> Fields:
    if has(file, "rope.dimension_sections"):
        raise unsupported(file, "its heads are in the order for positions in images, which is not supported")
    return {
        "head_dim": head_width(file),
        "attention_bias": has_tensor(file, "attn_q.bias") or has_tensor(file, "attn_qkv.bias"),
    }


def _ernie(file: GgufFile) -> Fields:
    return {
        "head_dim": head_width(file),
        "use_bias": has_tensor(file, "attn_q.bias"),
    }


def _seed_oss(file: GgufFile) -> Fields:
    return {
        "attention_bias": has_tensor(file, "attn_q.bias"),
        "attention_out_bias": has_tensor(file, "attn_output.bias"),
        "mlp_bias": has_tensor(file, "ffn_down.bias"),
    }


_EXAONE_4_32B_LAYERS, _EXAONE_4_32B_WINDOW = 64, 4096  # older files do not give the window


def _exaone4(file: GgufFile) -> Fields:
    default = _EXAONE_4_32B_WINDOW if num_layers(file) == _EXAONE_4_32B_LAYERS else 0
    window = whole_number(file, "attention.sliding_window", default)
    return {
        "sliding_window": window or None,
        "layer_types": kinds_of_layers(file) if window else None,
    }


_VARIANTS: Mapping[str, Callable[[GgufFile], str]] = {
    "llama": _llama_variant,
    "olmo2": _olmo2_variant,
    "deepseek2": _deepseek2_variant,
}
_KINDS: Mapping[str, GgufKind] = {
    "llama": GgufKind(architecture="LlamaForCausalLM", fields=_biases, has_reordered_heads=True),
    "llama with experts": GgufKind(
        architecture="MixtralForCausalLM",
        fields=mixtral_fields,
        names={"ffn_gate_inp": "block_sparse_moe.gate"},
        has_reordered_heads=True,
    ),
    "mistral3": GgufKind(architecture="Ministral3ForCausalLM", fields=_mistral3, has_reordered_heads=True),
    "qwen2": GgufKind(architecture="Qwen2ForCausalLM"),
    "qwen2vl": GgufKind(architecture="Qwen2ForCausalLM"),
    "qwen2moe": GgufKind(architecture="Qwen2MoeForCausalLM", fields=qwen2_moe_fields),
    "qwen3": GgufKind(architecture="Qwen3ForCausalLM", fields=_biases),
    "qwen3vl": GgufKind(architecture="Qwen3ForCausalLM", fields=_biases),
    "qwen3moe": GgufKind(architecture="Qwen3MoeForCausalLM", fields=qwen3_moe_fields),
    "gemma": GgufKind(architecture="GemmaForCausalLM", has_one_plus_norms=True),
    "gemma2": GgufKind(
        architecture="Gemma2ForCausalLM", fields=_gemma2, names=_NORMS_AROUND, has_one_plus_norms=True
    ),
    "gemma3": GgufKind(
        architecture="Gemma3ForCausalLM", fields=_gemma3, names=_NORMS_AROUND, has_one_plus_norms=True
    ),
    "phi3": GgufKind(
        architecture="Phi3ForCausalLM",
        fields=_phi3,
        names={**_GATE_AND_UP, "attn_qkv": "self_attn.qkv_proj"},
    ),
    "granite": GgufKind(architecture="GraniteForCausalLM", fields=_granite, has_reordered_heads=True),
    "olmo2": GgufKind(architecture="Olmo2ForCausalLM", fields=_biases, names=_NORMS_BEHIND),
    "olmo2 with windows": GgufKind(architecture="Olmo3ForCausalLM", fields=_olmo3, names=_NORMS_BEHIND),
    "olmoe": GgufKind(architecture="OlmoeForCausalLM", fields=olmoe_fields),
    "smollm3": GgufKind(architecture="SmolLM3ForCausalLM", fields=_biases, has_reordered_heads=True),
    "seed_oss": GgufKind(architecture="SeedOssForCausalLM", fields=_seed_oss, names=_NORM_BEFORE_MLP),
    "exaone4": GgufKind(architecture="Exaone4ForCausalLM", fields=_exaone4, names=_NORMS_BEHIND),
    "ernie4_5": GgufKind(architecture="Ernie4_5ForCausalLM", fields=_ernie),
    "chatglm": GgufKind(architecture="GlmForCausalLM", fields=_glm, names=_GATE_AND_UP),
    "glm4": GgufKind(architecture="Glm4ForCausalLM", fields=_glm, names=_GLM4_NAMES),
    "glm4moe": GgufKind(
        architecture="Glm4MoeForCausalLM",
        fields=glm4_moe_fields,
        names={**_SHARED_NAMES, **_NORM_BEFORE_MLP},
    ),
    "dots1": GgufKind(architecture="Dots1ForCausalLM", fields=dots1_fields, names=_SHARED_NAMES),
    "deepseek2": GgufKind(
        architecture="DeepseekV2ForCausalLM",
        fields=deepseek_v2_fields,
        names={**_LATENT_NAMES, **_SHARED_NAMES},
    ),
    "deepseek2 corrected": GgufKind(
        architecture="DeepseekV3ForCausalLM",
        fields=deepseek_v3_fields,
        names={**_LATENT_NAMES, **_SHARED_NAMES},
    ),
}
