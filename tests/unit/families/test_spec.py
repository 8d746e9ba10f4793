"""Sums that follow from a spec, against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec

LLAMA_70B = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope=RopeSpec(),
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    dtype="bfloat16",
)


def test_parameters_of_a_70b_model() -> None:
    assert LLAMA_70B.attention_parameters() == pytest.approx(4 * 37.75e6, rel=1e-3)
    assert LLAMA_70B.mlp_parameters() == pytest.approx(4 * 176.16e6, rel=1e-3)
    assert LLAMA_70B.embedding_parameters() == pytest.approx(4 * 262.67e6, rel=1e-3)
    assert LLAMA_70B.stage_parameters(0, 80) == pytest.approx(70.55e9, rel=1e-3)


def test_s5_stages_share_out_the_parameters() -> None:
    whole = LLAMA_70B.stage_parameters(0, 80)
    assert sum(LLAMA_70B.stage_parameters(i, i + 20) for i in range(0, 80, 20)) == whole
    tied = replace(LLAMA_70B, tie_word_embeddings=True)
    assert whole - tied.stage_parameters(0, 80) == 128256 * 8192
    twice = tied.stage_parameters(0, 40) + tied.stage_parameters(40, 80)
    assert twice == whole  # the last stage holds the embedding as its head


def test_a6_counts_by_component() -> None:
    tied = replace(LLAMA_70B, tie_word_embeddings=True)
    first, middle, last = (tied.parameter_counts(*cut) for cut in ((0, 20), (20, 60), (60, 80)))
    assert [name for name, count in first.items() if count] == ["embedding", "layers"]
    assert [name for name, count in middle.items() if count] == ["layers"]
    assert [name for name, count in last.items() if count] == ["embedding", "layers", "norm"]
    untied_last = LLAMA_70B.parameter_counts(60, 80)
    assert [name for name, count in untied_last.items() if count] == ["layers", "norm", "head"]


def test_biases_are_counted() -> None:
    qkv = replace(LLAMA_70B, qkv_bias=True)
    assert qkv.layer_parameters() - LLAMA_70B.layer_parameters() == 8192 + 2 * 1024
    every = replace(qkv, o_bias=True, mlp_bias=True)
    assert every.layer_parameters() - qkv.layer_parameters() == 8192 + 2 * 28672 + 8192


def test_s1_bytes_over_a_link() -> None:
    """The formula is normative: 4 x 4096 prompt tokens move as much as 32 x 512, 512 MiB."""
    assert LLAMA_70B.hidden_state_bytes(32 * 512, 2) == 512 << 20
    assert LLAMA_70B.hidden_state_bytes(4 * 4096, 2) == 512 << 20
    assert LLAMA_70B.hidden_state_bytes(256, 2) == 8 << 20


def test_kv_bytes_of_a_70b_model() -> None:
    assert LLAMA_70B.kv_bytes_per_token(80, 2) == 320 << 10
    assert LLAMA_70B.kv_bytes_per_token(1, 2) == 4 << 10


def test_reading_a_model_does_not_import_torch() -> None:
    names = "penstock.families.registry", "penstock.families.spec", "penstock.weights.checkpoint"
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
