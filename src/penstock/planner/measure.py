"""A rank's measuring process: `python -m penstock.planner.measure`, with the options of a rank's process.

Started by its host for `engine.supervisor.measuring`, one per rank and all at once, for in service they share
memory and cores too. Loads some of the rank's layers, says that it is ready, waits until all others are,
times its steps (`planner.step_timing`) and reports the costs. Sets up the process before torch is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from penstock.process import entry_points
from penstock.process.child import (
    Measured,
    Ready,
    StatusWriter,
    bound_thread_pools,
    enter_child,
    leave,
    run_child,
)
from penstock.process.config import MeasureProcessConfig
from penstock.process.control import CONTROL_OPTION, BeginMeasuring, ControlReader
from penstock.process.torch_import import cheap_torch_import


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one rank; returns the exit code."""
    return run_child(entry_points.MEASURE, arguments, MeasureProcessConfig, _measure, more=[CONTROL_OPTION])


def _measure(config: MeasureProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    rank = config.measure.rank
    enter_child(f"penstock measures {rank.name}", config)
    bound_thread_pools(rank.threads)
    # Here and not above: torch reads its environment when it is imported.
    with cheap_torch_import():
        from penstock.planner.step_timing import TimedRank

    control = ControlReader.inherited(options)
    located = control.await_model(rank)
    if located is None:  # the model is not to be had
        return 0
    timed = TimedRank(msgspec.structs.replace(config.measure, rank=located))
    status.write(Ready())
    begin = control.receive()
    if not isinstance(begin, BeginMeasuring):  # the others never came
        return 0
    costs = timed.measure(begin.meeting)
    status.write(Measured(costs=msgspec.Raw(msgspec.json.encode(costs))))
    return 0


if __name__ == "__main__":
    leave(main())
