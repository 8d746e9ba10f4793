"""Families with experts against transformers: seeded random checkpoints, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import checkpoints
from depth import sampled
from hf_reference import MIN_MARGIN, NUM_TOKENS, PROMPT, reference, reference_greedy, reference_logits
from kernel_builds import built
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.experts import RoutedExperts
from stage_driver import StageDriver

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral"},
    "mixtral, one of eight": {
        "family": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "seed": 1,
    },
    "qwen2_moe": {"family": "qwen2_moe"},
    "qwen2_moe, normalized, every other layer": {
        "family": "qwen2_moe",
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "qwen2_moe, a dense layer, tied": {"family": "qwen2_moe", "mlp_only_layers": [1], "tied": True},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=sampled(MODELS, 3))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return checkpoints.make_checkpoint(tmp_path, **MODELS[request.param])


def every_kernel() -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES))


def test_greedy_tokens_and_logits_of_experts_equal_transformers(model: Path) -> None:
    expected, margins = reference_greedy(model)
    assert margins.min() > MIN_MARGIN
    assert len(set(expected)) > 4
    ids = PROMPT + expected
    logits = reference_logits(model, ids)
    for kernels in (None, every_kernel()):
        for cuts in ((), (1, 3)):
            driver = StageDriver(model, cuts, kernels=kernels)
            assert driver.greedy(0, PROMPT, NUM_TOKENS, chunk=3) == expected
        found = StageDriver(model, (2,), kernels=kernels).prefill(0, ids, 7)
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


def test_the_routers_of_these_checkpoints_use_most_experts_and_have_clear_winners(model: Path) -> None:
    """Otherwise they would prove little, or rounding would choose."""
    driver = StageDriver(model)
    logits: dict[RoutedExperts, list[torch.Tensor]] = {}
    blocks = [module for module in driver.stages[0].modules() if isinstance(module, RoutedExperts)]
    for block in blocks:
        block.router.register_forward_hook(
            lambda _, __, found, block=block: logits.setdefault(block, []).append(found)
        )
    driver.prefill(0, [(7 * i) % 96 for i in range(64)], 64)
    for block in blocks:
        count, chosen = len(block.experts), block.num_chosen
        ranked = torch.cat(logits[block])[:, :count].softmax(-1).sort(descending=True)
        assert len(ranked.indices[:, :chosen].unique()) > 0.8 * count
        assert (ranked.values[:, chosen - 1] - ranked.values[:, chosen]).min() > 1e-5


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_that_transformers_saves_are_read(tmp_path: Path, family: checkpoints.Family) -> None:
    source = checkpoints.make_checkpoint(tmp_path / "source", family=family)
    saved = tmp_path / "saved"
    reference(source).save_pretrained(saved, max_shard_size="40KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    ids = list(range(3, 80))
    logits = StageDriver(saved, (1, 2)).prefill(0, ids, 16)
    torch.testing.assert_close(logits, reference_logits(source, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_in_bfloat16_are_as_near_to_float32_as_transformers(
    tmp_path: Path, family: checkpoints.Family, with_kernels: bool
) -> None:
    """Of most tokens: where rounding has chosen another expert, either may be the better one."""
    checkpoints.make_checkpoint(tmp_path, family=family, dtype=torch.bfloat16, seed=2)
    ids = list(range(3, 80))
    exact = reference_logits(tmp_path, ids)
    kernels = every_kernel() if with_kernels else None
    ours = StageDriver(tmp_path, (2,), dtype=torch.bfloat16, kernels=kernels).prefill(0, ids, 16)
    theirs_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([ids])).logits[0].float()
    errors = [(logits - exact).square().mean(-1).median() for logits in (ours, theirs)]
    assert errors[0] < 1.5 * errors[1]
