"""A rank's measuring process: `python -m penstock.planner.measure --config-fd N --status-fd M`.

Started by `engine.auto_partition`, one per rank and all at once, for in service they share memory and cores
too. Loads some of the rank's layers, says that it is ready, waits until all others are, times its steps
(`planner.step_timing`) and reports the costs. Sets up the process before torch is imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import msgspec

from penstock.config import MeasureConfig
from penstock.errors import PenstockError
from penstock.executor.child import (
    Measured,
    Ready,
    StatusWriter,
    bound_thread_pools,
    enter_child,
    failure,
    leave,
    read_config,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.planner.measure")
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    status = StatusWriter(options.status_fd)
    try:
        config = read_config(options.config_fd, MeasureConfig)
        enter_child(f"penstock measures stage {config.rank.stage}", config.parent_pid)
        bound_thread_pools(config.rank.threads)
        _measure(config, status)
        return 0
    except Exception as error:
        status.write(failure(error))
        return error.exit_code if isinstance(error, PenstockError) else PenstockError.exit_code


def _measure(config: MeasureConfig, status: StatusWriter) -> None:
    # Here and not above: torch reads its environment when it is imported.
    from penstock.planner.step_timing import TimedRank

    rank = TimedRank(config)
    status.write(Ready())
    os.read(config.start_fd, 1)  # nothing comes; its end is the start
    costs = rank.measure()
    status.write(Measured(costs=msgspec.Raw(msgspec.json.encode(costs))))


if __name__ == "__main__":
    leave(main())
