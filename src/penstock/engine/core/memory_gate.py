"""A gate that lets waiting requests start only while the host has memory to spare.

    free memory    ─────╲                        ╱──────
    opens at       - - - ╲ - - - - - - - - - - ╱ - - - -     5/4 of the limit
    limit          - - - -╲- - - - - - - - - -╱- - - - -
                   open    │      shut        │   open       running requests go on all the time

Waiting requests are not refused. They start when memory is free again, or wait until the queue's limits end
them. `scheduler.scheduler` asks the gate for every plan. At most once a second the gate looks at the memory
of the core's host, and at the free memory that stages on CPUs have reported for their hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from penstock.batch import StageTimes
from penstock.scheduler.start_order import StartGate

LOOK_S = 1.0  # between two looks

_logger = logging.getLogger(__name__)


class MemoryGate(StartGate):
    """A gate that lets no waiting request start while a host has less free memory than a limit.

    It opens again when every host has a quarter more than the limit.

    Args:
        min_bytes: the limit.
        clock: monotonic seconds.
        available: returns the bytes that the core's host can still give.

    Attributes:
        reason: why the gate is shut; empty while it is open.
        told: returns the newest reports of the stages; set by the gate's owner.
    """

    def __init__(self, min_bytes: int, clock: Callable[[], float], available: Callable[[], int]) -> None:
        self._min_bytes = min_bytes
        self._clock = clock
        self._available = available
        self._look_at = clock()
        self.reason = ""
        self.told: Callable[[], Sequence[StageTimes]] = list

    def is_open(self) -> bool:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()
        return not self.reason

    def _look(self) -> None:
        limit = self._enough if self.reason else self._min_bytes
        free, host = min(self._free())
        if free >= limit:
            if self.reason:
                _logger.warning(
                    "%s has %d MiB of free memory: waiting requests start again.", host, free >> 20
                )
            self.reason = ""
            return
        reason = f"{host} has {free >> 20} MiB of free memory, less than {limit >> 20} MiB"
        if not self.reason:
            _logger.warning("%s: no waiting request starts until more is free.", reason)
        self.reason = reason

    def _free(self) -> Iterator[tuple[int, str]]:
        """Yield the free bytes of each host, with words that name the host."""
        try:
            yield self._available(), "the host"
        except OSError:  # a host whose memory cannot be read does not shut the gate
            yield self._enough, "the host"
        for times in self.told():
            if times.free_bytes is not None:
                yield times.free_bytes, f"the host of stage {times.stage}"

    @property
    def _enough(self) -> int:
        """The free memory that opens the gate again when it is shut."""
        return self._min_bytes + self._min_bytes // 4


def memory_gate(
    min_bytes: int, clock: Callable[[], float], available: Callable[[], int]
) -> MemoryGate | None:
    """Return the gate that holds requests back while memory is short, or None if the limit is 0."""
    return MemoryGate(min_bytes, clock, available) if min_bytes else None
