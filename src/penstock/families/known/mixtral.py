"""The spec of Mixtral: a Llama with experts in every layer. Called by `families.registry`."""

from __future__ import annotations

from dataclasses import replace

from penstock.families.config_fields import ConfigFields
from penstock.families.experts_spec import MAX_EXPERTS, ExpertNames, ExpertsSpec
from penstock.families.known.llama import read_decoder
from penstock.families.spec import ModelSpec

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def mixtral_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `MixtralForCausalLM`; `router_jitter_noise`, for training only, is not read."""
    config = config.with_defaults(
        max_position_embeddings=131072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6
    )
    spec = read_decoder(config, architecture, qkv_bias=False, o_bias=False, mlp_bias=False)
    if config.has("sliding_window"):
        _refuse_window(config, spec.max_position_embeddings)
    num_experts = config.integer("num_local_experts", 1, MAX_EXPERTS, 8)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", 1, num_experts, 2),
        inner_size=spec.intermediate_size,
        normalized=True,
        names=_NAMES,
    )
    return replace(spec, experts=experts)


def _refuse_window(config: ConfigFields, max_positions: int) -> None:
    """Raise `ModelConfigError` for a window that is shorter than the longest sequence.

    A longer one has no effect.
    """
    window = config.integer("sliding_window", 0, 1 << 30)
    if window < max_positions:
        raise config.unsupported("sliding_window", "null (sliding windows are not supported)", window)
