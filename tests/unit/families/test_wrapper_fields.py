"""The configuration of a text model within a model of more than text, and of families that came with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.families.registry import load_spec
from penstock.families.spec import ModelSpec
from penstock.families.text_names import text_name

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
MISTRAL = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}


def read(directory: Path, *objects: dict[str, Any], **fields: Any) -> ModelSpec:
    merged: dict[str, Any] = {}
    for each in (*objects, fields):
        merged |= each
    (directory / "config.json").write_text(json.dumps(merged))
    return load_spec(directory)


def test_a_published_gemma_3_says_only_what_differs_from_its_class(tmp_path: Path) -> None:
    """The 4B's file: heads, vocabulary and the rest are the defaults of transformers' class."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = read(
        tmp_path, GEMMA, text_config=text, vision_config={}, torch_dtype="bfloat16", eos_token_id=[1, 106]
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert (spec.dtype, spec.eos_token_ids, spec.tie_word_embeddings) == ("bfloat16", (1, 106), True)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 1e6)
    assert spec.local_rope is not None
    assert (spec.local_rope.kind, spec.local_rope.theta) == ("default", 1e4)
    assert spec.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert spec.attention_scale == 256**-0.5


@pytest.mark.parametrize(
    ("outer", "inner", "is_tied"),
    [
        ({}, {}, False),
        ({}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
    ],
)
def test_the_file_says_before_the_section_whether_the_head_is_tied(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], is_tied: bool
) -> None:
    text = TEXT | {"model_type": "mistral"} | inner
    assert read(tmp_path, MISTRAL, outer, text_config=text).tie_word_embeddings == is_tied


def test_another_text_model_is_refused_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match='model_type "mamba"; supported: mistral, min'):
        read(tmp_path, MISTRAL, text_config=TEXT | {"model_type": "mamba"})


def test_transformers_does_not_run_a_model_of_more_than_text(tmp_path: Path) -> None:
    read(tmp_path, MISTRAL, text_config=TEXT)
    with pytest.raises(UnsupportedModelError, match="reads images, sound or other inputs"):
        load_spec(tmp_path, "transformers")


def test_modules_that_stay_as_they_are_have_the_names_of_the_text_model(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    ignored = ["language_model.model.layers.1.mlp.up_proj", "language_model.lm_head", "re:vision_tower.*"]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }
    spec = read(tmp_path, MISTRAL, text_config=TEXT, quantization_config=quantization)
    assert spec.quantization is not None
    assert spec.quantization.scheme("model.layers.1.mlp.up_proj") is None
    assert spec.quantization.scheme("model.layers.1.mlp.down_proj") is not None


def test_positions_in_three_dimensions_are_plain_ones_in_a_text(tmp_path: Path) -> None:
    flat = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    spec = read(tmp_path, flat, TEXT, rope_scaling=scaling, rope_theta=1e6, vision_config={})
    assert (spec.rope.kind, spec.rope.theta, spec.qkv_bias) == ("default", 1e6, True)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("vision_tower.blocks.0.weight", None),
        ("model.visual.blocks.0.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
    ],
)
def test_names_of_the_text_model(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


@pytest.mark.parametrize(
    ("architecture", "fields", "param"),
    [
        ("GlmForCausalLM", {"head_dim": 10}, "partial_rotary_factor"),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "n_group"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "odd", "odd", "odd"]}, "mlp_layer_types"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LGLG"}, "sliding_window_pattern"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": {"llama_4_scaling_beta": -1}},
            "rope_parameters.llama_4_s",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_its_field(
    tmp_path: Path, architecture: str, fields: dict[str, Any], param: str
) -> None:
    same_heads = {"num_key_value_heads": 4} if "Lite" in architecture else {}
    with pytest.raises(ModelConfigError) as caught:
        read(tmp_path, TEXT, same_heads, fields, architectures=[architecture], model_type="any")
    assert str(caught.value.param).startswith(param)


def test_layers_that_rotate_nothing(tmp_path: Path) -> None:
    smol = read(tmp_path, TEXT, architectures=["SmolLM3ForCausalLM"])
    assert smol.unrotated_layers == {3}
    assert [smol.ropes[smol.rope_index(layer)].kind for layer in range(4)] == ["default"] * 3 + ["none"]
    large = {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 64, "sliding_window_pattern": "LG"}
    exaone = read(tmp_path, TEXT, large)
    assert (exaone.layer_windows, exaone.unrotated_layers) == ((64, 0, 64, 0), {1, 3})
    small = read(tmp_path, TEXT, large | {"sliding_window": None})
    assert (small.layer_windows, small.unrotated_layers) == ((), frozenset())


def test_glm_4_5_keeps_its_further_layer_for_guesses(tmp_path: Path) -> None:
    glm = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "moe_intermediate_size": 32}
    spec = read(tmp_path, TEXT, glm, num_nextn_predict_layers=1, first_k_dense_replace=2, use_qk_norm=True)
    assert (spec.has_mtp, spec.num_unused_layers, spec.qk_norm) == (True, 1, "each_head")
    assert spec.experts is not None
    assert spec.experts.dense_layers == {0, 1}
    assert spec.experts.routing.is_corrected
    assert spec.rope.rotary_dim(spec.head_dim) == 8
