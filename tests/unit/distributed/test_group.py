"""Tensor groups: sums and gathers over all carriers, and what happens when a rank does not come."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_builds import built
from penstock.distributed.group import SOLO, MemoryGroup, TensorGroup, memory_meeting
from penstock.errors import LinkClosedError, WaitTimeoutError
from penstock.kernels.cpu.collective import SharedGroup
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from tensor_ranks import joined, num_sums, outcomes, together

SMALL = 256  # bytes of a buffer: all but the smallest tensors go in pieces


def memory_groups(size: int, timeout_s: float = 30.0) -> list[Any]:
    return joined([MemoryGroup(rank, size, name="stage 1", timeout_s=timeout_s) for rank in range(size)])


def shared_groups(size: int, timeout_s: float = 30.0) -> list[Any]:
    own = CpuKernels(built(), frozenset(KERNEL_NAMES))
    groups = [SharedGroup(own, rank, size, name="stage 1", timeout_s=timeout_s) for rank in range(size)]
    return joined(groups, SMALL)


CARRIERS = pytest.mark.parametrize("connect", [memory_groups, shared_groups])


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))
    return made.to(dtype)


@CARRIERS
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b1_every_rank_gets_the_same_sum_in_the_order_of_ranks(
    connect: Callable[[int], list[Any]], size: int, dtype: torch.dtype
) -> None:
    shapes = [(1, 3), (5, 64), (17, 33), (0, 8), (2, 700)]

    def act(group: TensorGroup) -> list[Tensor]:
        return [group.all_reduce(part(group.rank, shape, dtype, i)) for i, shape in enumerate(shapes)]

    found = together(connect(size), act)
    for i, shape in enumerate(shapes):
        expected = part(0, shape, dtype, i).float()
        for rank in range(1, size):
            expected = expected + part(rank, shape, dtype, i).float()
        assert all(torch.equal(sums[i], expected.to(dtype)) for sums in found)


@CARRIERS
def test_gathers_come_in_the_order_of_ranks(connect: Callable[[int], list[Any]]) -> None:
    def act(group: TensorGroup) -> list[list[Tensor]]:
        return [
            group.all_gather(part(group.rank, (3, 50), torch.float32)),
            group.all_gather(torch.full((2, 1), group.rank)),
        ]

    for floats, numbers in together(connect(3), act):
        assert all(torch.equal(floats[rank], part(rank, (3, 50), torch.float32)) for rank in range(3))
        assert [int(number[0, 0]) for number in numbers] == [0, 1, 2]


@CARRIERS
def test_r2_a_rank_that_does_not_come_is_named_at_the_deadline(connect: Callable[..., list[Any]]) -> None:
    groups = connect(3, 0.2)
    found = outcomes(groups[:2], lambda group: group.all_reduce(torch.ones(2, 2)))
    late = [error for error in found if isinstance(error, WaitTimeoutError)]
    assert late, found  # who gives up first closes the group for the other
    assert all("stage 1: waited 0.2 s for rank 2" in str(error) for error in late)
    assert all(isinstance(error, WaitTimeoutError | LinkClosedError) for error in found)


@CARRIERS
def test_r3_who_waits_is_let_go_when_the_group_ends(connect: Callable[..., list[Any]]) -> None:
    groups = connect(3, 30.0)

    def act(group: Any) -> Any:
        if group.rank == 2:
            return group.close()
        return group.all_reduce(torch.ones(2, 2))

    found = outcomes(groups, act)
    for error in found[:2]:
        assert isinstance(error, LinkClosedError)
        assert re.search("the group was closed before .*rank 2 had joined", str(error)), (
            "others may be late too"
        )


def test_r3_a_group_is_joined_anew_in_another_epoch() -> None:
    groups = shared_groups(2)
    place = memory_meeting(2, SMALL)
    joined(groups, place=place)
    assert together(groups, lambda group: float(group.all_reduce(torch.ones(1, 1)))) == [2.0, 2.0]
    groups[0].close()
    found = outcomes(groups, lambda group: group.all_reduce(torch.ones(1, 1)))
    assert any(isinstance(error, LinkClosedError) for error in found)
    joined(groups)
    assert together(groups, lambda group: float(group.all_reduce(torch.ones(1, 1)))) == [2.0, 2.0]


def test_many_meetings_of_unequal_ranks_lose_nothing() -> None:
    """One of them is late at random: buffers are not written before all have read them."""

    def act(group: TensorGroup) -> list[float]:
        chosen = torch.Generator().manual_seed(group.rank)
        sums = []
        for index in range(3000):
            if int(torch.randint(0, 50, (1,), generator=chosen)) == 0:
                torch.randn(20_000).sort()  # busy for a while
            sums.append(float(group.all_reduce(torch.full((1, 40), float(index + group.rank)))[0, 39]))
        return sums

    expected = [3.0 * index + 3 for index in range(3000)]
    assert together(shared_groups(3), act) == [expected] * 3


def test_what_sums_cost_is_counted() -> None:
    groups = shared_groups(2)
    together(groups, lambda group: [group.all_reduce(torch.ones(1, 3)) for _ in range(5)])
    for calls, spent_ns, waited_ns in ((num_sums(group), *group.exchange_ns) for group in groups):
        assert calls == 5
        assert spent_ns > waited_ns >= 0


def test_a_rank_alone_has_nothing_to_do() -> None:
    x = torch.ones(2, 2)
    assert SOLO.all_reduce(x) is x
    assert SOLO.all_gather(x) == [x]
