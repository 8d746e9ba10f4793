"""A rank's process: `python -m penstock.executor.worker --config-fd N --status-fd M`.

Started by the supervisor, which passes the descriptors of the pipes, links and sockets. Sets up the process
before torch is imported, opens the connections, and lets `executor.rank` do the rest. Exit code: 0 after a
shutdown, else that of the error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config import LinkHandle, RankProcessConfig
from penstock.errors import error_from_info
from penstock.executor.child import (
    StatusWriter,
    bound_thread_pools,
    enter_child,
    leave,
    run_child,
)
from penstock.executor.plan_channel import ZmqChannel

if TYPE_CHECKING:
    from penstock.executor.rank import RankConnections
    from penstock.pipeline.link import Link


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    return run_child("penstock.executor.worker", arguments, RankProcessConfig, _run)


def _run(config: RankProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child(f"penstock stage {config.rank.stage} tp 0", config.parent_pid)
    bound_thread_pools(config.rank.threads)
    # Here and not above: torch reads its environment when it is imported.
    from penstock.executor.rank import run_rank

    failed = run_rank(config.rank, _connect(config), status.write)
    return 0 if failed is None else error_from_info(failed.error).exit_code


def _connect(config: RankProcessConfig) -> RankConnections:
    from penstock.executor.rank import RankConnections
    from penstock.pipeline.ring_channel import RingChannel

    rank = config.rank
    last = rank.num_stages - 1
    earlier = range(last) if rank.is_last else [rank.stage]
    plans = ZmqChannel.connect(config.plan_address)
    return RankConnections(
        plans=plans,
        results=plans if config.results is None else RingChannel(config.results, "results"),
        tokens=[
            RingChannel(handle, f"samples, stage {last} -> stage {stage}")
            for stage, handle in zip(earlier, config.tokens, strict=True)
        ],
        incoming=_link(config.incoming, rank.stage - 1, rank.wait_timeout_s),
        outgoing=_link(config.outgoing, rank.stage, rank.wait_timeout_s),
    )


def _link(handle: LinkHandle | None, from_stage: int, timeout_s: float) -> Link | None:
    from penstock.pipeline.link import SharedMemoryLink

    if handle is None:
        return None
    return SharedMemoryLink(handle, f"stage {from_stage} -> stage {from_stage + 1}", timeout_s)


if __name__ == "__main__":
    leave(main())
