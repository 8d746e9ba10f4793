"""Spreads the stages of a pipeline over hosts anew, by the memory that is free there.

It works with numbers alone. The ranks have reported what their stages need, and the hosts report what is
free. Used by `engine.supervisor.pipe_layout` when hosts are lost, or are back.

    host     tower        desk (lost)    shelf
    before   stage 0, 1   stage 2, 3     stage 4, 5
    after    stage 0, 1, 2               stage 3, 4, 5      each host has one run of neighbouring stages
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import NotEnoughMemoryError

MAX_PERMUTED = 4  # with at most so many hosts besides the head, all their orders are tried out


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDemand:
    """The memory that a stage needs, and how much of it is held already.

    Bytes are of host memory; GPUs have their own.

    Attributes:
        host: name of the host where the stage was, if that host is there; else "".
        num_bytes: bytes of weights, of the KV cache, and of the KV blocks that are kept in host memory
            besides, if all is loaded anew.
        held_bytes: bytes of weights in memory at `host`, which are free again if the stage goes elsewhere.
        missing_bytes: bytes that `host` needs to start the lost ranks of the stage again, if it stays there.
        growth_bytes: the most bytes of KV blocks that its living ranks may keep in the memory of `host`,
            those that they keep now included. They are counted only if the host gets another stage.
        num_gpus: number of ranks of the stage that are on a GPU.
    """

    host: str
    num_bytes: int
    held_bytes: int = 0
    missing_bytes: int = 0
    growth_bytes: int = 0
    num_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """The room that a host has for stages.

    Attributes:
        free_bytes: free memory; what stages on the host hold is not free.
        num_gpus: number of GPUs of the host, used ones included.
    """

    name: str
    free_bytes: int
    num_gpus: int = 0


def spread(stages: Sequence[StageDemand], rooms: Sequence[HostRoom]) -> list[str]:
    """Return the name of the host of each stage: runs of neighbouring stages, as equal as memory allows.

    Each host gets at most one run, and the first of `rooms` at least the first stage. Of equally even
    solutions, the one that moves the fewest stages wins. With more than `MAX_PERMUTED` other hosts only the
    given order of hosts is tried.

    Raises:
        NotEnoughMemoryError: the stages do not fit on the hosts.
    """
    chosen = [(blocks, order) for order in _orders(rooms) if (blocks := _best_blocks(stages, order))]
    if not chosen:
        raise _not_enough(stages, rooms)
    blocks, order = min(chosen, key=lambda each: (each[0].unevenness, each[0].num_moved))
    return [room.name for room, size in zip(order, blocks.sizes, strict=True) for _ in range(size)]


class _Blocks(NamedTuple):
    """Stages cut into a run of neighbours for each host."""

    unevenness: int  # sum of the squares of the lengths
    num_moved: int  # stages that go to another host than the one that has them
    sizes: tuple[int, ...]


def _orders(rooms: Sequence[HostRoom]) -> Iterator[Sequence[HostRoom]]:
    """Yield the orders of the hosts along the pipeline, the given one first; the first host stays first."""
    head, *others = rooms
    orders = itertools.permutations(others) if len(others) <= MAX_PERMUTED else [others]
    return ([head, *order] for order in orders)


def _best_blocks(stages: Sequence[StageDemand], rooms: Sequence[HostRoom]) -> _Blocks | None:
    """Return the best runs of stages for hosts in this order; None if the stages do not fit."""

    @functools.cache
    def best(host: int, first: int) -> _Blocks | None:
        """Return the best runs for the hosts from `host` on, with the stages from `first` on."""
        if host == len(rooms):
            return _Blocks(0, 0, ()) if first == len(stages) else None
        found: list[_Blocks] = []
        for size in range(len(stages) - first, -1 if host else 0, -1):
            block = range(first, first + size)
            rest = best(host + 1, first + size) if _fits(rooms[host], block, stages) else None
            if rest is not None:
                num_moved = sum(stages[number].host not in ("", rooms[host].name) for number in block)
                sizes = (size, *rest.sizes)
                found.append(_Blocks(size * size + rest.unevenness, num_moved + rest.num_moved, sizes))
        return min(found, key=lambda blocks: blocks[:2], default=None)

    return best(0, 0)


def _fits(room: HostRoom, block: range, stages: Sequence[StageDemand]) -> bool:
    """Return whether a host can take these stages, once its other stages have left it."""
    gets_more = any(stages[number].host != room.name for number in block)
    needed_bytes = num_gpus = num_own_gpus = 0
    for number, stage in enumerate(stages):
        is_own = stage.host == room.name
        num_own_gpus += stage.num_gpus * is_own
        if number in block:
            num_gpus += stage.num_gpus
            needed_bytes += stage.missing_bytes if is_own else stage.num_bytes
            needed_bytes += stage.growth_bytes if is_own and gets_more else 0
        elif is_own:
            needed_bytes -= stage.held_bytes
    # The free memory of a GPU is not known here: a host gets no more GPU ranks than GPUs, or than before.
    return needed_bytes <= max(0, room.free_bytes) and num_gpus <= max(room.num_gpus, num_own_gpus)


def _not_enough(stages: Sequence[StageDemand], rooms: Sequence[HostRoom]) -> NotEnoughMemoryError:
    needed_bytes = sum(stage.missing_bytes if stage.host else stage.num_bytes for stage in stages)
    num_gpus = sum(stage.num_gpus for stage in stages if not stage.host)
    used: Counter[str] = Counter()
    for stage in stages:
        used[stage.host] += stage.num_gpus
    needed = _amount(needed_bytes, num_gpus, names_gpus=num_gpus > 0)
    free = ", ".join(
        f"{_amount(room.free_bytes, room.num_gpus - used[room.name], names_gpus=num_gpus > 0)} on {room.name}"
        for room in rooms
    )
    growth_bytes = sum(stage.growth_bytes for stage in stages)
    growth = f", of which KV blocks of other stages may use {growth_bytes / 2**20:.0f} MiB" * bool(
        growth_bytes
    )
    flags = "--kv-cache-bytes" + " or --kv-host-bytes" * bool(growth_bytes)
    return NotEnoughMemoryError(
        f"weights and KV cache of the lost stages need {needed}; {free} are free{growth}.",
        remedy=f"Free memory there, or lower {flags} at the next start.",
    )


def _amount(num_bytes: int, num_gpus: int, *, names_gpus: bool) -> str:
    """Return how much memory that is in words, and how many GPUs; less than nothing is nothing."""
    memory = f"{max(0, num_bytes) / 2**20:.0f} MiB"
    return f"{memory} and {max(0, num_gpus)} GPU{'' if num_gpus == 1 else 's'}" if names_gpus else memory
