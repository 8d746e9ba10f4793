"""The specs of Qwen2-MoE and Qwen3-MoE: many small experts, in Qwen2-MoE also one that all tokens share.

Called by `families.registry`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.families.config_fields import ConfigFields
from penstock.families.experts_spec import MAX_EXPERTS, ExpertsSpec
from penstock.families.known.llama import read_decoder
from penstock.families.spec import ModelSpec

_MAX_WIDTH = 1 << 20


def qwen2_moe_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Qwen2MoeForCausalLM`; its optional sliding window is refused."""
    _refuse_window(config)
    config = config.with_defaults(max_position_embeddings=32768)
    qkv_bias = config.flag("qkv_bias", True)
    spec = read_decoder(config, architecture, qkv_bias=qkv_bias, o_bias=False, mlp_bias=False)
    shared_size = config.integer("shared_expert_intermediate_size", 1, _MAX_WIDTH, 5632)
    return with_experts(spec, config, num_experts=60, num_chosen=4, inner_size=1408, shared_size=shared_size)


def qwen3_moe_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Qwen3MoeForCausalLM`: normalised queries and keys, no shared expert."""
    _refuse_window(config)
    config = config.with_defaults(max_position_embeddings=32768, num_key_value_heads=4)
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(config, architecture, qkv_bias=has_bias, o_bias=has_bias)
    spec = replace(spec, qk_norm="each_head")
    return with_experts(spec, config, num_experts=128, num_chosen=8, inner_size=768)


def with_experts(
    spec: ModelSpec,
    config: ConfigFields,
    *,
    num_experts: int,
    num_chosen: int,
    inner_size: int,
    shared_size: int = 0,
) -> ModelSpec:
    """Return the decoder with experts as the fields of this family give them.

    Args:
        num_experts, num_chosen, inner_size: defaults of the fields.
        shared_size: inner width of the shared expert; 0: there is none.
    """
    # transformers 5 writes "num_local_experts" also for families that have always had "num_experts".
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    num_experts = config.integer(name, 1, MAX_EXPERTS, num_experts)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", 1, num_experts, num_chosen),
        inner_size=config.integer("moe_intermediate_size", 1, _MAX_WIDTH, inner_size),
        normalized=config.flag("norm_topk_prob", False),
        shared_size=shared_size,
        dense_layers=_dense_layers(config, spec.num_layers),
    )
    return replace(spec, experts=experts)


def _refuse_window(config: ConfigFields) -> None:
    if config.flag("use_sliding_window", False):
        raise config.unsupported("use_sliding_window", "false (sliding windows are not supported)", True)


def _dense_layers(config: ConfigFields, num_layers: int) -> frozenset[int]:
    """Return the layers with a plain MLP: those listed, and those that the step leaves out.

    Counted from 1, each layer at a multiple of the step has experts.
    """
    step = config.integer("decoder_sparse_step", 1, 1 << 20, 1)
    listed = config.integer_list("mlp_only_layers", 0, num_layers - 1)
    return frozenset(listed) | {layer for layer in range(num_layers) if (layer + 1) % step}
