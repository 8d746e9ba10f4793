"""The exchange of tensors among a stage's ranks in shared memory; sums are kernels, which can be recorded.

    memory    a cache line for the group and one for each rank, then two buffers for each rank

csrc/collective.cpp says how the memory is laid out. The ranks may be processes that map the same memory, or
threads. Each epoch has memory of its own, which a rank joins (`SharedGroup.join`). A recorded call stays
valid, since it points to the rank's `GroupState`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.distributed.group import MeetingPlace, Rehearsed, missed
from penstock.distributed.meeting import memory_bytes
from penstock.kernels.cpu import abi
from penstock.kernels.cpu.ops import CpuKernels

SPIN_NS = 50_000  # about what a sleep costs
# With cores of its own a rank spins longer: one that sleeps is woken late, and then the others wait for it
# and fall asleep in turn.
OWN_CORE_SPIN_NS = 1_000_000


class SharedGroup(Rehearsed):
    """A rank's place in a group over shared memory.

    Args:
        name: name of the group in error messages, such as "stage 1".
        timeout_s: deadline of every wait.
        has_own_cores: no other process wants the core while this rank waits.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        rank: int,
        size: int,
        *,
        name: str,
        timeout_s: float,
        has_own_cores: bool = False,
    ) -> None:
        assert 1 < size <= abi.MAX_GROUP, size
        self.rank, self.size = rank, size
        self._kernels, self._name, self._timeout_s = kernels, name, timeout_s
        spin_ns = OWN_CORE_SPIN_NS if has_own_cores else SPIN_NS
        self._state = abi.GroupState(rank=rank, size=size, timeout_ns=int(timeout_s * 1e9), spin_ns=spin_ns)
        self._memory: Tensor | None = None

    def join(self, place: MeetingPlace) -> None:
        own = torch.frombuffer(place.memory, dtype=torch.uint8)
        self._memory = own
        state = self._state
        state.memory, state.buffer_bytes = own.data_ptr(), self._buffer_bytes(len(own))
        state.num_meetings = state.outcome = 0

    @property
    def exchange_ns(self) -> tuple[int, int]:
        return self._state.spent_ns, self._state.waited_ns

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x [num_tokens, width], which must be contiguous, by the sum of all ranks' x; return it."""
        self._kernels.all_reduce(x, self._state)
        self.check()
        return x

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let this rank make calls alone within the context, to see how much memory a step takes.

        Within it the group counts as failed: after a failed call the kernels do nothing.
        """
        self._state.outcome = abi.GROUP_OVER
        try:
            with super().rehearsing():
                yield
        finally:
            self._state.outcome = 0

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' x, in their order: each of the shape of `x`, which may be any."""
        x = x.contiguous()
        if self.is_rehearsing:
            return [x.clone() for _ in range(self.size)]
        y = torch.empty(self.size, *x.shape, dtype=x.dtype)
        args = abi.AllGatherArgs(
            group=ctypes.addressof(self._state), x=x.data_ptr(), y=y.data_ptr(), num_bytes=x.nbytes
        )
        self._kernels.library.penstock_all_gather(ctypes.addressof(args), None)
        self.check()
        return list(y)

    def check(self) -> None:
        """Raise the error that a call, recorded or not, has met since `join`."""
        if self._state.outcome and not self.is_rehearsing:
            is_over = self._state.outcome == abi.GROUP_OVER
            raise missed(self._name, [self._state.absent], None if is_over else self._timeout_s)

    def close(self) -> None:
        if self._memory is not None:
            self._memory[:4] = torch.tensor([1, 0, 0, 0], dtype=torch.uint8)

    def _buffer_bytes(self, num_bytes: int) -> int:
        return (num_bytes - memory_bytes(self.size, 0)) // (2 * self.size) // 64 * 64
