"""Architectures of GGUF files that differ from Llama's in more than numbers, by small checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from deepseek_models import MODELS, make_with_mtp
from expert_families import EXPERT_FAMILIES
from families import FAMILIES
from gguf_families import BY_NUMBERS, DENSE, LATENT, WITH_EXPERTS
from gguf_files import Typed
from gguf_models import as_gguf
from gguf_stages import kernels, logits, stages
from penstock.errors import CheckpointError, ModelConfigError, UnsupportedModelError
from penstock.families.gguf_kinds import kind_of_file
from penstock.families.registry import load_spec
from penstock.families.spec import ModelSpec
from penstock.gguf.file import GgufFile

# Widths of whole blocks, and no choice of experts that a last bit could change.
OF_BLOCKS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


def make(directory: Path, name: str, **changes: Any) -> Path:
    if name in LATENT and changes.pop("latent", False):
        return MODELS[name].make(directory, **LATENT[name] | changes)
    if name in WITH_EXPERTS:
        return EXPERT_FAMILIES[name].make(directory, **WITH_EXPERTS[name] | changes)
    return FAMILIES[name].make(directory, **DENSE[name] | changes)


def assert_same(path: Path, checkpoint: Path) -> None:
    expected = logits(checkpoint, own_kernels=kernels())
    assert torch.equal(logits(path, (1,), own_kernels=kernels()), expected)


@pytest.mark.parametrize("name", [*DENSE, *WITH_EXPERTS])
def test_floats_of_every_architecture_give_the_checkpoints_logits_to_the_bit(
    tmp_path: Path, name: str
) -> None:
    checkpoint = make(tmp_path / "checkpoint", name)
    assert_same(as_gguf(checkpoint, tmp_path / "gguf").path, checkpoint)


@pytest.mark.parametrize("name", LATENT)
def test_floats_of_latent_attention_give_the_checkpoints_logits_to_the_bit(tmp_path: Path, name: str) -> None:
    checkpoint = make(tmp_path / "checkpoint", name, latent=True)
    assert_same(as_gguf(checkpoint, tmp_path / "gguf").path, checkpoint)


@pytest.mark.parametrize("name", ["v2", "v3 yarn"])
def test_files_from_before_keys_and_values_were_split_are_read(tmp_path: Path, name: str) -> None:
    """They do not say how experts are scored. Some have both forms, of which one is enough."""
    checkpoint = make(tmp_path / "checkpoint", name, latent=True)
    other = {f"blk.0.attn_{part}_b.weight": np.ones((7, 3), np.float32) for part in "kv"}
    made = as_gguf(checkpoint, tmp_path / "gguf", extra=other, is_old=True)
    assert_same(made.path, checkpoint)


@pytest.mark.parametrize("name", ["glm", "smollm3", "dots1"])
def test_query_key_and_value_in_one_tensor_are_found(tmp_path: Path, name: str) -> None:
    checkpoint = make(tmp_path / "checkpoint", name)
    assert_same(as_gguf(checkpoint, tmp_path / "gguf", is_fused=True).path, checkpoint)


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")])
def test_text_models_of_models_of_more_than_text_are_served(
    tmp_path: Path, family: str, architecture: str
) -> None:
    sections = {"rope.dimension_sections": np.array([2, 1, 1, 0], "i4")}
    checkpoint = (
        make_checkpoint(tmp_path / "checkpoint", family="qwen2")
        if family == "qwen2"
        else FAMILIES[family].make(tmp_path / "checkpoint")
    )
    made = as_gguf(checkpoint, tmp_path / "gguf", architecture=architecture, metadata=sections)
    assert_same(made.path, checkpoint)


@pytest.mark.parametrize("name", ["v3", "glm4_moe"])
def test_layers_behind_the_last_are_left_out_or_used(tmp_path: Path, name: str) -> None:
    checkpoint = make_with_mtp(tmp_path / "checkpoint", name=name)
    path = as_gguf(checkpoint, tmp_path / "gguf").path
    spec = load_spec(path)
    assert (spec.num_layers, spec.num_unused_layers, spec.has_mtp) == (3, 1, True)
    assert_same(path, checkpoint)
    (found,), (expected,) = stages(path, with_mtp=True), stages(checkpoint, with_mtp=True)
    weights = dict(expected.named_parameters())
    assert "model.layers.3.eh_proj.weight" in weights
    for key, weight in found.named_parameters():
        assert torch.equal(weight, weights.pop(key)), key
    assert not weights


def test_a_family_that_uses_no_layer_behind_the_last_leaves_it_out(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "exaone4")
    counts = {"block_count": 4, "nextn_predict_layers": 1}
    further = {f"blk.3.{part}.weight": np.ones((2, 2), np.float32) for part in ("attn_q", "nextn.eh_proj")}
    assert_same(as_gguf(checkpoint, tmp_path / "gguf", extra=further, metadata=counts).path, checkpoint)


def test_a_layer_that_was_counted_and_left_out_is_not_missed(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "glm4_moe")
    counts = {"block_count": 4, "nextn_predict_layers": 1}
    path = as_gguf(checkpoint, tmp_path / "gguf", metadata=counts).path
    assert not load_spec(path).has_mtp
    assert_same(path, checkpoint)


@pytest.mark.parametrize(("block", "is_old"), [("Q8_0", False), ("Q4_0", False), ("Q4_0", True)])
def test_latent_attention_in_blocks(tmp_path: Path, block: str, is_old: bool) -> None:
    checkpoint = MODELS["v3"].make(tmp_path / "checkpoint", **OF_BLOCKS)
    exact = ("norm", "gate_inp", "exp_probs")
    made = as_gguf(
        checkpoint,
        tmp_path / "gguf",
        lambda name: None if any(part in name for part in exact) else block,
        is_old=is_old,
    )
    (stage,), (plain,) = stages(made.path), stages(made.plain)
    expansions = [name for name, _ in plain.named_parameters() if "kv_b_proj" in name]
    assert len(expansions) == 3
    for name in expansions:
        assert torch.equal(stage.get_parameter(name), plain.get_parameter(name))
    expected = logits(made.plain)
    for own_kernels in (kernels(), None):
        found = logits(made.path, own_kernels=own_kernels)
        # Activations are rounded to 8 bits, weights are the same.
        assert (found - expected).square().mean().sqrt() < 0.1 * expected.square().mean().sqrt()


def spec_of(path: Path, name: str, values: Mapping[str, Any] = MappingProxyType({})) -> ModelSpec:
    """The model of a file with other metadata."""
    checkpoint = make(path / "checkpoint", name, latent=name in LATENT and name not in DENSE)
    return load_spec(as_gguf(checkpoint, path / "gguf", metadata=values).path)


def test_windows_are_a_list_a_pattern_or_none(tmp_path: Path) -> None:
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    listed = spec_of(tmp_path / "a", "exaone4")
    assert (listed.layer_windows, listed.unrotated_layers) == ((7, 0, 7), frozenset({1}))
    every_third = spec_of(tmp_path / "b", "exaone4", {pattern: 3})
    assert (every_third.layer_windows, every_third.unrotated_layers) == ((7, 7, 0), frozenset({2}))
    without = spec_of(tmp_path / "c", "exaone4", {window: None, pattern: None})
    assert (without.layer_windows, without.unrotated_layers) == ((), frozenset())
    unlisted = spec_of(tmp_path / "d", "olmo3", {pattern: None})
    assert unlisted.layer_windows == (7, 7, 7)
    assert spec_of(tmp_path / "e", "olmo3", {window: None, pattern: None}).layer_windows == ()


def test_numbers_of_stretched_positions_are_read(tmp_path: Path) -> None:
    yarn = {"attn_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}
    spec = spec_of(tmp_path, "olmo3", {f"rope.scaling.yarn_{key}": value for key, value in yarn.items()})
    assert (spec.rope.attention_factor, spec.rope.beta_fast, spec.rope.beta_slow) == (1.25, 16, 2)
    assert spec.local_rope is not None
    assert spec.local_rope.kind == "default"


def test_bases_of_gemma_3_have_two_names(tmp_path: Path) -> None:
    """Those of llama.cpp and of Ollama; without either they are the family's."""
    checkpoint = FAMILIES["gemma3"].make(tmp_path / "checkpoint", **BY_NUMBERS["gemma3"])
    nested = {"rope.freq_base": None, "rope.global.freq_base": 5e5, "rope.local.freq_base": 2e4}
    for name, values, bases in (("a", nested, (5e5, 2e4)), ("b", {"rope.freq_base": None}, (1e6, 1e4))):
        spec = load_spec(as_gguf(checkpoint, tmp_path / name, metadata=values).path)
        assert spec.local_rope is not None
        assert (spec.rope.theta, spec.local_rope.theta) == bases


