"""In which class a rank computes, and who is refused where it cannot compute in the one that was chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from checkpoints import make_checkpoint
from penstock.errors import UsageError
from penstock.families.registry import load_spec
from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.library import KERNEL_NAMES, LoadedKernels
from penstock.kernels.cpu.ops import CpuKernels
from penstock.process.config import RankConfig
from penstock.rank import compute_choice
from penstock.rank.compute_choice import ChosenKernels, load_kernels, numeric_class
from rank_configs import make_rank_configs

CPU = torch.device("cpu")
MINOR = ".".join(torch.__version__.split(".")[:2])
BY_TORCH = f"torch {MINOR} on {torch.backends.cpu.get_cpu_capability().lower()}"


@pytest.fixture
def rank(tmp_path: Path) -> RankConfig:
    return make_rank_configs(make_checkpoint(tmp_path), 2)[1]


@pytest.fixture
def spec(rank: RankConfig) -> ModelSpec:
    return load_spec(Path(rank.model_path))


def loads(monkeypatch: pytest.MonkeyPatch, loaded: LoadedKernels) -> list[tuple[str, str]]:
    """What is asked for, from now on, of a machine that has these kernels."""
    asked: list[tuple[str, str]] = []

    def load(kernels: str, wanted: str) -> LoadedKernels:
        asked.append((kernels, wanted))
        return loaded

    monkeypatch.setattr(compute_choice, "load", load)
    return asked


def kernels(*names: str) -> CpuKernels:
    return CpuKernels(None, frozenset(names))  # type: ignore[arg-type]


def test_g1_a_rank_that_cannot_compute_in_its_class_names_its_host(
    rank: RankConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "built for avx512, they compute in avx2"
    asked = loads(monkeypatch, LoadedKernels(reason=reason, remedy="Unset PENSTOCK_CXXFLAGS."))
    chosen = msgspec.structs.replace(rank, numeric_class="avx512", host="desk")
    with pytest.raises(
        UsageError, match=f"stage 1 needs kernels for avx512, which desk does not have: {reason}"
    ) as caught:
        load_kernels(chosen, is_quantized=False)
    assert (caught.value.param, caught.value.remedy) == ("numeric_class", "Unset PENSTOCK_CXXFLAGS.")
    assert load_kernels(rank, is_quantized=False).kernels is None, "in any class torch may compute"
    assert asked == [("auto", "avx512"), ("auto", "auto")]


def test_g1_the_class_is_that_of_the_kernels_where_they_compute_everything(spec: ModelSpec) -> None:
    chosen = ChosenKernels(kernels(*KERNEL_NAMES), "", "avx2 1f0a2b3c")
    assert numeric_class(chosen, spec, CPU) == "avx2 1f0a2b3c"


def test_g1_torch_and_its_version_belong_to_the_class_where_it_computes_a_part(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ChosenKernels(kernels("linear", "norm"), "", "avx2 1f0a2b3c for linear/norm")
    assert numeric_class(some, spec, CPU) == f"avx2 1f0a2b3c for linear/norm, {BY_TORCH}"
    latent = dataclasses.replace(spec, latent=object())  # type: ignore[arg-type]
    whole = ChosenKernels(kernels(*KERNEL_NAMES), "", "avx2 1f0a2b3c")
    assert numeric_class(whole, latent, CPU) == f"avx2 1f0a2b3c, {BY_TORCH}"
    assert numeric_class(ChosenKernels(None, "none"), spec, CPU) == BY_TORCH
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fast GPU")
    on_gpu = numeric_class(ChosenKernels(None, "none on a GPU"), spec, torch.device("cuda", 1))
    assert on_gpu == f"torch {MINOR} on Fast GPU"
