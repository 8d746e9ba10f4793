"""The fields of `config.json` for GGUF architectures with experts, from the metadata of their files.

Called by `families.gguf_kinds`. Torch-free.
"""

from __future__ import annotations

from penstock.families.gguf_fields import (
    Fields,
    flag,
    has,
    has_tensor,
    num_further_layers,
    num_layers,
    number,
    unsupported,
    whole_number,
)
from penstock.families.gguf_rope import rope_scaling, sharpened
from penstock.gguf.file import GgufFile

_SCORING = {1: "softmax", 2: "sigmoid"}
# (experts, hidden size) of DeepSeek-V3 and -V2 -> (groups, chosen groups). Files from before late 2025 lack
# the latter two.
_GROUPS = {(256, 7168): (8, 4), (160, 5120): (8, 3)}
_LOG_UNIT = 0.1  # files of deepseek2 have a tenth of the number in those of other architectures (`sharpened`)


def mixtral_fields(file: GgufFile) -> Fields:
    """Return fields for experts in every layer, whose inner width is `feed_forward_length`."""
    return {
        "num_local_experts": whole_number(file, "expert_count"),
        "num_experts_per_tok": whole_number(file, "expert_used_count"),
    }


def qwen2_moe_fields(file: GgufFile) -> Fields:
    """Return fields for experts, and a gated expert that all tokens share."""
    shared = whole_number(file, "expert_shared_feed_forward_length")
    return _experts(file, normalized=False) | {
        "shared_expert_intermediate_size": shared,
        "intermediate_size": shared,
        "qkv_bias": has_tensor(file, "attn_q.bias"),
    }


def qwen3_moe_fields(file: GgufFile) -> Fields:
    """Return fields for experts; weights of the chosen ones are normalised."""
    return _experts(file, normalized=True)


def olmoe_fields(file: GgufFile) -> Fields:
    """Return fields for experts whose inner width is `feed_forward_length`."""
    return {
        "num_experts": whole_number(file, "expert_count"),
        "num_experts_per_tok": whole_number(file, "expert_used_count"),
        "norm_topk_prob": False,
    }


def glm4_moe_fields(file: GgufFile) -> Fields:
    """Return fields for GLM-4.5 and later: the large sizes alone normalise queries and keys."""
    return corrected_fields(file) | {
        "attention_bias": has_tensor(file, "attn_q.bias"),
        "use_qk_norm": has_tensor(file, "attn_q_norm.weight"),
    }


def dots1_fields(file: GgufFile) -> Fields:
    """Return fields without windows: no published size has them, and a file cannot give any."""
    return corrected_fields(file) | {
        "attention_bias": has_tensor(file, "attn_q.bias"),
        "sliding_window": None,
    }


def corrected_fields(file: GgufFile) -> Fields:
    """Return fields for experts in groups, chosen by corrected sigmoids (`RoutingSpec.scoring`)."""
    return _routed(file, scoring(file) or "sigmoid") | {"topk_method": "noaux_tc"}


def deepseek_v2_fields(file: GgufFile) -> Fields:
    """Return fields for latent attention, and experts chosen by a softmax, of all groups or of the best."""
    fields = _latent(file) | _routed(file, "softmax")
    method = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return fields | {"topk_method": method}


def deepseek_v3_fields(file: GgufFile) -> Fields:
    """Return fields for latent attention, and experts chosen by corrected sigmoids.

    Files of GLM-4.7-Flash have this architecture too.
    """
    return _latent(file) | corrected_fields(file)


def scoring(file: GgufFile) -> str | None:
    """Return how experts are scored; None: the file does not say."""
    kind = whole_number(file, "expert_gating_func", 0)
    if kind in _SCORING:
        return _SCORING[kind]
    if kind:
        raise unsupported(
            file, f"experts are scored by function {kind} (expert_gating_func), which is not supported"
        )
    return None


def is_corrected(file: GgufFile) -> bool:
    """Return whether experts are chosen by corrected sigmoids: the file says it, or has the corrections."""
    kind = scoring(file)
    if kind is not None:
        return kind == "sigmoid"
    return any(".exp_probs_b." in name for name in file.tensors)


def _experts(file: GgufFile, *, normalized: bool) -> Fields:
    return {
        "num_experts": whole_number(file, "expert_count"),
        "num_experts_per_tok": whole_number(file, "expert_used_count"),
        "moe_intermediate_size": whole_number(file, "expert_feed_forward_length"),
        "norm_topk_prob": normalized,
    }


def _routed(file: GgufFile, kind: str) -> Fields:
    """Return the fields of DeepSeek's configurations about experts, and layers that guess further tokens."""
    num_groups, num_chosen = _groups(file)
    first_further = f"blk.{num_layers(file)}.nextn.eh_proj.weight"
    return {
        "n_routed_experts": whole_number(file, "expert_count"),
        "num_experts_per_tok": whole_number(file, "expert_used_count"),
        "moe_intermediate_size": whole_number(file, "expert_feed_forward_length"),
        "n_shared_experts": whole_number(file, "expert_shared_count", 0),
        "first_k_dense_replace": whole_number(file, "leading_dense_block_count", 0),
        "norm_topk_prob": flag(file, "expert_weights_norm", False),
        "routed_scaling_factor": number(file, "expert_weights_scale", 1.0) or 1.0,  # 0 stands for no factor
        "scoring_func": kind,
        "n_group": num_groups,
        "topk_group": num_chosen,
        # Smaller files of a model may lack these layers and still give their number.
        "num_nextn_predict_layers": num_further_layers(file) if first_further in file.tensors else 0,
    }


def _groups(file: GgufFile) -> tuple[int, int]:
    if has(file, "expert_group_count"):
        count = whole_number(file, "expert_group_count")
        return count, whole_number(file, "expert_group_used_count", count)
    size = whole_number(file, "expert_count"), whole_number(file, "embedding_length")
    return _GROUPS.get(size, (1, 1))


def _latent(file: GgufFile) -> Fields:
    """Return the sizes of latent attention.

    In newer files `key_length` and `value_length` are the sizes of the one key for all heads. Those of each
    head end in `_mla`; older files have only these, without the ending.
    """
    if not whole_number(file, "expert_count", 0):
        raise unsupported(file, "a deepseek2 model without experts is not supported")
    if number(file, "attention.temperature_scale", 0.0):
        raise unsupported(file, "latent attention with queries scaled by position is not supported")
    suffix = "_mla" if has(file, "attention.key_length_mla") else ""
    rotated = whole_number(file, "rope.dimension_count")
    has_query_rank = has(file, "attention.q_lora_rank")
    return {
        "head_dim": rotated,
        "num_key_value_heads": whole_number(file, "attention.head_count"),
        "kv_lora_rank": whole_number(file, "attention.kv_lora_rank"),
        "q_lora_rank": whole_number(file, "attention.q_lora_rank") if has_query_rank else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole_number(file, f"attention.key_length{suffix}") - rotated,
        "v_head_dim": whole_number(file, f"attention.value_length{suffix}"),
        "rope_scaling": sharpened(file, rope_scaling(file), _LOG_UNIT),
    }
