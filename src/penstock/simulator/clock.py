"""The clock of a simulation: it goes on when nothing can happen before."""

from __future__ import annotations


class SimulatedClock:
    """The clock of a run, in seconds since its start.

    Attributes:
        now: moved by `simulator.simulation` alone.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
