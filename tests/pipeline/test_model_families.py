"""Every family, in every layout of stages and ranks, gives what one rank gives (rows A10, B1, d13)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from depth import sampled
from families import FAMILIES
from hand_core import Wanted, small_core
from hf_reference import MIN_MARGIN
from kernel_builds import built
from margins import smallest_margin
from penstock.distributed.group import MemoryGroup
from penstock.executor.inprocess import InprocessExecutor
from penstock.families.registry import load_spec
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from rank_configs import make_rank_configs
from stage_driver import StageDriver, is_recorded
from tensor_ranks import joined, num_sums, together

PROMPTS = [[(7 * i + 3 * j) % 150 for j in range(5 + 14 * i)] for i in range(3)]
LAYOUTS = [(1,), (4,), (1, 1), (2, 2, 2)]
MORE_LAYOUTS = [(2,), (2, 2), (1, 1, 1), (4, 4), (4, 4, 4), (4, 2, 1), (1, 2, 4)]
CUTS = [(), (1,), (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=sampled(FAMILIES, 3))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param].make(tmp_path_factory.mktemp("checkpoint"))


def tokens(model: Path, tp: tuple[int, ...], kernels: str) -> list[list[int]]:
    """What the prompts become, eight tokens of a prompt at a time."""
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, kernels=kernels))
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


def test_a10_b1_d13_every_layout_gives_the_tokens_of_one_rank(checkpoint: Path) -> None:
    whole = tokens(checkpoint, (1,), "off")
    assert smallest_margin(checkpoint, PROMPTS, whole) > MIN_MARGIN
    assert tokens(checkpoint, (2, 1), "off") == whole
    for tp in LAYOUTS:
        assert tokens(checkpoint, tp, "auto") == whole, tp


@pytest.mark.soak
def test_a10_b1_d13_many_more_layouts_give_the_tokens_of_one_rank(checkpoint: Path) -> None:
    whole = tokens(checkpoint, (1,), "off")
    for tp in MORE_LAYOUTS:
        assert tokens(checkpoint, tp, "auto") == whole, tp


def logits(model: Path, cuts: Sequence[int], size: int, kernels: CpuKernels | None) -> list[Tensor]:
    """Of each rank, of all tokens of a mixed trace: prefills in chunks among decodes."""
    steps = [{0: PROMPTS[2][:20], 1: PROMPTS[1][:7]}, {0: [5], 1: PROMPTS[1][7:]}, {0: [9], 1: [17]}]
    steps += [{0: PROMPTS[2][20:]}, {0: [60], 1: [2]}]

    def trace(driver: StageDriver) -> Tensor:
        return torch.cat([driver.step(step) for step in steps])

    if size == 1:
        return [trace(StageDriver(model, cuts, kernels=kernels))]
    where = {"name": "stage 0", "timeout_s": 60.0}
    groups = [
        MemoryGroup(rank, size, **where) if kernels is None else SharedGroup(kernels, rank, size, **where)
        for rank in range(size)
    ]
    found: list[Tensor] = together(
        joined(groups), lambda group: trace(StageDriver(model, cuts, kernels=kernels, group=group))
    )
    return found


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a10_b1_logits_are_the_same_bits_for_every_cut_and_near_for_every_share(
    checkpoint: Path, with_kernels: bool
) -> None:
    """Ranks that share a stage sum in another order; among themselves they agree to the bit."""
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    (alone,), shared = (logits(checkpoint, (), size, kernels) for size in (1, 2))
    torch.testing.assert_close(shared[0], alone, atol=1e-4, rtol=0)
    assert torch.equal(shared[0].argmax(-1), alone.argmax(-1))
    for cuts in CUTS:
        assert torch.equal(logits(checkpoint, cuts, 1, kernels)[0], alone)
        for found in logits(checkpoint, cuts, 2, kernels):
            assert torch.equal(found, shared[0]), cuts


@pytest.mark.parametrize("with_kernels", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_b1_logits_of_four_ranks_are_near_those_of_one(checkpoint: Path, with_kernels: bool) -> None:
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    (alone,), shared = (logits(checkpoint, (), size, kernels) for size in (1, 4))
    torch.testing.assert_close(shared[0], alone, atol=1e-4, rtol=0)
    assert torch.equal(shared[0].argmax(-1), alone.argmax(-1))
    assert all(torch.equal(found, shared[0]) for found in shared)


class Counting(MemoryGroup):
    """A group that counts its sums."""

    num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return super().all_reduce(x)


def sums_of(group: Counting | SharedGroup) -> int:
    return group.num_sums if isinstance(group, Counting) else num_sums(group)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_b5_a_layer_costs_two_sums_and_a_norm_over_all_heads_one_more(
    checkpoint: Path, with_kernels: bool
) -> None:
    """And the embedding one; counted by the memory that ranks share where calls are recorded."""
    where = {"name": "stage 0", "timeout_s": 60.0}
    own = [CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None for _ in range(2)]
    groups = [
        Counting(rank, 2, **where) if kernels is None else SharedGroup(kernels, rank, 2, **where)
        for rank, kernels in enumerate(own)
    ]

    def count(group: Counting | SharedGroup) -> int:
        driver = StageDriver(checkpoint, kernels=own[group.rank], group=group)
        (stage,), (kv,) = driver.stages, driver.kv
        stage.record(kv, 64)
        assert is_recorded(stage) == with_kernels
        for step in ({0: PROMPTS[1]}, {0: [5]}):
            before = sums_of(group)
            driver.step(step)
            counted = sums_of(group) - before
        return counted

    a_layer = 3 if load_spec(checkpoint).qk_norm == "all_heads" else 2
    assert together(joined(groups), count) == [3 * a_layer + 1] * 2
