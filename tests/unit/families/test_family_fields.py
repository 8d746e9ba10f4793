"""What the families read from `config.json`, and what they refuse; in the old form and in that of today."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelConfigError, UsageError
from penstock.families.registry import load_spec
from penstock.families.sharding import require_shardable
from penstock.families.spec import ModelSpec

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rope_theta": 5e5,
}


def load(directory: Path, family: str, **changes: Any) -> ModelSpec:
    fields = BASE | {"architectures": [f"{family}ForCausalLM"]} | changes
    (directory / "config.json").write_text(json.dumps(fields))
    return load_spec(directory)


def test_mistral_has_its_window_everywhere_unless_it_is_null(tmp_path: Path) -> None:
    assert load(tmp_path, "Mistral").layer_windows == (4096,) * 7
    assert load(tmp_path, "Mistral", sliding_window=100).layer_windows == (100,) * 7
    assert load(tmp_path, "Mistral", sliding_window=None).layer_windows == ()


def test_gemma_2_of_the_hub(tmp_path: Path) -> None:
    """Such files name both fields of the activation, and leave tying and patterns to their defaults."""
    spec = load(
        tmp_path, "Gemma2", hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        head_dim=32, query_pre_attn_scalar=64, sliding_window=10,
    )  # fmt: skip
    assert spec.layer_windows == (10, 0, 10, 0, 10, 0, 10)
    assert (spec.attention_soft_cap, spec.logit_soft_cap, spec.attention_scale) == (50.0, 30.0, 0.125)
    assert (spec.norm_kind, spec.norm_places, spec.activation) == ("one_plus", "both", "gelu_tanh")
    assert (spec.embedding_multiplier, spec.rounds_embedding_multiplier) == (8.0, True)
    assert spec.tie_word_embeddings
    assert load(tmp_path, "Gemma2", final_logit_softcapping=None).logit_soft_cap == 0.0
    assert load(tmp_path, "Gemma2").head_dim == 256


def test_gemma_3_in_both_forms(tmp_path: Path) -> None:
    old = load(
        tmp_path, "Gemma3", sliding_window=10, sliding_window_pattern=3, rope_theta=1e6,
        rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    assert old.layer_windows == (10, 10, 0, 10, 10, 0, 10)
    new = load(
        tmp_path, "Gemma3", sliding_window=10, rope_theta=None,
        layer_types=["full_attention" if i in (2, 5) else "sliding_attention" for i in range(7)],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )  # fmt: skip
    assert new == old
    assert new.local_rope is not None
    assert (new.rope.kind, new.rope.theta, new.local_rope.kind, new.local_rope.theta) == (
        "linear", 1e6, "default", 2e4,
    )  # fmt: skip
    plain = load(tmp_path, "Gemma3", rope_theta=None)
    assert plain.local_rope is not None
    assert (plain.rope.theta, plain.local_rope.theta, plain.logit_soft_cap) == (1e6, 1e4, 0.0)
    assert [window > 0 for window in plain.layer_windows] == [True] * 5 + [False, True]


def test_phi_3_with_longrope_ends_with_its_original_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    with caplog.at_level(logging.WARNING):
        spec = load(tmp_path, "Phi3", original_max_position_embeddings=128, rope_scaling=scaling)
    assert "128 tokens" in caplog.text
    assert spec.max_position_embeddings == 128
    assert spec.rope.attention_factor == pytest.approx((1 + 2 / 7) ** 0.5)  # ln 4 / ln 128
    short = load(
        tmp_path, "Phi3", max_position_embeddings=128, original_max_position_embeddings=128,
        rope_scaling=scaling,
    )  # fmt: skip
    assert (short.max_position_embeddings, short.rope.attention_factor) == (128, 1.0)


def test_phi_3_rotates_part_of_a_head(tmp_path: Path) -> None:
    spec = load(tmp_path, "Phi3", partial_rotary_factor=0.75, sliding_window=20)
    assert (spec.rope.rotary_dim(spec.head_dim), spec.layer_windows[0]) == (6, 20)
    assert load(tmp_path, "Phi3").layer_windows == ()


def test_granite_has_no_factors_unless_it_says_so(tmp_path: Path) -> None:
    spec = load(tmp_path, "Granite")
    assert (spec.embedding_multiplier, spec.residual_multiplier, spec.logit_multiplier) == (1.0, 1.0, 1.0)
    assert spec.attention_scale == 1.0
    assert load(tmp_path, "Granite", logits_scaling=8.0).logit_multiplier == 0.125


def test_olmo_2_has_norms_after_and_over_all_heads(tmp_path: Path) -> None:
    spec = load(tmp_path, "Olmo2")
    assert (spec.norm_places, spec.norm_kind, spec.qk_norm) == ("after", "wide", "all_heads")
    assert not spec.rope.rounds_angles
    assert spec.norm_parameters() == 2 * 64 + 64 + 32


def test_olmo_3_of_the_hub(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    spec = load(tmp_path, "Olmo3", sliding_window=10, rope_scaling=scaling)
    assert spec.layer_windows == (10, 10, 10, 0, 10, 10, 10)
    assert spec.local_rope is not None
    assert (spec.rope.kind, spec.local_rope.kind, spec.local_rope.theta) == ("yarn", "default", 5e5)
    assert not spec.rope.rounds_angles
    assert not spec.local_rope.rounds_angles


@pytest.mark.parametrize(
    ("family", "fields", "param"),
    [
        ("Mistral", {"sliding_window": -1}, "sliding_window"),
        ("Mistral", {"sliding_window": "all"}, "sliding_window"),
        ("Mistral", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ("Mistral", {"layer_types": ["chunked_attention"] * 7}, "layer_types"),
        ("Llama", {"layer_types": ["sliding_attention"] * 7}, "layer_types"),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 7}, "layer_types"),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": "3"}, "max_window_layers"),
        ("Qwen3", {"hidden_act": "relu"}, "hidden_act"),
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("Gemma2", {"attn_logit_softcapping": -2.0}, "attn_logit_softcapping"),
        ("Gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            "rope_parameters.sliding_attention.rope_type",
        ),
        ("Phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ("Phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        (
            "Phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
            "rope_scaling.long_factor",
        ),
        (
            "Phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            "rope_scaling.short_factor",
        ),
        (
            "Phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1, "2", 3, 4], "long_factor": [1.0] * 4}},
            "rope_scaling.short_factor",
        ),
        ("Olmo2", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        ("Olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling"),
        ("Granite", {"attention_multiplier": "big"}, "attention_multiplier"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ModelConfigError) as refused:
        load(tmp_path, family, **fields)
    assert refused.value.param == param
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("SmolLM3", {"use_sliding_window": True}),
        ("Qwen3Moe", {"use_sliding_window": True}),
        ("Olmoe", {"clip_qkv": 8.0}),
        ("Mixtral", {"sliding_window": 100}),
        ("Mistral", {"layer_types": ["chunked_attention"] * 7}),
        ("Llama", {"layer_types": ["sliding_attention"] * 7}),
        ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}),
        ("Qwen3", {"hidden_act": "relu"}),
        ("Gemma2", {"use_bidirectional_attention": True}),
        ("Gemma3", {"attn_logit_softcapping": 2.0}),
        ("Olmo2", {"partial_rotary_factor": 0.5}),
    ],
)
def test_a_sound_file_that_asks_for_what_is_not_built_is_not_called_damaged(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelConfigError) as refused:
        load(tmp_path, family, **fields)
    assert refused.value.remedy.startswith("Use a model that Penstock supports")


@pytest.mark.parametrize(
    "fields", [{"sliding_window": "all"}, {"layer_types": ["full_attention"] * 6}, {"vocab_size": 0}]
)
def test_a_malformed_file_is_to_be_corrected(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError) as refused:
        load(tmp_path, "Mistral", **fields)
    assert refused.value.remedy.startswith("Correct the file")


@pytest.mark.parametrize(
    "family", ["Gemma2", "Gemma3", "Granite", "Mistral", "Olmo2", "Olmo3", "Phi3", "Qwen3"]
)
def test_b9_ranks_share_every_family_by_its_heads(tmp_path: Path, family: str) -> None:
    spec = load(tmp_path, family)
    for size in (1, 2, 4, 8):
        require_shardable(spec, size)
    with pytest.raises(UsageError, match="8 attention heads, which 3 ranks cannot share"):
        require_shardable(spec, 3)
