"""Families with experts: what is read from `config.json`, what is refused, and the sums that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from penstock.errors import ModelConfigError, UsageError
from penstock.families.experts_spec import ExpertShares, ExpertsSpec
from penstock.families.registry import load_spec
from penstock.families.sharding import require_shardable
from penstock.families.spec import ModelSpec
from stage_driver import StageDriver


def spec_of(directory: Path, **changes: Any) -> ModelSpec:
    checkpoints.make_checkpoint(directory, **changes)
    return load_spec(directory)


def experts_of(spec: ModelSpec) -> ExpertsSpec:
    assert spec.experts is not None
    return spec.experts


def test_mixtral_is_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, family="mixtral", num_local_experts=8, router_jitter_noise=0.5)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.num_chosen, experts.inner_size) == (8, 2, spec.intermediate_size)
    assert experts.normalized
    assert not experts.has_shared
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False, False, False)
    assert all(spec.experts_of(layer) is experts for layer in range(spec.num_layers))


def test_qwen2_moe_is_read(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, family="qwen2_moe", decoder_sparse_step=2, mlp_only_layers=[3], layers=6)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.num_chosen) == (6, 3)
    assert (experts.inner_size, experts.shared_size) == (24, 40)
    assert not experts.normalized
    assert (spec.qkv_bias, spec.o_bias) == (True, False)
    assert [spec.experts_of(layer) is None for layer in range(6)] == [True, False, True, True, True, False]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {"mixtral": transformers.MixtralConfig, "qwen2_moe": transformers.Qwen2MoeConfig}[family]()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {name: getattr(theirs, name) for name in sizes}
    fields["architectures"] = ["MixtralForCausalLM" if family == "mixtral" else "Qwen2MoeForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = load_spec(tmp_path)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.num_chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.max_position_embeddings == theirs.max_position_embeddings
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]
    if family == "qwen2_moe":
        assert experts.inner_size == theirs.moe_intermediate_size
        assert experts.shared_size == theirs.shared_expert_intermediate_size


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "must be an integer from 1 to 4, found 5"),
        ("mixtral", {"num_experts_per_tok": 0}, "must be an integer from 1 to 4, found 0"),
        ("mixtral", {"num_local_experts": 5000}, "num_local_experts must be an integer from 1 to 1024"),
        ("mixtral", {"sliding_window": 100}, "sliding_window must be null"),
        ("qwen2_moe", {"num_experts_per_tok": 7}, "must be an integer from 1 to 6, found 7"),
        ("qwen2_moe", {"num_experts": "6"}, 'num_experts must be an integer from 1 to 1024, found "6"'),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be an integer from 1"),
        ("qwen2_moe", {"mlp_only_layers": [9]}, "mlp_only_layers must be a list of integers from 0 to 3"),
        ("qwen2_moe", {"mlp_only_layers": "none"}, "mlp_only_layers must be a list of integers from 0 to 3"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window must be false"),
    ],
)
def test_impossible_experts_are_refused_with_field_and_limits(
    tmp_path: Path, family: checkpoints.Family, changes: dict[str, Any], said: str
) -> None:
    checkpoints.make_checkpoint(tmp_path, family=family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelConfigError) as refused:
        load_spec(tmp_path)
    assert said in refused.value.message
    assert refused.value.param == next(iter(changes))


def test_a_window_that_holds_every_sequence_is_none(tmp_path: Path) -> None:
    assert experts_of(spec_of(tmp_path, family="mixtral", sliding_window=256))


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "mixtral"},
        {"family": "qwen2_moe", "mlp_only_layers": [1]},
        {"family": "qwen2_moe", "decoder_sparse_step": 2, "tied": True},
    ],
)
@pytest.mark.parametrize("cuts", [(), (1, 3)])
def test_a_stage_holds_the_experts_that_are_counted_for_it(
    tmp_path: Path, changes: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    checkpoints.make_checkpoint(tmp_path, **changes)
    driver = StageDriver(tmp_path, cuts)
    for stage in driver.stages:
        held = sum(parameter.numel() for parameter in stage.parameters())
        assert held == driver.spec.stage_parameters(stage.start_layer, stage.end_layer)


def test_parameters_of_mixtral_8x7b() -> None:
    experts = ExpertsSpec(num_experts=8, num_chosen=2, inner_size=14336, normalized=True)
    assert experts.parameters(4096) == 8 * 3 * 4096 * 14336 + 8 * 4096


def test_experts_are_shared_out_whole_or_by_width() -> None:
    spec = ExpertsSpec(num_experts=5, num_chosen=2, inner_size=24, normalized=True, shared_size=12)
    by_width = [ExpertShares.of(spec, rank, 2, whole_experts=False) for rank in range(2)]
    assert [(own.inner.start, own.inner.end) for own in by_width] == [(0, 12), (12, 24)]
    assert all(own.experts.is_whole for own in by_width)
    whole = [ExpertShares.of(spec, rank, 2, whole_experts=True) for rank in range(2)]
    assert [(own.experts.start, own.experts.end) for own in whole] == [(0, 3), (3, 5)]
    assert all(own.inner.is_whole for own in whole)
    assert [(own.shared.start, own.shared.end) for own in whole] == [(0, 6), (6, 12)]


@pytest.mark.parametrize(
    ("changes", "size", "expert_parallel", "said"),
    [
        ({"family": "mixtral", "intermediate_size": 50}, 4, False, "an expert is 50 wide"),
        (
            {"family": "mixtral", "num_local_experts": 3},
            4,
            True,
            "a layer has 3 experts, fewer than the ranks",
        ),
        ({"family": "qwen2_moe", "moe_intermediate_size": 26}, 4, False, "an expert is 26 wide"),
        ({"family": "qwen2_moe", "shared_expert_intermediate_size": 42}, 4, True, "the shared expert is 42"),
        (
            {"family": "qwen2_moe", "mlp_only_layers": [0], "intermediate_size": 50},
            4,
            True,
            "the MLP is 50 wide",
        ),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused_with_the_number(
    tmp_path: Path, changes: dict[str, Any], size: int, expert_parallel: bool, said: str
) -> None:
    spec = spec_of(tmp_path, vocab_size=150, kv_heads=4, **changes)
    require_shardable(spec, 1, expert_parallel=expert_parallel)
    with pytest.raises(UsageError, match=said):
        require_shardable(spec, size, expert_parallel=expert_parallel)


def test_experts_that_go_whole_to_ranks_may_be_of_any_width(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, family="mixtral", intermediate_size=51, num_local_experts=5, vocab_size=150)
    require_shardable(spec, 4, expert_parallel=True)
