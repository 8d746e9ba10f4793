"""What DeepSeek's configurations say and what is refused of them; what their checkpoints may hold besides."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_models import MODELS
from penstock.errors import CheckpointError, ModelConfigError, UsageError
from penstock.families.experts_spec import RoutingSpec
from penstock.families.registry import load_spec
from penstock.families.sharding import require_shardable, require_whole_groups
from penstock.families.spec import ModelSpec
from stage_driver import StageDriver

YARN = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 3, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": YARN, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "moe_layer_freq": 1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 1, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "torch_dtype": "bfloat16",
}  # fmt: skip


def load(directory: Path, fields: dict[str, Any], **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(fields | changes))
    return load_spec(directory)


def test_v3_of_the_hub(tmp_path: Path) -> None:
    """Its numbers are those of the report (arXiv 2412.19437): 671 billion parameters and a small cache."""
    spec = load(tmp_path, V3)
    assert spec.stage_parameters(0, 61) == pytest.approx(671e9, rel=1e-3)
    assert spec.kv_bytes_per_token(61, 2) == 61 * 576 * 2
    assert spec.experts is not None
    assert spec.experts.dense_layers == {0, 1, 2}
    assert (spec.experts.shared_size, spec.experts.is_shared_gated) == (2048, False)
    assert spec.experts.routing == RoutingSpec(
        scoring="sigmoid", num_groups=8, num_chosen_groups=4, factor=2.5, in_float32=True
    )
    assert spec.experts.normalized
    assert spec.num_unused_layers == 1
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (spec.rope.interleaved, spec.rope.attention_factor, spec.rope.factor) == (True, 1.0, 40.0)
    assert spec.max_position_embeddings == 163840


def test_v2_lite_of_the_hub(tmp_path: Path) -> None:
    spec = load(tmp_path, V2_LITE)
    assert spec.stage_parameters(0, 27) == pytest.approx(15.7e9, rel=3e-3)
    assert spec.latent is not None
    assert spec.latent.query_rank == 0
    assert spec.experts is not None
    assert spec.experts.routing == RoutingSpec(in_float32=True)
    assert (spec.experts.shared_size, spec.experts.dense_layers) == (2816, {0})
    grouped = load(tmp_path, V2_LITE, topk_method="group_limited_greedy", n_group=8, topk_group=3)
    assert grouped.experts is not None
    assert (grouped.experts.routing.num_groups, grouped.experts.routing.num_chosen_groups) == (8, 3)
    assert grouped.num_unused_layers == 0


def test_layers_with_experts_and_without(tmp_path: Path) -> None:
    sparse = load(tmp_path, V2_LITE, num_hidden_layers=6, first_k_dense_replace=2, moe_layer_freq=2).experts
    assert sparse is not None
    assert sparse.dense_layers == {0, 1, 3, 5}
    assert load(tmp_path, V2_LITE, num_hidden_layers=6, first_k_dense_replace=6).experts is None
    alone = load(tmp_path, V2_LITE, n_shared_experts=None).experts
    assert alone is not None
    assert not alone.has_shared
    assert load(tmp_path, V2_LITE, norm_topk_prob=True).experts.normalized  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "changes", "named"),
    [
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias"),
        (V2_LITE, {"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group"),
        (V3, {"n_group": 7}, "n_group"),
        (V3, {"n_group": 256, "topk_group": 200}, "n_group"),
        (V3, {"n_group": 128, "topk_group": 3}, "topk_group"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (V3, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        (V3, {"num_experts_per_tok": 257}, "num_experts_per_tok"),
        (V3, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.quant_method"),
    ],
)
def test_what_is_not_built_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelConfigError) as refused:
        load(tmp_path, fields, **changes)
    assert refused.value.param == named
    assert named in refused.value.message
    assert refused.value.remedy


def test_float8_is_refused_with_a_way_out(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    with pytest.raises(ModelConfigError) as refused:
        load(tmp_path, V3, quantization_config=quantization)
    assert '"fp8"' in refused.value.message
    assert "bfloat16" in refused.value.remedy
    assert refused.value.param == "quantization_config.quant_method"


def test_ranks_and_groups_of_weights(tmp_path: Path) -> None:
    """Any divisor of the number of heads, though there is one key; `o_proj` is as wide as all values."""
    spec = load(tmp_path, V3)
    for size in (2, 8, 128):
        require_shardable(spec, size)
    with pytest.raises(UsageError, match="128 attention heads"):
        require_shardable(spec, 3)
    require_whole_groups(spec, 8, 4)
    narrow = load(tmp_path, V3, v_head_dim=65)
    with pytest.raises(UsageError, match=r"self_attn\.o_proj .* 1040 of 8320 inputs"):
        require_whole_groups(narrow, 8, 4)


@pytest.mark.parametrize(("num_unused", "is_read"), [(1, True), (0, False)])
def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, num_unused: int, is_read: bool
) -> None:
    """As many as the configuration says, on every stage; others are of another model."""
    MODELS["v3"].make(tmp_path)
    whole = StageDriver(tmp_path).prefill(0, [1, 2, 3], 3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_unused}))
    weights = load_file(tmp_path / "model.safetensors")
    last = {name: weight for name, weight in weights.items() if "layers.2." in name}
    weights |= {name.replace("layers.2.", "layers.3."): weight.clone() for name, weight in last.items()}
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(weights, tmp_path / "model.safetensors")
    if is_read:
        assert torch.equal(StageDriver(tmp_path, (1,)).prefill(0, [1, 2, 3], 3), whole)
    else:
        with pytest.raises(CheckpointError, match=r"model\.layers\.3"):
            StageDriver(tmp_path, (1,))
