"""A tensor group over torch's communication: NCCL between GPUs, gloo on CPUs without our kernels.

The ranks find each other by the store of their meeting, anew in each epoch. There is no global process group:
each epoch has a group of its own, which ends with it.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from penstock.distributed.group import MeetingPlace, Rehearsed, missed, ordered_sum


class TorchGroup(Rehearsed):
    """A rank's place in a group over torch's communication.

    Args:
        device: device of the tensors. For `cuda` torch communicates by NCCL, otherwise by gloo.
        name: name of the group in error messages, such as "stage 1".
        timeout_s: deadline of every wait.
    """

    exchange_ns = 0, 0

    def __init__(self, rank: int, size: int, *, device: torch.device, name: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._device, self._name, self._timeout_s = device, name, timeout_s
        self._group: Any = None

    def join(self, place: MeetingPlace) -> None:
        # The group of the epoch before is closed first: it must not outlive its store's descriptor (`close`).
        self.close()
        self._group = self._meet(place.store_path)
        if self._group is None:
            raise self._missed(self._timeout_s)

    def _meet(self, store_path: str) -> Any:
        """Return the group, or None if not all ranks have come in time.

        It does not raise the error, since the stack frames in the error would keep the store alive.
        """
        timeout = datetime.timedelta(seconds=self._timeout_s)
        try:
            store = FileStore(store_path, self.size)
            store.set_timeout(timeout)
            return process_group(self._device, store, self.rank, self.size, timeout)
        except RuntimeError:
            return None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.is_rehearsing:
            return x
        if self._device.type == "cuda":
            self._run("allreduce", [x])
            return x
        return ordered_sum(self.all_gather(x))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous().to(self._device)  # candidates of a vocabulary are on the CPU, unknown to NCCL
        if self.is_rehearsing:
            return [x.clone() for _ in range(self.size)]
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._run("allgather", [parts], [own])
        return [part.to(x.device) for part in parts]

    def check(self) -> None:
        """Do nothing: each call has raised its error itself."""

    def close(self) -> None:
        """Abort the group. To be called before the store's descriptor is closed.

        The destructor of the store opens the store's path once more. If the path leads to another file by
        then, the destructor ends the process.
        """
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _run(self, call: str, *tensors: object) -> None:
        assert self._group is not None, "the group was not joined"
        try:
            getattr(self._group, call)(*tensors).wait()
        except RuntimeError as error:  # torch names no rank, and tells a timeout by the text alone
            raise self._missed(self._timeout_s if "imed out" in str(error) else None) from error

    def _missed(self, timeout_s: float | None = None) -> Exception:
        others = [rank for rank in range(self.size) if rank != self.rank]
        return missed(self._name, others, timeout_s)


def process_group(
    device: torch.device, store: Store, rank: int, size: int, timeout: datetime.timedelta
) -> Any:
    """Return torch's group for this device. NCCL is named for GPUs alone: a CPU build of torch lacks it."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
