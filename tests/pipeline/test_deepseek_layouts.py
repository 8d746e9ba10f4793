"""Every layout of stages and ranks gives the tokens of one rank, for models that keep latent vectors too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepseek_models import MODELS
from hand_core import Wanted, small_core
from kernel_builds import built
from penstock.distributed.group import MemoryGroup
from penstock.executor.inprocess import InprocessExecutor
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.models.sharding import require_shardable
from rank_configs import make_rank_configs
from stage_driver import StageDriver
from tensor_ranks import joined, together

PROMPTS = [[(7 * i + 3 * j) % 150 for j in range(5 + 14 * i)] for i in range(3)]
LAYOUTS = [(1,), (2,), (1, 1), (2, 2), (1, 1, 1), (2, 2, 2), (2, 1)]
NAMES = ["v2 lite", "v2 groups, yarn", "v3"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param].make(tmp_path_factory.mktemp("checkpoint"))


def tokens(model: Path, tp: tuple[int, ...], **changes: object) -> list[list[int]]:
    """What the prompts become, eight tokens of a prompt at a time."""
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, **changes))
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


def test_a10_b1_every_layout_gives_the_tokens_of_one_rank(checkpoint: Path) -> None:
    whole = tokens(checkpoint, (1,), kernels="off")
    assert tokens(checkpoint, (2, 1), kernels="off") == whole
    for tp in LAYOUTS:
        assert tokens(checkpoint, tp, kernels="auto") == whole, tp
    for tp in ((2,), (2, 2)):
        assert tokens(checkpoint, tp, kernels="auto", expert_parallel=True) == whole, tp


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


def of_two_ranks(model: Path, kernels: CpuKernels | None, *, expert_parallel: bool) -> list[StageDriver]:
    where = {"name": "stage 0", "timeout_s": 60.0}
    groups = [
        MemoryGroup(rank, 2, **where) if kernels is None else SharedGroup(kernels, rank, 2, **where)
        for rank in range(2)
    ]
    return [
        StageDriver(model, kernels=kernels, group=group, expert_parallel=expert_parallel)
        for group in joined(groups)
    ]


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_b1_ranks_agree_to_the_bit_and_are_near_one_rank(
    checkpoint: Path, with_kernels: bool, expert_parallel: bool
) -> None:
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    alone = trace(StageDriver(checkpoint, kernels=kernels))
    for cuts in ((1,), (1, 2)):
        assert torch.equal(trace(StageDriver(checkpoint, cuts, kernels=kernels)), alone)
    drivers = of_two_ranks(checkpoint, kernels, expert_parallel=expert_parallel)
    first, second = together(drivers, trace)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["by width", "whole experts"])
def test_b2_two_ranks_hold_the_model_once_but_what_leads_to_latent_vectors(
    checkpoint: Path, expert_parallel: bool
) -> None:
    """And routers and norms. Of the cache each has all, for all heads look at it."""
    halves = of_two_ranks(checkpoint, None, expert_parallel=expert_parallel)
    spec = halves[0].spec
    require_shardable(spec, 2, expert_parallel=expert_parallel)
    held = sum(parameter.numel() for half in halves for parameter in half.stages[0].parameters())
    whole_on_both = ("norm", "q_a_proj", "kv_a_proj", "router", "correction_bias", "o_proj.bias")
    twice = sum(
        parameter.numel()
        for name, parameter in halves[0].stages[0].named_parameters()
        if any(part in name for part in whole_on_both)
    )
    assert held == spec.stage_parameters(0, spec.num_layers) + twice
    for half in halves:
        assert half.stages[0].attention.block_bytes(4) == 4 * spec.kv_bytes_per_token(1, 4)
