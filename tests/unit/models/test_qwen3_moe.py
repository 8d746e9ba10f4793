"""Qwen3-MoE against transformers, from what transformers saves: seeded random weights, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_reference import MIN_MARGIN, NUM_TOKENS, PROMPT, reference_greedy, reference_logits
from kernel_builds import built
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from stage_driver import StageDriver

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "head_dim": 16,
    "eos_token_id": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalized, every other layer": {"norm_topk_prob": True, "decoder_sparse_step": 2},
}


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **VARIANTS[request.param]))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 1 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    made.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("with_kernels", [False, True])
def test_greedy_tokens_and_logits_of_qwen3_moe_equal_transformers(model: Path, with_kernels: bool) -> None:
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    expected, margins = reference_greedy(model)
    assert margins.min() > MIN_MARGIN
    ids = PROMPT + expected
    assert StageDriver(model, (1, 3), kernels=kernels).greedy(0, PROMPT, NUM_TOKENS, chunk=3) == expected
    found = StageDriver(model, (2,), kernels=kernels).prefill(0, ids, 7)
    torch.testing.assert_close(found, reference_logits(model, ids), atol=1e-4, rtol=0)
