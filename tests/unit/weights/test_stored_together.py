"""Projections of one input that a checkpoint stores as one tensor: every rank reads its own rows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import quantization_config, quantize_at_random, quantized_tensors, write_weights
from families import FAMILIES
from hand_core import Wanted, small_core
from penstock.distributed.group import MemoryGroup
from penstock.errors import CheckpointError
from penstock.executor.inprocess import InprocessExecutor
from penstock.rank.loading import load_rank
from rank_configs import make_rank_configs
from stage_driver import StageDriver

IDS = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return FAMILIES["phi3"].make(tmp_path / "whole", intermediate_size=64)


def test_ranks_have_the_rows_of_their_heads(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    for rank in (0, 1):
        group = MemoryGroup(rank, 2, name="stage 0", timeout_s=1.0)
        layer = StageDriver(checkpoint, group=group).stages[0].layers[1]
        qkv = stored["model.layers.1.self_attn.qkv_proj.weight"].split([64, 32, 32])
        own = torch.cat([part.chunk(2)[rank] for part in qkv])
        assert torch.equal(layer.self_attn.qkv_proj.weight, own)
        gate_up = stored["model.layers.1.mlp.gate_up_proj.weight"].chunk(2)
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([p.chunk(2)[rank] for p in gate_up]))


def test_a_tensor_of_another_height_is_refused(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-16]
    write_weights(checkpoint, tensors)
    with pytest.raises(CheckpointError, match=r"\[128, 32\]"):
        StageDriver(checkpoint)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_quantised_they_compute_like_their_dequantised_weights(
    checkpoint: Path, tmp_path: Path, kernels: str
) -> None:
    quantized, dequantized = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        quantized[name] = dequantized[name] = tensor
        if name.endswith("_proj.weight"):
            rounded = quantize_at_random(tensor, bits=4, group_size=16, symmetric=True, generator=generator)
            del quantized[name]
            for part, values in quantized_tensors("gptq", rounded, symmetric=True).items():
                quantized[f"{name.removesuffix('weight')}{part}"] = values
            dequantized[name] = rounded.dequantized()
    fields = json.loads((checkpoint / "config.json").read_text())
    section = quantization_config("gptq", bits=4, group_size=16, symmetric=True)
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(fields | {"quantization_config": section}))
    write_weights(packed, quantized)
    write_weights(checkpoint, dequantized)
    (config,) = make_rank_configs(packed, 1, kernels=kernels)
    model = load_rank(config, lambda done, total: None).model
    found = StageDriver(packed, block_size=16, stages=[model]).prefill(0, IDS, 16)
    expected = StageDriver(checkpoint, block_size=16).prefill(0, IDS, 16)
    assert (found - expected).square().mean().sqrt() < 0.06 * expected.square().mean().sqrt()
    one, shared = (tokens(packed, tp, kernels) for tp in ((1,), (2, 2)))
    assert one == shared


def tokens(model: Path, tp: tuple[int, ...], kernels: str) -> list[int]:
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, kernels=kernels))
    executor.start()
    wanted = [Wanted(IDS[:20], 8)]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return wanted[0].output
