"""DeepSeek-V2 and -V3 against transformers, by torch and by our kernels; what stages and caches hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deepseek_models import MODELS
from depth import soaked
from hf_reference import MIN_MARGIN, reference
from kernel_builds import built
from penstock.families.registry import load_spec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.rank.compute_choice import is_invariant
from stage_driver import StageDriver, is_recorded

PROMPT = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# GLM-4.7-Flash has nothing that the others have not; its logits: `test_expert_families`.
@pytest.fixture(scope="module", params=[*(name for name in MODELS if name != "glm"), *soaked("glm")])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param].make(tmp_path_factory.mktemp("checkpoint"))


def kernels(*switched_off: str) -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES) - set(switched_off))


@torch.no_grad()
def expected(directory: Path) -> tuple[list[int], Tensor]:
    """The prompt and the greedy tokens after it, and the logits of every position."""
    model, ids = reference(directory), list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids, model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("with_kernels", [True, *soaked(False)])
def test_a18_logits_and_greedy_tokens_of_deepseek_equal_transformers(
    checkpoint: Path, with_kernels: bool
) -> None:
    own_kernels = kernels() if with_kernels else None
    ids, logits = expected(checkpoint)
    top = logits[len(PROMPT) - 1 : -1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > MIN_MARGIN
    assert len(set(ids[len(PROMPT) :])) > 5
    driver = StageDriver(checkpoint, (1,), kernels=own_kernels)
    assert driver.greedy(0, PROMPT, NUM_TOKENS, chunk=9) == ids[len(PROMPT) :]
    for chunk in (7, 64):
        found = StageDriver(checkpoint, (2,), kernels=own_kernels).prefill(0, ids, chunk)
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_by_our_kernels_neither_company_nor_chunks_change_a_bit(
    checkpoint: Path, num_threads: int, dtype: torch.dtype
) -> None:
    """One row decodes while others prefill, and decode with contexts of other lengths."""
    driver = StageDriver(checkpoint, kernels=kernels(), dtype=dtype)
    alone = driver.prefill(0, PROMPT, len(PROMPT))
    torch.set_num_threads(num_threads)
    assert torch.equal(driver.prefill(4, PROMPT, 7), alone)
    assert torch.equal(in_company(driver), alone)


def test_by_torch_company_changes_little(checkpoint: Path) -> None:
    driver = StageDriver(checkpoint)
    alone = driver.prefill(0, PROMPT, len(PROMPT))
    torch.testing.assert_close(in_company(driver), alone, atol=1e-4, rtol=0)


def in_company(driver: StageDriver) -> Tensor:
    """The logits of the prompt, token by token, while others prefill and decode."""
    driver.step({3: PROMPT[:30]})
    found = []
    for token in PROMPT:
        found.append(driver.step({2: [token], 3: [5], 1: PROMPT[::-1][:5]})[0])
        driver.lengths[1] = 0
    return torch.stack(found)


def test_a_step_without_tokens_is_nothing(checkpoint: Path) -> None:
    """Such a step asks whether all stages are well."""
    for own_kernels in (None, kernels()):
        driver = StageDriver(checkpoint, (1,), kernels=own_kernels)
        assert driver.step({}).shape == (0, 150)


def test_any_kernel_of_deepseek_can_be_switched_off_and_none_is_recorded(checkpoint: Path) -> None:
    by_torch = StageDriver(checkpoint, (1,)).prefill(0, PROMPT, 16)
    for names in ((), *((name,) for name in KERNEL_NAMES)):
        driver = StageDriver(checkpoint, (1,), kernels=kernels(*names))
        for stage, kv in zip(driver.stages, driver.kv, strict=True):
            stage.record(kv, 64)
            assert not is_recorded(stage)
        assert is_invariant(kernels(*names)) == (not names)
        torch.testing.assert_close(driver.prefill(0, PROMPT, 16), by_torch, rtol=0, atol=1e-4)


def test_bfloat16_is_about_as_near_as_transformers(checkpoint: Path) -> None:
    """At most logits: a token that gets another expert is far away, and which one does is chance."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0].float()
        exact = reference(checkpoint)(torch.tensor([PROMPT])).logits[0]
    for own_kernels in (None, kernels()):
        ours = StageDriver(checkpoint, (1,), dtype=torch.bfloat16, kernels=own_kernels).prefill(0, PROMPT, 16)
        assert (ours - exact).square().median() < 2 * (theirs - exact).square().median()


def test_s5_stages_hold_what_the_spec_counts(checkpoint: Path) -> None:
    spec = load_spec(checkpoint)
    for cuts in ((), (1,), (1, 2)):
        for stage in StageDriver(checkpoint, cuts).stages:
            held = sum(parameter.numel() for parameter in stage.parameters())
            assert held == spec.stage_parameters(stage.start_layer, stage.end_layer)


def test_a_token_takes_its_latent_vector_and_one_rotated_key(checkpoint: Path) -> None:
    driver = StageDriver(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert driver.spec.kv_bytes_per_token(3, 2) == 3 * 2 * width
    assert driver.stages[0].attention.block_bytes(16) == 16 * driver.spec.kv_bytes_per_token(1, 4)
