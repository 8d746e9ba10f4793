"""Stages of a model in any format, loaded as a rank loads them, and the logits that they compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from kernel_builds import built
from penstock.distributed.group import SOLO, TensorGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.compute import never_quantized
from penstock.models.decoder import Decoder
from penstock.rank.stored_weights import read_model
from stage_driver import StageDriver

PROMPT = [(7 * index + 3) % 90 for index in range(20)]


def kernels() -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES))


def stages(
    path: Path,
    cuts: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float32,
    own_kernels: CpuKernels | None = None,
    group: TensorGroup = SOLO,
    with_mtp: bool = False,
) -> list[Decoder]:
    """The stages of a model, loaded as a rank loads them."""
    stored = read_model(path)
    spec = stored.spec
    built = []
    for start, end in pairwise([0, *cuts, spec.num_layers]):
        weights = stored.open_weights(b"")
        stage = Decoder(
            spec,
            (start, end),
            dtype=dtype,
            device="cpu",
            kernels=own_kernels,
            format_of=weights.form_of if weights.is_quantized else never_quantized,
            block_size=4,
            group=group,
            with_mtp=with_mtp,
        )
        weights.load(stage, lambda done, total: None, frozenset())
        built.append(stage)
    return built


def logits(path: Path, cuts: Sequence[int] = (), chunk: int = 16, **how: object) -> torch.Tensor:
    built = stages(path, cuts, **how)  # type: ignore[arg-type]
    return StageDriver(path, cuts, stages=built).prefill(0, PROMPT, chunk)
