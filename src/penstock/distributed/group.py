"""The exchange of tensors between the ranks of one stage, which hold shares of the same layers.

    all_reduce    every rank gets the sum      after the embedding, and after the row-parallel projections:
                                               two a layer [B5]; one more a layer where queries and keys are
                                               normalised over all heads
    all_gather    every rank gets all parts    hidden states of which a link brings each rank a part,
                                               candidates and logits, rows of a tied head, agreements

Sums are taken in the order of the ranks, so every rank gets the same bits; only between processes on GPUs
NCCL chooses the order. There are three implementations:

- `kernels.cpu.collective` where our kernels run, over memory that processes or threads share
- `MemoryGroup` for ranks that are threads, without our kernels
- `torch_group` for ranks that are processes, without our kernels, as on GPUs

A rank that is alone has `SOLO`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.distributed.meeting import BUFFER_BYTES, map_memory, memory_bytes, store_path
from penstock.errors import LinkClosedError, PenstockError, WaitTimeoutError
from penstock.process.endpoints import MeetingHandle


class TensorGroup(Protocol):
    """A rank's place among the ranks of its stage. All ranks make the same calls in the same order."""

    rank: int
    size: int

    @property
    def exchange_ns(self) -> tuple[int, int]:
        """The nanoseconds spent in calls so far, and how many of these were spent waiting for other ranks.

        Both are 0 in a group that does not count them.
        """
        ...

    def join(self, place: MeetingPlace) -> None:
        """Let the rank meet the others at this place from now on. To be called in each epoch."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`: [num_tokens, width], contiguous, of one shape on all ranks.

        The result may be `x` itself, overwritten.

        Raises:
            WaitTimeoutError: another rank has not come in time. The error names it, or all other ranks where
                the implementation cannot tell which it was.
            LinkClosedError: another rank has gone, or the group was closed.
        """
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the `x` of each of the `size` ranks, in the order of the ranks; errors as for `all_reduce`.

        `x` may have any shape, which must be the same on all ranks.
        """
        ...

    def check(self) -> None:
        """Raise the error of an earlier call that could not raise it, since kernels raise nothing."""
        ...

    def rehearsing(self) -> AbstractContextManager[None]:
        """Let this rank make calls alone within the context, without the tensors of the others.

        `all_gather` returns the rank's own tensor for every rank. What `all_reduce` returns has the right
        shape, and its numbers mean nothing.
        """
        ...

    def close(self) -> None:
        """Let the others know that this rank has gone. May be called twice."""
        ...


class Rehearsed:
    """A group whose calls can be made by one rank alone, to see how much memory a step takes."""

    is_rehearsing = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let this rank make calls alone, as `TensorGroup.rehearsing` says."""
        self.is_rehearsing = True
        try:
            yield
        finally:
            self.is_rehearsing = False


class SoloGroup(Rehearsed):
    """A group of one rank: it adds nothing and waits for nothing."""

    rank, size = 0, 1
    exchange_ns = 0, 0

    def join(self, place: MeetingPlace) -> None:
        """Do nothing: there are no other ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def check(self) -> None:
        """Do nothing: its calls cannot fail."""

    def close(self) -> None:
        """Do nothing: there are no other ranks."""


SOLO = SoloGroup()


def meet(group: TensorGroup) -> None:
    """Wait until all ranks have called this, with nothing to exchange; errors as for `all_gather`.

    The ranks exchange one element, because a call with empty tensors might return without waiting.
    """
    if group.size > 1:
        group.all_gather(torch.zeros(1))


def missed(name: str, absent: Sequence[int], timeout_s: float | None) -> PenstockError:
    """Return the error of a wait for other ranks.

    Args:
        name: name of the group, such as "stage 1".
        absent: ranks that have not come.
        timeout_s: seconds of the wait; None: the group was closed meanwhile.
    """
    who = ", ".join(f"rank {rank}" for rank in absent)
    if timeout_s is None:
        return LinkClosedError(f"{name}: the group was closed before {who} had joined.")
    return WaitTimeoutError(f"{name}: waited {timeout_s:g} s for {who}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """The place where the ranks of a group meet in one epoch; each implementation takes what it needs.

    Attributes:
        table: for `MemoryGroup`: a table that all threads share; None for processes.
        memory: for `kernels.cpu.collective`: a writable buffer that all ranks share, zero at first and of
            `meeting.memory_bytes`.
        store_path: for `torch_group`: path of a file by which the ranks find each other, and in which nothing
            is written at first. "" for threads.
    """

    table: Table | None = None
    memory: Any = None
    store_path: str = ""


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of all ranks' parts: added in float32, in the order of the ranks, then cast back.

    Args:
        parts: a tensor from each rank. They may have any shape, but all have the same.
    """
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(first.dtype)


class MemoryGroup(Rehearsed):
    """A group of ranks that are threads of one process.

    Args:
        name: name of the group in error messages, such as "stage 1".
        timeout_s: deadline of every wait.
    """

    exchange_ns = 0, 0

    def __init__(self, rank: int, size: int, *, name: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._name, self._timeout_s = name, timeout_s
        self._table: Table | None = None
        self._num_calls = 0

    def join(self, place: MeetingPlace) -> None:
        self._table, self._num_calls = place.table, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return ordered_sum(self.all_gather(x))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if self.is_rehearsing:
            return [x.clone() for _ in range(self.size)]
        assert self._table is not None, "the group was not joined"
        self._num_calls += 1
        own = (self.rank, self._num_calls)
        # A copy is exchanged, since another thread may read it after this rank has overwritten `x`.
        parts = self._table.exchange(own, x.clone(), self.size, self._name, self._timeout_s)
        return [part.to(x.device) for part in parts]

    def check(self) -> None:
        """Do nothing: each call has raised its error itself."""

    def close(self) -> None:
        if self._table is not None:
            self._table.close()


class Table:
    """The table where each thread lays down its tensor, and takes the tensors of all."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._brought: dict[int, dict[int, Tensor]] = {}  # by call, then by rank
        self._num_taken: dict[int, int] = {}  # by call: how many ranks have taken all its parts
        self._is_closed = False

    def exchange(
        self, own: tuple[int, int], x: Tensor, size: int, name: str, timeout_s: float
    ) -> list[Tensor]:
        """Return the `x` of each of the `size` ranks in one call, in the order of the ranks.

        Args:
            own: this rank, and the number of its call.
            x: this rank's tensor, of any shape.
            name: name of the group, for errors.
        """
        rank, call = own
        with self._changed:
            parts = self._brought.setdefault(call, {})
            parts[rank] = x
            self._changed.notify_all()
            came = self._changed.wait_for(lambda: len(parts) == size or self._is_closed, timeout_s)
            if len(parts) < size:
                absent = [index for index in range(size) if index not in parts]
                raise missed(name, absent, None if came else timeout_s)
            self._num_taken[call] = self._num_taken.get(call, 0) + 1
            # The last rank to take the parts removes the call, together with the count of takers.
            if self._num_taken[call] == size:
                del self._brought[call], self._num_taken[call]
            return [parts[index] for index in range(size)]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def open_shared_memory(handle: MeetingHandle) -> MeetingPlace:
    """Return the meeting place of a rank that is a process; the descriptors must stay open for the epoch."""
    return MeetingPlace(memory=map_memory(handle), store_path=store_path(handle))


def memory_meeting(size: int, buffer_bytes: int = BUFFER_BYTES) -> MeetingPlace:
    """Return a meeting place for ranks that are threads; it has no store."""
    return MeetingPlace(table=Table(), memory=bytearray(memory_bytes(size, buffer_bytes)))
