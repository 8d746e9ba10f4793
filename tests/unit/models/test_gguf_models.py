"""A model in GGUF computes what the checkpoint computes that it was made from, in every family and format."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import LLAMA3_ROPE, make_checkpoint, write_weights
from families import FAMILIES
from gguf_families import BY_NUMBERS
from gguf_files import Stored, write_gguf
from gguf_models import GgufModel, as_gguf
from gguf_stages import PROMPT, kernels, logits, stages
from penstock.errors import CheckpointError, UnsupportedModelError
from penstock.families.gguf_kinds import known_architectures
from penstock.families.registry import load_spec
from penstock.gguf.block_types import PACKAGE_TYPES, TYPES
from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.layers.block_matrix import BlockMatrix
from penstock.layers.rope import inverse_frequencies
from penstock.models.decoder import Decoder
from penstock.rank.stored_weights import read_model
from stage_driver import StageDriver

WIDE = {"hidden_size": 256, "intermediate_size": 512, "layers": 2, "vocab_size": 96}


@pytest.mark.parametrize("family", BY_NUMBERS)
def test_floats_of_every_family_give_the_checkpoints_logits_to_the_bit(tmp_path: Path, family: str) -> None:
    checkpoint = FAMILIES[family].make(tmp_path / "checkpoint", **BY_NUMBERS[family])
    made = as_gguf(checkpoint, tmp_path / "gguf")
    assert load_spec(made.path).quantization is None
    expected = logits(checkpoint, own_kernels=kernels())
    assert torch.equal(logits(made.path, (1,), own_kernels=kernels()), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_that_share_a_tensor_are_found(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family=family)  # type: ignore[arg-type]
    made = as_gguf(checkpoint, tmp_path / "gguf")
    assert torch.equal(logits(made.path, (2,)), logits(checkpoint))


def make_blocks(directory: Path, block: str, **config: object) -> GgufModel:
    checkpoint = make_checkpoint(directory / "checkpoint", **(WIDE | config))  # type: ignore[arg-type]
    return as_gguf(checkpoint, directory / "gguf", lambda name: None if "norm" in name else block)


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("block", BLOCK_FORMATS)
def test_blocks_compute_like_their_dequantised_weights(
    tmp_path: Path, block: str, with_kernels: bool
) -> None:
    made = make_blocks(tmp_path, block)
    found = logits(made.path, own_kernels=kernels() if with_kernels else None)
    expected = logits(made.plain)
    # Activations are rounded to 8 bits, weights are the same.
    assert (found - expected).square().mean().sqrt() < 0.06 * expected.square().mean().sqrt()


def test_stages_chunks_and_company_do_not_change_a_bit_of_mixed_formats(tmp_path: Path) -> None:
    """As in published files: values and down projections have more bits than queries, keys and gates."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **WIDE)
    wide = ("attn_v", "ffn_down", "token_embd")

    def block_of(name: str) -> str | None:
        if "norm" in name:
            return None
        return "Q6_K" if any(part in name for part in wide) else "Q4_K"

    path = as_gguf(checkpoint, tmp_path / "gguf", block_of).path
    spec = load_spec(path)
    assert spec.quantization is not None
    assert spec.quantization.describe().startswith("gguf: Q4_K (11 tensors), Q6_K (5), ")
    whole = stages(path, own_kernels=kernels())
    assert isinstance(whole[0].layers[0].self_attn.qkv_proj.weight, BlockMatrix)
    for dtype in (torch.float32, torch.bfloat16):
        expected = logits(path, own_kernels=kernels(), dtype=dtype, chunk=64)
        for cuts, chunk in (((1,), 7), ((1,), 1), ((), 5)):
            assert torch.equal(logits(path, cuts, chunk, own_kernels=kernels(), dtype=dtype), expected)


def test_gate_and_up_in_two_formats_are_held_as_floats(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **WIDE)
    formats = {"ffn_gate": "Q4_K", "ffn_up": "Q5_K"}
    made = as_gguf(checkpoint, tmp_path / "gguf", lambda name: formats.get(name.split(".")[-2]))
    torch.testing.assert_close(
        logits(made.path, own_kernels=kernels()), logits(made.plain), atol=1e-4, rtol=0
    )


def test_experts_in_blocks_are_taken_by_the_grouped_kernel(tmp_path: Path) -> None:
    made = make_blocks(tmp_path, "Q4_K", family="qwen3_moe", moe_intermediate_size=256)
    (stage,) = stages(made.path, own_kernels=kernels())
    assert stage.layers[0].mlp.is_grouped
    found = StageDriver(made.path, stages=[stage]).prefill(0, PROMPT, 16)
    expected = logits(made.plain)
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.square().mean().sqrt()


