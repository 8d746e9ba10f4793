"""Families with many small experts against transformers (row A18), and in layouts of stages and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepseek_models import MODELS
from depth import soaked
from expert_families import EXPERT_FAMILIES
from hf_reference import MIN_MARGIN, reference
from kernel_builds import built
from layout_tokens import PROMPTS, tokens
from margins import smallest_margin
from penstock.families.registry import load_spec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from stage_driver import StageDriver

PROMPT = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_TOKENS = 16
LAYOUTS = [(2, 1), (1, 1, 1)]
MORE_LAYOUTS = [(1, 1), (2,), (2, 2), (2, 2, 2), (1, 2, 1)]
COMPARED = EXPERT_FAMILIES | {"glm4_moe_lite": MODELS["glm"]}
NAMES = ["glm4_moe", *soaked(*(name for name in EXPERT_FAMILIES if name != "glm4_moe"))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=COMPARED)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return COMPARED[request.param].make(tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return EXPERT_FAMILIES[request.param].make(tmp_path_factory.mktemp("checkpoint"))


def kernels() -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES))


@pytest.mark.parametrize("with_kernels", [True, *soaked(False)])
@torch.no_grad()
def test_a18_logits_and_greedy_tokens_of_families_with_experts(compared: Path, with_kernels: bool) -> None:
    own_kernels = kernels() if with_kernels else None
    model, ids = reference(compared), list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    logits = model(torch.tensor([ids])).logits[0]
    top = logits[len(PROMPT) - 1 : -1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > MIN_MARGIN
    assert len(set(ids[len(PROMPT) :])) > 5
    driver = StageDriver(compared, (1,), kernels=own_kernels)
    assert driver.greedy(0, PROMPT, NUM_TOKENS, chunk=9) == ids[len(PROMPT) :]
    found = StageDriver(compared, (2,), kernels=own_kernels).prefill(0, ids, 7)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


def test_s5_stages_of_experts_hold_what_the_spec_counts(checkpoint: Path) -> None:
    spec = load_spec(checkpoint)
    for cuts in ((), (1, 2)):
        for stage in StageDriver(checkpoint, cuts).stages:
            held = sum(parameter.numel() for parameter in stage.parameters())
            assert held == spec.stage_parameters(stage.start_layer, stage.end_layer)


def test_a10_b1_every_layout_of_families_with_experts_gives_the_tokens_of_one_rank(checkpoint: Path) -> None:
    whole = tokens(checkpoint, (1,), kernels="off")
    assert smallest_margin(checkpoint, PROMPTS, whole) > MIN_MARGIN
    for tp in LAYOUTS:
        assert tokens(checkpoint, tp, kernels="auto") == whole, tp


@pytest.mark.soak
def test_a10_b1_many_more_layouts_of_families_with_experts(checkpoint: Path) -> None:
    whole = tokens(checkpoint, (1,), kernels="off")
    for tp in MORE_LAYOUTS:
        assert tokens(checkpoint, tp, kernels="auto") == whole, tp
    assert tokens(checkpoint, (2, 2), kernels="auto", expert_parallel=True) == whole
