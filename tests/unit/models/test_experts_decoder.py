"""Decoders with experts and our kernels: as torch computes them, and the same bits in any step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from kernel_builds import built
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.compute import FormatOf, never_quantized
from penstock.layers.matrix import QuantizedFormat
from stage_driver import StageDriver, is_recorded

VOCABULARY = 300
IDS = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral"},
    "qwen2_moe": {"family": "qwen2_moe", "mlp_only_layers": [1]},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return checkpoints.make_checkpoint(
        tmp_path, layers=3, hidden_size=64, vocab_size=VOCABULARY, seed=1, **MODELS[request.param]
    )


def kernels(*switched_off: str) -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES) - set(switched_off))


def driver(
    model: Path,
    dtype: torch.dtype,
    kernels: CpuKernels | None,
    *,
    cut: int = 1,
    format_of: FormatOf = never_quantized,
) -> StageDriver:
    return StageDriver(model, [cut], dtype=dtype, kernels=kernels, num_rows=36, format_of=format_of)


def rounded_to(bits: int) -> FormatOf:
    form = QuantizedFormat(bits=bits, group_size=16, scale_dtype=torch.bfloat16, has_zeros=False)

    def format_of(parts: Mapping[str, int], in_size: int) -> QuantizedFormat | None:
        return form if parts else None

    return format_of if bits else never_quantized


@pytest.mark.parametrize("switched_off", [(), ("experts",), ("linear",), ("experts", "norm")])
def test_experts_are_the_same_with_any_kernel_switched_off(
    model: Path, switched_off: tuple[str, ...]
) -> None:
    expected = driver(model, torch.float32, None).prefill(0, IDS, 16)
    found = driver(model, torch.float32, kernels(*switched_off)).prefill(0, IDS, 16)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_decodes_company_and_stages_change_no_bit_of_experts(
    model: Path, dtype: torch.dtype, bits: int
) -> None:
    """Alone, in a prefill, in a batch of 32 rows."""
    together = driver(model, dtype, kernels(), format_of=rounded_to(bits))
    expected = together.prefill(0, IDS, len(IDS))
    assert torch.equal(together.prefill(1, IDS, 7), expected)
    assert torch.equal(torch.cat([together.step({2: [token]}) for token in IDS]), expected)
    in_company = []
    for token in IDS:
        step = {3: [token]} | {row: [IDS[row % 40]] for row in range(4, 35)}
        in_company.append(together.step(step)[0])
    assert torch.equal(torch.stack(in_company), expected)
    other = driver(model, dtype, kernels(), cut=2, format_of=rounded_to(bits))
    assert torch.equal(other.prefill(0, IDS, 16), expected)


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_forward_with_experts_is_the_forward(model: Path, dtype: torch.dtype, bits: int) -> None:
    eager, recorded = (driver(model, dtype, kernels(), format_of=rounded_to(bits)) for _ in range(2))
    for stage, kv in zip(recorded.stages, recorded.kv, strict=True):
        stage.record(kv, 64)
        assert is_recorded(stage)
    decodes = {0: IDS[31:32], 1: IDS[7:8], 2: IDS[:1]}
    for step in ({0: IDS[:30]}, {0: IDS[30:31], 1: IDS[:7]}, decodes, {1: IDS[8:]}):
        assert torch.equal(recorded.step(step), eager.step(step))


@pytest.mark.parametrize("switched_off", ["experts", "linear"])
def test_experts_that_torch_computes_are_not_recorded(model: Path, switched_off: str) -> None:
    eager, asked = (driver(model, torch.float32, kernels(switched_off)) for _ in range(2))
    for stage, kv in zip(asked.stages, asked.kv, strict=True):
        stage.record(kv, 64)
        assert not is_recorded(stage)
    assert torch.equal(asked.step({0: IDS[:30]}), eager.step({0: IDS[:30]}))
