"""The decoder with our kernels: as torch computes it, and the same bits however a step is composed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoints
from penstock.kernels.cpu.library import KERNEL_NAMES, load
from penstock.kernels.cpu.ops import CpuKernels
from stage_driver import StageDriver

VOCABULARY = 300
IDS = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
DTYPES = [torch.float32, torch.bfloat16]
FAMILIES = ["llama", "qwen2"]


def kernels(*switched_off: str) -> CpuKernels:
    loaded = load()
    if loaded.library is None:
        pytest.skip(f"no kernels: {loaded.reason}")
    return CpuKernels(loaded.library, frozenset(KERNEL_NAMES) - set(switched_off))


@pytest.fixture
def model(tmp_path: Path, family: checkpoints.Family) -> Path:
    return checkpoints.make_checkpoint(
        tmp_path, family=family, layers=3, hidden_size=64, vocab_size=VOCABULARY
    )


def driver(model: Path, dtype: torch.dtype, kernels: CpuKernels | None, *, cut: int = 1) -> StageDriver:
    return StageDriver(model, [cut], dtype=dtype, kernels=kernels)


@pytest.mark.parametrize("switched_off", [(), *((name,) for name in KERNEL_NAMES), KERNEL_NAMES])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_kernel_can_be_switched_off(model: Path, switched_off: tuple[str, ...]) -> None:
    expected = driver(model, torch.float32, None).prefill(0, IDS, 16)
    found = driver(model, torch.float32, kernels(*switched_off)).prefill(0, IDS, 16)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_torch_is(model: Path) -> None:
    exact = driver(model, torch.float32, None).prefill(0, IDS, 16)
    theirs = driver(model, torch.bfloat16, None).prefill(0, IDS, 16) - exact
    ours = driver(model, torch.bfloat16, kernels()).prefill(0, IDS, 16) - exact
    assert ours.square().mean().sqrt() <= 1.1 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_decodes_company_and_stages_do_not_change_a_bit(model: Path, dtype: torch.dtype) -> None:
    together = driver(model, dtype, kernels())
    expected = together.prefill(0, IDS, len(IDS))
    assert torch.equal(together.prefill(1, IDS, 7), expected)
    assert torch.equal(torch.cat([together.step({2: [token]}) for token in IDS]), expected)
    in_company = []
    for token in IDS:
        in_company.append(together.step({3: [token], 4: IDS[::-1][:5], 5: IDS[:11]})[0])
        together.lengths[4] = together.lengths[5] = 0
    assert torch.equal(torch.stack(in_company), expected)
    assert torch.equal(driver(model, dtype, kernels(), cut=2).prefill(0, IDS, 16), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_forward_is_the_forward(model: Path, dtype: torch.dtype) -> None:
    eager, recorded = (driver(model, dtype, kernels()) for _ in range(2))
    for stage, kv in zip(recorded.stages, recorded.kv, strict=True):
        stage.record(kv, 64)
    decodes = {0: IDS[31:32], 1: IDS[7:8], 2: IDS[:1]}
    for step in ({0: IDS[:30]}, {0: IDS[30:31], 1: IDS[:7]}, decodes, {1: IDS[8:]}):
        assert torch.equal(recorded.step(step), eager.step(step))


@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_threads_does_not_change_a_bit(model: Path) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(driver(model, torch.bfloat16, kernels()).prefill(0, IDS, 16))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
