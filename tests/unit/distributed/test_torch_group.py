"""The tensor group over torch's communication: gloo between threads of a test, NCCL by what it is asked."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.distributed import torch_group
from penstock.distributed.group import MeetingPlace, ordered_sum
from penstock.distributed.torch_group import TorchGroup
from penstock.errors import LinkClosedError, WaitTimeoutError
from tensor_ranks import outcomes, together


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    store_fd = os.memfd_create("store")
    yield MeetingPlace(store_path=f"/proc/self/fd/{store_fd}")
    os.close(store_fd)


def groups(size: int, timeout_s: float = 30.0, device: str = "cpu") -> list[TorchGroup]:
    return [
        TorchGroup(rank, size, device=torch.device(device), name="stage 1", timeout_s=timeout_s)
        for rank in range(size)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b1_gloo_sums_in_the_order_of_ranks(place: MeetingPlace, dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 33, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]

    def act(group: TorchGroup) -> torch.Tensor:
        group.join(place)
        total = group.all_reduce(parts[group.rank])
        gathered = group.all_gather(parts[group.rank])
        assert all(map(torch.equal, gathered, parts))
        group.close()
        return total

    assert all(torch.equal(total, ordered_sum(parts)) for total in together(groups(3), act))


def test_r2_a_rank_that_goes_or_does_not_come_is_missed(place: MeetingPlace) -> None:
    both_have_joined = threading.Barrier(2)

    def act(group: TorchGroup) -> object:
        group.join(place)
        both_have_joined.wait(60)
        if group.rank == 1:
            return group.close()
        return group.all_reduce(torch.ones(2, 2))

    both = groups(2)
    assert isinstance(outcomes(both, act)[0], LinkClosedError)
    both[0].close()
    alone = TorchGroup(0, 2, device=torch.device("cpu"), name="stage 1", timeout_s=0.2)
    fd = os.memfd_create("store")
    with pytest.raises((WaitTimeoutError, LinkClosedError), match=r"stage 1: .*rank 1"):
        alone.join(MeetingPlace(store_path=f"/proc/self/fd/{fd}"))
    os.close(fd)


def test_b1_gpus_add_in_place_by_nccl(place: MeetingPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Nccl:
        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            asked.append(tensors[0])
            return self

        def wait(self) -> None:
            """At once."""

        def abort(self) -> None:
            asked.append("abort")

    def make(device: torch.device, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Nccl:
        asked.append((device.type, rank, size, timeout.total_seconds()))
        return Nccl()

    monkeypatch.setattr(torch_group, "process_group", make)
    group = groups(2, 7.0, "cuda")[1]
    group.join(place)
    x = torch.ones(2, 2)
    assert group.all_reduce(x) is x
    group.close()
    group.close()
    assert asked == [("cuda", 1, 2, 7.0), x, "abort"]
