"""The specs of DeepSeek-V2 and DeepSeek-V3: latent attention (arXiv 2405.04434), and many small experts.

The experts are in groups. In V3 they are chosen by corrected scores (arXiv 2412.19437). Called by
`families.registry`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.families.config_fields import ConfigFields
from penstock.families.experts_spec import RoutingSpec
from penstock.families.known.grouped_experts import corrected, grouped, read_experts, with_experts, with_mtp
from penstock.families.known.llama import read_decoder
from penstock.families.latent_spec import LatentSpec
from penstock.families.rope_fields import scaling_section, sharpening
from penstock.families.spec import ModelSpec

_MAX_WIDTH = 1 << 20
_MAX_DIM = 4096


def deepseek_v2_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `DeepseekV2ForCausalLM`: a softmax chooses experts of all groups or of the best."""
    if config.flag("mlp_bias", False):
        raise config.unsupported("mlp_bias", "false (biases of experts are not supported)", True)
    spec = latent_decoder(config, architecture, max_positions=2048)
    spec = replace(spec, rope=replace(spec.rope, interleaved=True, rounds_angles=False))
    config.choice("scoring_func", ("softmax",), "softmax")
    method = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    experts = read_experts(config, spec, (64, None), inner_size=1407, num_shared=2, first=0)
    routing = RoutingSpec(factor=config.number("routed_scaling_factor", 0.0, 1e6, 1.0), in_float32=True)
    if method == "group_limited_greedy":
        routing = grouped(config, routing, experts, (None, None))
    if config.flag("norm_topk_prob", False):
        # DeepSeek's own code does not scale normalised weights; other code does, and transformers 5 does not
        # normalise. No published model asks for both, so both together are refused.
        if routing.factor != 1.0:
            expected = "1 where norm_topk_prob is true (both together are not supported)"
            raise config.unsupported("routed_scaling_factor", expected, routing.factor)
        experts = replace(experts, normalized=True)
    return with_experts(spec, replace(experts, routing=routing))


def deepseek_v3_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `DeepseekV3ForCausalLM`.

    Of the layers that guess further tokens (`num_nextn_predict_layers`) only the first is used, as a drafter
    if the user wants one.
    """
    spec = latent_decoder(config, architecture, max_positions=4096)
    spec = with_mtp(spec, config, 1)
    experts = read_experts(config, spec, (256, 8), inner_size=2048, num_shared=1, first=3)
    return with_experts(spec, corrected(config, experts, factor=2.5, groups=(8, 4)))


def latent_decoder(config: ConfigFields, architecture: str, *, max_positions: int) -> ModelSpec:
    """Return the spec without experts.

    Args:
        max_positions: longest sequence if the configuration does not give it.
    """
    _refuse_quantized(config)
    latent = _latent(config)
    bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        architecture,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=latent.rotary_dim,  # transformers calls this head_dim; the spec below has another
        max_positions=max_positions,
    )
    if spec.activation != "silu":
        raise config.unsupported("hidden_act", "silu", config.text("hidden_act"))
    if spec.num_kv_heads != spec.num_heads:
        expected = f"num_attention_heads ({spec.num_heads}), as for latent attention"
        raise config.error("num_key_value_heads", expected, spec.num_kv_heads)
    scale = latent.head_dim**-0.5 * _sharpened(config, spec) ** 2
    rope = replace(spec.rope, interleaved=config.flag("rope_interleave", True))
    return replace(
        spec, latent=latent, num_kv_heads=1, head_dim=latent.head_dim, attention_scale=scale, rope=rope
    )


def _refuse_quantized(config: ConfigFields) -> None:
    """Raise `ModelConfigError` for quantised weights: no form of quantised latent projections is built.

    The published checkpoints of V3 are in float8.
    """
    if not config.has("quantization_config"):
        return
    section = config.section("quantization_config")
    method = section.text("quant_method")
    raise section.error(
        "quant_method",
        "absent (quantised DeepSeek models are not supported)",
        method,
        remedy="Use a checkpoint in bfloat16, or convert this one (DeepSeek publishes fp8_cast_bf16.py for "
        "float8), optionally with --quantization int8 or int4.",
    )


def _latent(config: ConfigFields) -> LatentSpec:
    query_rank = 0 if config.is_null("q_lora_rank") else config.integer("q_lora_rank", 1, _MAX_WIDTH, 1536)
    rotary_dim = config.integer("qk_rope_head_dim", 2, _MAX_DIM, 64)
    if rotary_dim % 2:
        raise config.error("qk_rope_head_dim", "even, for rotary embedding", rotary_dim)
    return LatentSpec(
        rank=config.integer("kv_lora_rank", 1, _MAX_WIDTH, 512),
        query_rank=query_rank,
        plain_dim=config.integer("qk_nope_head_dim", 1, _MAX_DIM, 128),
        rotary_dim=rotary_dim,
        value_dim=config.integer("v_head_dim", 1, _MAX_DIM, 128),
    )


def _sharpened(config: ConfigFields, spec: ModelSpec) -> float:
    """Return the factor by which queries, and keys, are larger if positions are stretched, 1 if they are not.

    It is that of arXiv 2309.00071, section 3.4. Here it is for whole heads, not only for their rotated part.
    """
    mscale = scaling_section(config).number("mscale_all_dim", 0.0, 1e3, 0.0)
    is_stretched = spec.rope.kind != "default" and mscale > 0.0
    return sharpening(spec.rope.factor, mscale) if is_stretched else 1.0
