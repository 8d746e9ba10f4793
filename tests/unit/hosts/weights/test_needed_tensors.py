"""Which tensors a rank needs, and what a head may not describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import make_checkpoint
from deepseek_models import make_with_mtp
from penstock.errors import ProtocolError
from penstock.families.registry import load_spec
from penstock.hosts.weights.needed_tensors import TensorGroup, tensor_groups
from penstock.hosts.weights.weight_wire import TensorShape
from penstock.weights.checkpoint import Checkpoint, read_header
from rank_configs import make_rank_configs


def described(model: Path) -> list[TensorShape]:
    checkpoint = Checkpoint(model)
    entries = map(checkpoint.entry, sorted(checkpoint.names))
    return [TensorShape(entry.name, entry.dtype, entry.shape) for entry in entries]


def groups(model: Path, stage: int, **layout: Any) -> list[str]:
    rank = make_rank_configs(model, 3, **layout)[stage]
    return [group.name for group in tensor_groups(described(model), load_spec(model), rank)]


def test_g1_stages_get_their_layers_and_the_ends_that_they_have(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, layers=3)
    assert groups(model, 0) == ["model.embed_tokens", "model.layers.0"]
    assert groups(model, 1) == ["model.layers.1"]
    assert sorted(groups(model, 2)) == ["lm_head", "model.layers.2", "model.norm"]


@pytest.mark.parametrize(("tied_head", "has_embedding"), [("load", True), ("transfer", False)])
def test_g1_the_last_stage_gets_a_tied_embedding_where_it_reads_it(
    tmp_path: Path, tied_head: str, has_embedding: bool
) -> None:
    model = make_checkpoint(tmp_path, layers=3, tied=True)
    assert ("model.embed_tokens" in groups(model, 2, tied_head=tied_head)) == has_embedding
    assert "model.embed_tokens" not in groups(model, 1)


def test_g1_experts_go_with_their_layer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family="qwen3_moe", layers=3)
    rank = make_rank_configs(model, 3)[1]
    (layer,) = tensor_groups(described(model), load_spec(model), rank)
    assert all(name.startswith("model.layers.1.") for name in layer.names)
    assert sum(".experts." in name for name in layer.names) == 18


def test_g1_of_a_model_of_transformers_the_ends_get_all_that_is_in_no_layer(tmp_path: Path) -> None:
    import dataclasses

    model = make_checkpoint(tmp_path, layers=3)
    spec = dataclasses.replace(load_spec(model), implementation="transformers")
    names = ["transformer.wte.weight", "transformer.ln_f.weight", "odd.7.weight"]
    names += [f"transformer.h.{layer}.mlp.weight" for layer in range(3)]
    tensors = [TensorShape(name, "F32", (2,)) for name in names]
    found = [tensor_groups(tensors, spec, rank) for rank in make_rank_configs(model, 3)]
    outside = ["transformer.wte", "transformer.ln_f", "odd.7"]
    assert [[group.name for group in each] for each in found] == [
        [*outside, "transformer.h.0"],
        ["transformer.h.1"],
        [*outside, "transformer.h.2"],
    ]


def test_the_header_of_a_group_is_one_of_a_safetensors_file(tmp_path: Path) -> None:
    group = TensorGroup.of("g", [TensorShape("b", "BF16", (2, 3)), TensorShape("a", "I8", (3,))])
    (tmp_path / "x").write_bytes(group.header + bytes(group.num_bytes))
    header = read_header(tmp_path / "x")
    assert [(name, entry.dtype, entry.shape) for name, entry in header.items()] == [
        ("a", "I8", (3,)),
        ("b", "BF16", (2, 3)),
    ]
    assert len(group.header) % 8 == 0


def test_the_key_of_a_group_follows_its_content_and_its_shapes() -> None:
    group = TensorGroup.of("g", [TensorShape("a", "I8", (3,))])
    other = TensorGroup.of("g", [TensorShape("a", "U8", (3,))])
    assert group.shape_key != other.shape_key
    assert group.content_key([b"1" * 16]) != group.content_key([b"2" * 16])
    assert group.content_key([b"1" * 16]) != other.content_key([b"1" * 16])


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "Q9"},
        {"shape": (1 << 50,)},
        {"shape": (-1, 2)},
        {"shape": (1,) * 9},
        {"name": "x" * 5000},
        {"name": "__metadata__"},
    ],
    ids=str,
)
def test_r15_a_tensor_that_cannot_be_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    model = make_checkpoint(tmp_path, layers=3)
    good = TensorShape("model.norm.weight", "F32", (2,))
    bad = msgspec.structs.replace(good, **changed)
    with pytest.raises(ProtocolError, match="an impossible tensor"):
        tensor_groups([bad], load_spec(model), make_rank_configs(model, 3)[0])


def test_r15_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, layers=3)
    with pytest.raises(ProtocolError):
        tensor_groups(described(model) * 2, load_spec(model), make_rank_configs(model, 3)[0])


def test_a_rank_with_an_mtp_layer_needs_it_and_the_embedding(tmp_path: Path) -> None:
    """All that it loads, and not the copies of what the model has."""
    model = make_with_mtp(tmp_path)
    spec, found = load_spec(model), described(model)
    plain = make_rank_configs(model, 2)[1]
    rank = msgspec.structs.replace(plain, mtp=True)
    names = {tensor.name for group in tensor_groups(found, spec, rank) for tensor in group.tensors}
    before = {tensor.name for group in tensor_groups(found, spec, plain) for tensor in group.tensors}
    layer = {tensor.name for tensor in found if tensor.name.startswith("model.layers.3.")}
    assert names - before == {"model.embed_tokens.weight", *layer - spec.mtp_copies}
    assert spec.mtp_copies < layer
