"""A rank's measuring process: `python -m penstock.planner.measure --config-fd N --status-fd M`.

Started by `engine.supervisor.auto_partition`, one per rank and all at once, for in service they share memory
and cores too. Loads some of the rank's layers, says that it is ready, waits until all others are, times its
steps (`planner.step_timing`) and reports the costs. Sets up the process before torch is imported.
"""

from __future__ import annotations

import argparse
import os
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
from penstock.process.config import MeasureConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one rank; returns the exit code."""
    return run_child(entry_points.MEASURE, arguments, MeasureConfig, _measure)


def _measure(config: MeasureConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child(f"penstock measures {config.rank.name}", config.parent_pid)
    bound_thread_pools(config.rank.threads)
    # Here and not above: torch reads its environment when it is imported.
    from penstock.planner.step_timing import TimedRank

    rank = TimedRank(config)
    status.write(Ready())
    os.read(config.start_fd, 1)  # nothing comes; its end is the start
    costs = rank.measure()
    status.write(Measured(costs=msgspec.Raw(msgspec.json.encode(costs))))
    return 0


if __name__ == "__main__":
    leave(main())
