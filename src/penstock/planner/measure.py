"""A rank's measuring process: `python -m penstock.planner.measure`, with the options of a rank's process.

A host starts one for each of its ranks, when `engine.supervisor.measuring` asks for it. All run at the same
time, because ranks in service share memory and cores too. Each loads some of its rank's layers, reports that
it is ready, and waits until all others are. Then it times its steps (`planner.step_timing`) and reports the
costs. The process is set up before torch is imported.
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
    """Measure one rank, and return the exit code of the process."""
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
    if located is None:  # the host cannot get the model
        return 0
    timed = TimedRank(msgspec.structs.replace(config.measure, rank=located))
    status.write(Ready())
    begin = control.receive()
    if not isinstance(begin, BeginMeasuring):  # the measuring was given up before all processes were ready
        return 0
    costs = timed.measure(begin.meeting)
    status.write(Measured(costs=msgspec.Raw(msgspec.json.encode(costs))))
    return 0


if __name__ == "__main__":
    leave(main())
