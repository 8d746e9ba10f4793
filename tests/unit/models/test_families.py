"""Every family against transformers (row A18), by torch and by our kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import FAMILIES
from hf_reference import MIN_MARGIN, reference
from kernel_builds import built
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from stage_driver import StageDriver

PROMPT = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param].make(tmp_path_factory.mktemp("checkpoint"))


@torch.no_grad()
def expected(directory: Path) -> tuple[list[int], Tensor]:
    """The prompt and the greedy tokens after it, and the logits of every position."""
    model, ids = reference(directory), list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids, model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a18_logits_and_greedy_tokens_of_every_family(checkpoint: Path, with_kernels: bool) -> None:
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    ids, logits = expected(checkpoint)
    top = logits[len(PROMPT) - 1 : -1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > MIN_MARGIN
    driver = StageDriver(checkpoint, (1,), kernels=kernels)
    assert driver.greedy(0, PROMPT, NUM_TOKENS, chunk=9) == ids[len(PROMPT) :]
    for chunk in (7, 64):
        found = StageDriver(checkpoint, (1,), kernels=kernels).prefill(0, ids, chunk)
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)
