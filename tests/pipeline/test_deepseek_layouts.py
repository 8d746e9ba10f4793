"""Every layout of stages and ranks gives the tokens of one rank, for models that keep latent vectors too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepseek_models import MODELS
from depth import soaked
from hf_reference import MIN_MARGIN
from kernel_builds import built
from layout_tokens import PROMPTS, tokens
from margins import smallest_margin
from penstock.distributed.group import MemoryGroup
from penstock.families.sharding import require_shardable
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights
from stage_driver import StageDriver
from tensor_ranks import joined, together

LAYOUTS = [(1,), (4,), (1, 1), (2, 1)]
MORE_LAYOUTS = [(2,), (2, 2, 2), (2, 2), (1, 1, 1), (4, 4), (4, 4, 4), (4, 2, 1), (1, 2, 4)]
IN_CI = ["v3"]
NAMES = [name if name in IN_CI else soaked(name)[0] for name in MODELS]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param].make(tmp_path_factory.mktemp("checkpoint"))


def test_a10_b1_every_layout_gives_the_tokens_of_one_rank(checkpoint: Path) -> None:
    whole = tokens(checkpoint, (1,), kernels="off")
    assert smallest_margin(checkpoint, PROMPTS, whole) > MIN_MARGIN
    assert tokens(checkpoint, (2, 1), kernels="off") == whole
    for tp in LAYOUTS:
        assert tokens(checkpoint, tp, kernels="auto") == whole, tp
    for tp in ((4,), (2, 2)):
        assert tokens(checkpoint, tp, kernels="auto", expert_parallel=True) == whole, tp


@pytest.mark.soak
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])
def test_a10_b1_many_more_layouts_give_the_tokens_of_one_rank(
    checkpoint: Path, expert_parallel: bool
) -> None:
    whole = tokens(checkpoint, (1,), kernels="off")
    for tp in MORE_LAYOUTS:
        assert tokens(checkpoint, tp, kernels="auto", expert_parallel=expert_parallel) == whole, tp


def trace(driver: StageDriver) -> Tensor:
    """Logits of all tokens of prefills in chunks among decodes."""
    steps = [{0: PROMPTS[2][:20], 1: PROMPTS[1][:7]}, {0: [5], 1: PROMPTS[1][7:]}, {0: [9], 1: [17]}]
    steps += [{0: PROMPTS[2][20:]}, {0: [60], 1: [2]}]
    return torch.cat([driver.step(step) for step in steps])


class Counting(MemoryGroup):
    """A group that counts its sums."""

    num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return super().all_reduce(x)


def test_b5_a_layer_costs_two_sums(checkpoint: Path) -> None:
    """And the embedding one."""
    groups = joined([Counting(rank, 2, name="stage 0", timeout_s=60.0) for rank in range(2)])
    together(groups, lambda group: StageDriver(checkpoint, group=group).step({0: PROMPTS[1]}))
    assert [group.num_sums for group in groups] == [2 * 3 + 1] * 2


def of_ranks(
    model: Path, size: int, kernels: CpuKernels | None, cuts: tuple[int, ...] = (), *, expert_parallel: bool
) -> list[StageDriver]:
    where = {"name": "stage 0", "timeout_s": 60.0}
    groups = [
        MemoryGroup(rank, size, **where) if kernels is None else SharedGroup(kernels, rank, size, **where)
        for rank in range(size)
    ]
    return [
        StageDriver(model, cuts, kernels=kernels, group=group, expert_parallel=expert_parallel)
        for group in joined(groups)
    ]


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])
@pytest.mark.parametrize(
    ("size", "with_kernels"),
    [(2, False), (2, True), (4, False), pytest.param(4, True, marks=pytest.mark.soak)],
)
def test_b1_ranks_agree_to_the_bit_and_are_near_one_rank(
    checkpoint: Path, size: int, with_kernels: bool, expert_parallel: bool
) -> None:
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    alone = trace(StageDriver(checkpoint, kernels=kernels))
    for cuts in ((1,), (1, 2)):
        assert torch.equal(trace(StageDriver(checkpoint, cuts, kernels=kernels)), alone)
    drivers = of_ranks(checkpoint, size, kernels, expert_parallel=expert_parallel)
    first, *others = together(drivers, trace)
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first, alone, atol=1e-4, rtol=0)


WHOLE_ON_ALL = ("norm", "q_a_proj", "kv_a_proj", "router", "correction_bias", "o_proj.bias")


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])
@pytest.mark.parametrize(("size", "cuts"), [(2, ()), (2, (1, 2)), (4, ()), (4, (1, 2))], ids=str)
def test_a4_a12_b2_ranks_hold_a_stage_once_but_what_leads_to_latent_vectors(
    checkpoint: Path, size: int, cuts: tuple[int, ...], expert_parallel: bool
) -> None:
    """And routers and norms; each reads what it holds. Of the cache each has all, for all heads look at
    it."""
    ranks = of_ranks(checkpoint, size, None, cuts, expert_parallel=expert_parallel)
    spec = ranks[0].spec
    require_shardable(spec, size, expert_parallel=expert_parallel)
    for stages in zip(*(rank.stages for rank in ranks), strict=True):
        first, held = stages[0], 0
        everywhere = sum(
            parameter.numel()
            for name, parameter in first.named_parameters()
            if any(part in name for part in WHOLE_ON_ALL)
        )
        for stage in stages:
            read = load_weights(stage, Checkpoint(checkpoint), lambda done, total: None)
            own = sum(parameter.numel() for parameter in stage.parameters())
            assert read.bytes_read == read.tensor_bytes == 4 * own
            assert stage.attention.block_bytes(4) == 4 * spec.kv_bytes_per_token(1, 4)
            held += own
        assert held == spec.stage_parameters(first.start_layer, first.end_layer) + (size - 1) * everywhere
