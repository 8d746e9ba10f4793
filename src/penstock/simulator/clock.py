"""The clock of a simulation, which jumps to the time of the next event."""

from __future__ import annotations


class SimulatedClock:
    """The clock of a run, in seconds.

    Attributes:
        now: the time, from 0 on; only `simulator.simulation` sets it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