def test_a_file_with_a_part_for_images_is_called_so(tmp_path: Path) -> None:
    extra = {"v.blk.0.attn_k.weight": np.zeros((4, 4), "<f4")}
    path = as_gguf(make_checkpoint(tmp_path / "checkpoint"), tmp_path / "gguf", extra=extra).path
    with pytest.raises(UnsupportedModelError, match="a part for images beside the text model"):
        load_spec(path)


def test_heads_that_are_rotated_whole_are_not_halved(tmp_path: Path) -> None:
    assert spec_of(tmp_path / "a", "glm4_moe").rope.rotary_fraction == 0.5
    assert spec_of(tmp_path / "b", "glm4_moe", {"rope.dimension_count": 16}).rope.rotary_fraction == 1


def test_groups_of_deepseeks_own_models_are_known_where_the_file_lacks_them(tmp_path: Path) -> None:
    """Files from before late 2025 do not say that a token's experts come from 4 groups of 8."""
    metadata = {
        "expert_count": 256,
        "expert_used_count": 8,
        "embedding_length": 7168,
        "expert_group_count": None,
    }
    checkpoint = make(tmp_path / "checkpoint", "v3", latent=True)
    wide = {"token_embd.weight": np.zeros((150, 7168), np.float16)}
    file = GgufFile.open(as_gguf(checkpoint, tmp_path / "gguf", extra=wide, metadata=metadata).path)
    kind = kind_of_file(file)
    assert kind is not None
    fields = kind.fields(file)
    assert (fields["n_group"], fields["topk_group"]) == (8, 4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "growing latents": ("v3", {"attention.temperature_scale": 0.1}, r"queries scaled by position"),
    "no experts": ("v2", {"expert_count": 0}, r"deepseek2 model without experts"),
    "scoring": ("v3", {"expert_gating_func": 4}, r"function 4 \(expert_gating_func\)"),
    "glm scoring": ("glm4_moe", {"expert_gating_func": 1}, r"scoring_func must be one of sigmoid"),
    "pictures": ("glm4", {"rope.dimension_sections": np.ones(4, "i4")}, r"positions in images"),
    "pattern": ("exaone4", {"attention.sliding_window_pattern": np.ones(2, "b1")}, r"each of 3 layers"),
    "layers": (
        "exaone4",
        {"block_count": Typed(kind=10, value=2**64 - 1), "attention.sliding_window_pattern": 3},
        r"num_hidden_layers must be an integer from 1 to 1024, found 18446744073709551615",
    ),
    "rank": ("v3", {"attention.kv_lora_rank": 25}, r"25 rows for each of 4 heads.*found 24 and 24"),
    "heads": ("v3", {"attention.head_count": 3}, r"attn_k_b.weight: expected equal parts for 3 heads"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_variants_that_are_not_built_are_refused_by_name(tmp_path: Path, what: str) -> None:
    name, values, said = REFUSED[what]
    with pytest.raises((UnsupportedModelError, ModelConfigError, CheckpointError), match=said):
        spec_of(tmp_path, name, values)


def test_a_half_of_a_split_projection_is_missed_by_name(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "v2", latent=True)
    path = as_gguf(checkpoint, tmp_path / "gguf").path
    raw = path.read_bytes().replace(b"blk.1.attn_v_b.weight", b"blk.1.attn_v_c.weight")
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"blk.1.attn_v_b.weight: expected equal parts for 4 heads"):
        load_spec(path)


def test_halves_of_a_split_projection_have_the_widths_of_the_metadata(tmp_path: Path) -> None:
    """Together they have as many rows as they should, of which too many are the keys'."""
    checkpoint = make(tmp_path / "checkpoint", "v2", latent=True)
    other = {"attn_k_b": (4, 24, 13), "attn_v_b": (4, 9, 24)}
    extra = {f"blk.1.{part}.weight": np.ones(shape, np.float32) for part, shape in other.items()}
    path = as_gguf(checkpoint, tmp_path / "gguf", extra=extra).path
    with pytest.raises(CheckpointError, match=r"blk.1.attn_k_b.weight: expected keys of 12 .*found 13"):
        load_spec(path)


def test_a_weight_of_pieces_of_another_width_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"attn_k_b.weight: expected \[96, 24\] .*found \[88, 24\]"):
        spec_of(tmp_path, "v2", {"attention.value_length_mla": 12})
