"""Ranks of a tensor group as threads of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from penstock.distributed.group import MeetingPlace, TensorGroup, memory_meeting
from penstock.distributed.meeting import BUFFER_BYTES
from penstock.kernels.cpu.collective import SharedGroup


def joined(
    groups: Sequence[Any], buffer_bytes: int = BUFFER_BYTES, place: MeetingPlace | None = None
) -> list[Any]:
    """The groups of all ranks of a stage, which meet."""
    place = place or memory_meeting(len(groups), buffer_bytes)
    for group in groups:
        group.join(place)
    return list(groups)


def num_sums(group: SharedGroup) -> int:
    """Return the number of sums of this rank so far, recorded ones too."""
    return int(group._state.num_calls)


def outcomes(groups: Sequence[TensorGroup], act: Callable[[Any], Any]) -> list[Any]:
    """What each rank got, or raised."""
    found: list[Any] = [None] * len(groups)

    def run(rank: int) -> None:
        try:
            found[rank] = act(groups[rank])
        except Exception as error:
            found[rank] = error
            groups[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def together(groups: Sequence[TensorGroup], act: Callable[[Any], Any]) -> list[Any]:
    """What each rank got; raises what one raised."""
    found = outcomes(groups, act)
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return found