def test_experts_of_which_some_are_held_as_floats_are_taken_one_by_one(tmp_path: Path) -> None:
    sizes = {**WIDE, "family": "qwen3_moe", "moe_intermediate_size": 256}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **sizes)
    formats = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q5_K", "ffn_down_exps": "Q6_K"}
    made = as_gguf(checkpoint, tmp_path / "gguf", lambda name: formats.get(name.split(".")[-2]))
    (stage,) = stages(made.path, own_kernels=kernels())
    assert not stage.layers[0].mlp.is_grouped
    found = StageDriver(made.path, stages=[stage]).prefill(0, PROMPT, 16)
    expected = logits(made.plain)
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.square().mean().sqrt()


def test_only_the_own_bytes_are_read_and_little_more_is_held(tmp_path: Path) -> None:
    made = make_blocks(tmp_path, "Q4_K")
    stored = read_model(made.path)
    spec, weights = stored.spec, stored.open_weights(b"")
    seen: list[tuple[int, int]] = []
    stage = Decoder(
        spec,
        (1, 2),
        dtype=torch.float32,
        device="cpu",
        kernels=kernels(),
        format_of=weights.form_of,
        block_size=4,
    )
    report = weights.load(stage, lambda done, total: seen.append((done, total)), frozenset())
    layer = 144 * (4 * 256 + 3 * 512) + 4 * 2 * 256  # q, k, v and o, the MLP, two norms
    layer -= 144 * 2 * (256 - 128)  # two heads of keys and values
    head = 144 * 96 + 4 * 256
    assert report.bytes_read == layer + head
    assert seen[-1] == (report.bytes_read, report.bytes_read)
    assert report.bytes_read <= report.tensor_bytes < 1.04 * report.bytes_read


def test_factors_of_the_rotation_come_from_their_tensor(tmp_path: Path) -> None:
    """Llama 3.1 and later: the file has no other trace of the scaling."""
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 256}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", rope_scaling=rope)
    rotation = load_spec(checkpoint).rope
    plain = inverse_frequencies(replace(rotation, kind="default"), 8)
    factors = (plain / inverse_frequencies(rotation, 8)).numpy()
    path = as_gguf(checkpoint, tmp_path / "gguf", extra={"rope_freqs.weight": factors}).path
    assert load_spec(path).max_position_embeddings == 256
    torch.testing.assert_close(logits(path), logits(checkpoint), atol=1e-4, rtol=0)
    for bad in (factors - factors, factors[:0], factors.astype("f2")):
        path = as_gguf(checkpoint, tmp_path / "gguf", extra={"rope_freqs.weight": bad}).path
        with pytest.raises(CheckpointError, match=r"rope_freqs.weight: expected"):
            load_spec(path)


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "mamba"}, {})
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'mamba'; supported in GGUF files: llama, mistral3, q"
    ):
        load_spec(path)
    blocks = Stored(shape=(1, 256), kind=19, content=bytes(50))
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"token_embd.weight": blocks})
    with pytest.raises(UnsupportedModelError, match=r"unsupported types: 1 of IQ1_S. Supported: F32, .*Q4_K"):
        load_spec(path)


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")

    def broken(**changes: torch.Tensor) -> Path:
        write_weights(checkpoint, {**tensors, **changes})
        return as_gguf(checkpoint, tmp_path / "gguf").path

    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight: expected \[48, 32\] .*found \[47, 32\]"):
        stages(broken(**{name: tensors[name][:47]}))
    with pytest.raises(CheckpointError, match=r"blk.1.attn_q.bias: expected no such tensor"):
        stages(broken(**{"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}))
    damaged = tensors[name].clone()
    damaged[3, 5] = torch.nan
    path = broken(**{name: damaged})
    with pytest.raises(CheckpointError, match=r"ffn_up.weight: expected finite numbers, found nan in row 3"):
        stages(path)
    del tensors[name]
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight: expected this tensor"):
        stages(broken())


def test_the_page_of_formats_names_every_architecture_and_every_type() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = page.partition("| kind | architectures")[2].partition("\n\n")[0]
    assert set(known_architectures()) == set(re.findall(r"`(\w+)`", rows))
    types = {kind.name for kind in TYPES.values()}
    assert set(BLOCK_FORMATS) | {"F32", "F16", "BF16"} | set(PACKAGE_TYPES) <= types
    for name in (*BLOCK_FORMATS, *PACKAGE_TYPES):
        assert re.search(rf"\b{name}\b", page), name
