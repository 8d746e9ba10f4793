"""The queue in which the core keeps the plans in flight: `depth` slots, at least one for each stage.

Step n is in slot `n % depth` from its submission until its result has been settled. Steps enter and leave in
order, so the occupied slots always follow one another, where the first slot follows the last:

    depth 3     slot      0   1   2
                step      6   4   5        oldest = 4, newest = 6, full

The engine core keeps its plans here. The queue holds no scheduling state and decides nothing.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class InflightQueue(Generic[T]):
    """The entries of the steps in flight (the core's plans), one in each slot.

    Args:
        depth: most plans in flight [D1] [F2].
        num_stages: P; there are at least as many slots.
        first_step: step id of the first entry.
    """

    def __init__(self, depth: int, *, num_stages: int = 1, first_step: int = 0) -> None:
        assert depth >= num_stages >= 1, f"depth {depth} is below the {num_stages} stages"
        self.depth = depth
        self.num_stages = num_stages
        self._slots: list[T | None] = [None] * depth
        self._oldest = first_step  # step id of the oldest entry, or of the next one when empty
        self._next = first_step  # step id that is pushed next

    def __len__(self) -> int:
        return self._next - self._oldest

    @property
    def is_full(self) -> bool:
        return len(self) == self.depth

    @property
    def next_step(self) -> int:
        """The step id that the next `push` takes; steps have no gaps."""
        return self._next

    @property
    def oldest_step(self) -> int:
        """The step id of the oldest entry; equals `next_step` when empty."""
        return self._oldest

    def slot(self, step_id: int) -> int:
        """Return the slot of a step [F3].

        In a full pipe of P stages, step n + P enters the first stage when step n has left the last.
        """
        return step_id % self.depth

    def push(self, entry: T) -> int:
        """Put `entry` in as the next step, and return its step id. The queue must not be full."""
        assert not self.is_full, f"step {self._next} would overwrite step {self._oldest}"
        step_id = self._next
        self._slots[self.slot(step_id)] = entry
        self._next += 1
        return step_id

    def oldest(self) -> T:
        entry = self._slots[self.slot(self._oldest)]
        assert entry is not None, "no step is in flight"
        return entry

    def entries(self) -> list[T]:
        """Return all entries, the oldest one first."""
        slots = (self._slots[self.slot(step)] for step in range(self._oldest, self._next))
        return [entry for entry in slots if entry is not None]

    def pop(self) -> T:
        """Remove and return the oldest entry; its slot is free again."""
        entry = self.oldest()
        self._slots[self.slot(self._oldest)] = None
        self._oldest += 1
        return entry

    def clear(self) -> None:
        """Forget all entries, because their results will not come; the next step id stays as it is."""
        self._slots = [None] * self.depth
        self._oldest = self._next

    def check_invariants(self) -> None:
        assert 0 <= len(self) <= self.depth
        occupied = {slot for slot, entry in enumerate(self._slots) if entry is not None}
        expected = {self.slot(step) for step in range(self._oldest, self._next)}
        assert occupied == expected, f"slots {occupied} are occupied, steps in flight need {expected}"
