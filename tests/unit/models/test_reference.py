"""Llama and Qwen2 against transformers (row A18): seeded random checkpoints, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import checkpoints
from checkpoints import LLAMA3_ROPE as LLAMA3
from checkpoints import YARN_ROPE as YARN
from depth import sampled
from hf_reference import (
    MIN_MARGIN,
    MODELS,
    NUM_TOKENS,
    PROMPT,
    RandomModel,
    reference,
    reference_greedy,
    reference_logits,
)
from stage_driver import StageDriver

VARIANTS: dict[str, dict[str, Any]] = {
    "llama3 rope": {"rope_scaling": LLAMA3},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn rope": {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_theta": None},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "wide heads": {"head_dim": 16},
    "qwen2 yarn": {"family": "qwen2", "rope_scaling": YARN},
    "many shards": {"num_shards": 5},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model", sampled(MODELS, 6), ids=str)
def test_a18_greedy_tokens_and_logits_equal_transformers(tmp_path: Path, model: RandomModel) -> None:
    model.make(tmp_path)
    expected, margins = reference_greedy(tmp_path)
    assert margins.min() > MIN_MARGIN
    assert len(set(expected)) > 4
    for cuts in ((), (1, 3)):
        assert StageDriver(tmp_path, cuts).greedy(0, PROMPT, NUM_TOKENS, chunk=3) == expected
    ids = PROMPT + expected
    logits = StageDriver(tmp_path, (2,)).prefill(0, ids, 7)
    torch.testing.assert_close(logits, reference_logits(tmp_path, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a18_variants_give_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    checkpoints.make_checkpoint(tmp_path, **VARIANTS[name])
    ids = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(5)).tolist()
    logits = StageDriver(tmp_path, (1,)).prefill(0, ids, 64)
    torch.testing.assert_close(logits, reference_logits(tmp_path, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a18_reads_what_transformers_saves(tmp_path: Path, family: checkpoints.Family, tied: bool) -> None:
    source = checkpoints.make_checkpoint(tmp_path / "source", family=family, tied=tied, rope_scaling=LLAMA3)
    saved = tmp_path / "saved"
    reference(source).save_pretrained(saved, max_shard_size="20KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    ids = list(range(3, 80))
    logits = StageDriver(saved, (1, 2)).prefill(0, ids, 16)
    torch.testing.assert_close(logits, reference_logits(source, ids), atol=1e-4, rtol=0)


def test_a18_bfloat16_is_near_float32(tmp_path: Path) -> None:
    """Both round; ours may be no further from the exact logits than that of transformers, with some slack."""
    checkpoints.make_checkpoint(tmp_path, dtype=torch.bfloat16, seed=1)
    ids = list(range(3, 80))
    exact = reference_logits(tmp_path, ids)
    ours = StageDriver(tmp_path, (2,), dtype=torch.bfloat16).prefill(0, ids, 16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].float()
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()
