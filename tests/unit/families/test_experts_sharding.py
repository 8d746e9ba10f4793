"""Experts shared by the ranks of a stage, by width or whole, give what one rank gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import checkpoints
from depth import soaked
from kernel_builds import built
from penstock.distributed.group import MemoryGroup, TensorGroup
from penstock.errors import CheckpointError
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.experts import Expert, RoutedExperts
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights
from stage_driver import StageDriver
from tensor_ranks import joined, together

PROMPT = [1, 40, 7, 7, 90, 3, 22, 5, 61, 11, 2]
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "num_local_experts": 5},
    "qwen2_moe": {"family": "qwen2_moe", "mlp_only_layers": [1]},
    "qwen3_moe": {"family": "qwen3_moe", "mlp_only_layers": [1], "head_dim": 16},
}
WAYS = pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return checkpoints.make_checkpoint(
        directory, layers=3, vocab_size=150, kv_heads=4, seed=3, **MODELS[request.param]
    )


def connect(size: int, with_kernels: bool = False) -> tuple[list[TensorGroup], list[CpuKernels | None]]:
    """The groups of all ranks, and the kernels of each: only its own are recorded by a rank."""
    if not with_kernels:
        groups = [MemoryGroup(rank, size, name="stage 0", timeout_s=60.0) for rank in range(size)]
        return joined(groups), [None] * size
    kernels = [CpuKernels(built(), frozenset(KERNEL_NAMES)) for _ in range(size)]
    named = {"name": "stage 0", "timeout_s": 60.0}
    shared = [SharedGroup(own, rank, size, **named) for rank, own in enumerate(kernels)]
    return joined(shared, 1024), list(kernels)


def trace(driver: StageDriver) -> Tensor:
    """Prefill in chunks of one row among decodes of two others; logits of all tokens."""
    steps = [{0: PROMPT[:4], 1: PROMPT[3:10]}, {0: [5], 1: [17], 2: PROMPT[:6]}]
    steps += [{1: [8], 0: [60], 2: PROMPT[6:]}]
    steps += [{0: [n], 1: [n + 1], 2: [n + 2]} for n in range(20, 24)]
    return torch.cat([driver.step(step) for step in steps])


def recorded(driver: StageDriver) -> StageDriver:
    for stage, kv in zip(driver.stages, driver.kv, strict=True):
        stage.record(kv, 64)
    return driver


@WAYS
@pytest.mark.parametrize("with_kernels", [True, *soaked(False)])
@pytest.mark.parametrize(("size", "cuts"), [(2, ()), (2, (1, 2)), (4, (1,))])
def test_ranks_that_share_experts_give_the_logits_of_one(
    checkpoint: Path, size: int, cuts: tuple[int, ...], with_kernels: bool, expert_parallel: bool
) -> None:
    whole = trace(StageDriver(checkpoint))
    groups, kernels = connect(size, with_kernels)

    def act(group: TensorGroup) -> Tensor:
        own = kernels[group.rank]
        driver = StageDriver(checkpoint, cuts, kernels=own, group=group, expert_parallel=expert_parallel)
        return trace(recorded(driver))

    found = together(groups, act)
    for logits in found:
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        assert torch.equal(logits, found[0]), "all ranks have the same bits"
    assert torch.equal(found[0].argmax(-1), whole.argmax(-1))


class Counting(MemoryGroup):
    """A group that counts its sums."""

    num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return super().all_reduce(x)


@WAYS
def test_experts_cost_the_one_sum_of_a_plain_mlp(checkpoint: Path, expert_parallel: bool) -> None:
    groups = joined([Counting(rank, 2, name="stage 0", timeout_s=60.0) for rank in range(2)])
    together(
        groups,
        lambda group: StageDriver(checkpoint, group=group, expert_parallel=expert_parallel).step({0: PROMPT}),
    )
    assert [group.num_sums for group in groups] == [2 * 3 + 1] * 2


def test_h18_a_rank_whose_experts_no_token_chooses_takes_part_in_every_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens go to experts of rank 0, and all ids are of its share of the vocabulary."""
    routing: dict[str, Any] = {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}
    checkpoints.make_checkpoint(tmp_path, layers=2, vocab_size=150, seed=3, **routing)
    choose_first_experts(tmp_path)
    ids = {0: [token % 32 for token in PROMPT]}
    whole = StageDriver(tmp_path).step(ids)
    parts: list[tuple[int, bool]] = []
    compute = RoutedExperts.sum

    def watched(experts: RoutedExperts, hidden_states: Tensor, logits: Tensor) -> Tensor:
        part = compute(experts, hidden_states, logits)
        parts.append((experts._group.rank, bool(part.any())))
        return part

    monkeypatch.setattr(RoutedExperts, "sum", watched)
    groups = joined([Counting(rank, 2, name="stage 0", timeout_s=20.0) for rank in range(2)])
    found = together(groups, lambda group: StageDriver(tmp_path, group=group, expert_parallel=True).step(ids))
    assert sorted(parts) == [(0, True)] * 2 + [(1, False)] * 2, "rank 1 has nothing to add"
    assert [group.num_sums for group in groups] == [2 * 2 + 1] * 2
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], whole, atol=1e-4, rtol=0)


def choose_first_experts(directory: Path) -> None:
    """Let the routers of a checkpoint choose the first or the second expert, whatever the token."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, router in tensors.items():
        if name.endswith(".gate.weight"):
            router[1] = -router[0]
            router[2:] = 0.0
    save_file(tensors, path)


@WAYS
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_and_read_their_shares_of_the_experts(
    checkpoint: Path, size: int, expert_parallel: bool
) -> None:
    """Routers are held by all; of the rest no expert is held twice, and none is missing."""
    (whole,) = StageDriver(checkpoint).stages
    groups, _ = connect(size)
    options = {"expert_parallel": expert_parallel}
    ranks = [StageDriver(checkpoint, group=group, **options).stages[0] for group in groups]

    def held(stage: torch.nn.Module) -> int:
        experts = (module for module in stage.modules() if isinstance(module, Expert))
        return sum(parameter.numel() for expert in experts for parameter in expert.parameters())

    shares = [held(rank) for rank in ranks]
    assert sum(shares) == held(whole)
    if not expert_parallel:
        assert shares == [held(whole) // size] * size
    for rank in ranks:
        read = load_weights(rank, Checkpoint(checkpoint), lambda done, total: None)
        assert read.bytes_read == read.tensor_bytes == 4 * sum(p.numel() for p in rank.parameters())


@WAYS
def test_a_tensor_that_no_rank_of_the_stage_has_is_still_refused(
    tmp_path: Path, expert_parallel: bool
) -> None:
    checkpoints.make_checkpoint(tmp_path, family="mixtral", num_local_experts=5, vocab_size=150)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_local_experts": 5', '"num_local_experts": 4'))
    groups, _ = connect(2)
    with pytest.raises(CheckpointError):
        StageDriver(tmp_path, group=groups[0], expert_parallel=expert_parallel)
