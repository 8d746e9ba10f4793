"""The specs of GLM-4 to GLM-4.7: attention heads are rotated only in part; since 4.5 many small experts.

The experts are chosen by corrected scores. GLM-4.7-Flash has latent attention. Called by
`families.registry`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.families.config_fields import ConfigFields
from penstock.families.known.deepseek import latent_decoder
from penstock.families.known.grouped_experts import corrected, read_experts, with_experts, with_mtp
from penstock.families.known.llama import read_decoder
from penstock.families.rope_fields import read_partial_rope, require_whole_pairs
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec

_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `GlmForCausalLM`: neighbouring dimensions are rotated as pairs."""
    spec = _decoder(
        config.with_defaults(num_key_value_heads=2), architecture, has_bias=True, head_dim=128, eps=1.5625e-7
    )
    return replace(spec, rope=replace(spec.rope, interleaved=True), stored_together="mlp")


def glm4_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Glm4ForCausalLM`: as `glm_spec`, with norms around attention and MLP."""
    return replace(glm_spec(config, architecture), norm_places="both", norm_names=_NORMS)


def glm4_moe_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Glm4MoeForCausalLM`: GLM-4.5 to 4.7; queries and keys may be normalised."""
    config = config.with_defaults(num_key_value_heads=8)
    spec = with_mtp(_decoder(config, architecture, has_bias=False, head_dim=None, eps=1e-5), config, 1)
    if config.flag("use_qk_norm", False):
        spec = replace(spec, qk_norm="each_head")
    experts = read_experts(config, spec, (128, 8), inner_size=1408, num_shared=1, first=1)
    return with_experts(spec, corrected(config, experts, factor=1.0))


def glm4_moe_lite_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `Glm4MoeLiteForCausalLM` (GLM-4.7-Flash): a DeepSeek-V3 with other numbers."""
    config = config.with_defaults(
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5
    )
    if not config.is_null("q_lora_rank"):
        config = config.with_defaults(q_lora_rank=768)
    spec = with_mtp(latent_decoder(config, architecture, max_positions=202_752), config, 0)
    experts = read_experts(config, spec, (64, 4), inner_size=1536, num_shared=1, first=1)
    if config.has("mlp_layer_types"):
        experts = replace(experts, dense_layers=_listed_dense_layers(config, spec.num_layers))
    return with_experts(spec, corrected(config, experts, factor=1.8))


def _decoder(
    config: ConfigFields, architecture: str, *, has_bias: bool, head_dim: int | None, eps: float
) -> ModelSpec:
    """Return what all but GLM-4.7-Flash have; the output projection of attention has no bias."""
    spec = read_decoder(
        config,
        architecture,
        qkv_bias=config.flag("attention_bias", has_bias),
        read_rope=_half_rope,
        head_dim=head_dim,
        max_positions=131_072,
        eps=eps,
    )
    require_whole_pairs(config, spec.rope, spec.head_dim)
    return spec


def _half_rope(config: ConfigFields, max_positions: int) -> RopeSpec:
    return read_partial_rope(config, max_positions, fraction=0.5)


def _listed_dense_layers(config: ConfigFields, num_layers: int) -> frozenset[int]:
    kinds = config.text_list("mlp_layer_types")
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        expected = f"a list of num_hidden_layers ({num_layers}) kinds, dense or sparse"
        raise config.error("mlp_layer_types", expected, kinds)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
