"""Frequencies and angles against transformers, rotation against complex numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import checkpoints
from checkpoints import LLAMA3_ROPE as LLAMA3
from checkpoints import YARN_ROPE as YARN
from penstock.families.registry import load_spec
from penstock.families.rope_spec import RopeSpec
from penstock.layers.compute import Compute
from penstock.layers.rope import RotaryEmbedding, inverse_frequencies

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 500000.0},
    "old linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "new linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5}},
    "new default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama3, own length": {"rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k}},
    "new llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}},
    "yarn": {"rope_scaling": YARN},
    "old yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn, betas": {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "rope_theta": 1e5}},
    "yarn, not truncated": {"rope_parameters": YARN | {"truncate": False}},
    "yarn, attention factor": {"rope_parameters": YARN | {"attention_factor": 1.25}},
    "yarn, mscale": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.1}},
    "yarn, no ramp": {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a18_angles_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoints.make_checkpoint(
        tmp_path, layers=1, hidden_size=64, max_positions=512, head_dim=32, **CONFIGURATIONS[name]
    )
    spec = load_spec(tmp_path)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    ours = inverse_frequencies(spec.rope, spec.head_dim)
    assert torch.equal(ours, theirs.inv_freq)

    positions = torch.tensor([0, 1, 63, 64, 511])
    cos, sin = theirs(torch.empty(0), positions[None])
    angles = RotaryEmbedding(
        spec.rope, spec.head_dim, compute=Compute(dtype=torch.float32, device=torch.device("cpu"))
    ).angles(positions)
    assert torch.equal(angles.cos[:, 0], cos[0])
    assert torch.equal(angles.sin[:, 0, 16:], sin[0, :, 16:])


def test_rotation_is_a_complex_product() -> None:
    rope = RotaryEmbedding(RopeSpec(), 8, compute=Compute(dtype=torch.float32, device=torch.device("cpu")))
    heads = torch.randn((3, 2, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 5, 1000])
    rotated = rope.angles(positions).rotate(heads)
    turns = positions[:, None].double() * inverse_frequencies(RopeSpec(), 8).double()
    expected = (
        torch.complex(*heads.double().split(4, -1)) * torch.polar(torch.ones_like(turns), turns)[:, None]
    )
    torch.testing.assert_close(
        rotated.double(), torch.cat((expected.real, expected.imag), -1), atol=1e-4, rtol=0
    )
    assert torch.equal(rotated[0], heads[0])


def test_rotation_does_not_change_its_input() -> None:
    rope = RotaryEmbedding(RopeSpec(), 4, compute=Compute(dtype=torch.float32, device=torch.device("cpu")))
    heads = torch.ones(2, 1, 4)
    rope.angles(torch.tensor([3, 4])).rotate(heads)
    assert torch.equal(heads, torch.ones(2, 1, 4))


def test_angles_of_no_tokens_are_empty() -> None:
    rope = RotaryEmbedding(RopeSpec(), 4, compute=Compute(dtype=torch.bfloat16, device=torch.device("cpu")))
    angles = rope.angles(torch.empty(0, dtype=torch.int64))
    assert angles.rotate(torch.empty(0, 3, 4, dtype=torch.bfloat16)).shape == (0, 3, 4)
