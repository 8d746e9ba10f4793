"""A rank's process: `python -m penstock.executor.worker --config-fd N --status-fd M --control-fd K`.

Started by the supervisor, which passes the descriptors of links and sockets over the control socket, for each
epoch anew. Sets up the process before torch is imported, opens the connections, and lets `executor.rank` do
the rest. Exit code: 0 after a shutdown, else that of the error.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.config import LinkHandle, RankConfig, RankEnds, RankProcessConfig
from penstock.errors import LinkClosedError, error_from_info
from penstock.executor.child import (
    Abandoned,
    StatusEvent,
    StatusWriter,
    bound_thread_pools,
    enter_child,
    keep_saying_alive,
    leave,
    run_child,
)
from penstock.executor.control import ControlReader, descriptors_of
from penstock.executor.plan_channel import ZmqChannel, connect_address

if TYPE_CHECKING:
    from penstock.executor.rank import RankConnections
    from penstock.pipeline.link import Link


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    return run_child("penstock.executor.worker", arguments, RankProcessConfig, _run, more=["--control-fd"])


def _run(config: RankProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child(f"penstock stage {config.rank.stage} tp 0", config.parent_pid)
    bound_thread_pools(config.rank.threads)
    keep_saying_alive(status)
    # Here and not above: torch reads its environment when it is imported.
    from penstock.executor.rank import run_rank

    control = ControlReader(options.control_fd)
    failed = run_rank(config.rank, _epochs(config.rank, control, status.write), status.write)
    return 0 if failed is None else error_from_info(failed.error).exit_code


def _epochs(
    rank: RankConfig, control: ControlReader, report: Callable[[StatusEvent], None]
) -> Iterator[RankConnections]:
    """The connections of each epoch that the supervisor begins; waits for it. Ends with the supervisor."""
    while isinstance(ends := control.receive(), RankEnds):
        if control.has_news():  # that epoch is over before it has begun here
            error = LinkClosedError(f"epoch {ends.epoch} was over before this stage came to it.")
            report(Abandoned(epoch=ends.epoch, error=error.info()))
            _close(ends)
            continue
        yield _connect(rank, ends, control.has_news)
        _close(ends)
        gc.collect()  # links and views of their frames hold each other, and the memory of the epoch


def _close(ends: RankEnds) -> None:
    for fd in descriptors_of(ends):
        os.close(fd)


def _connect(rank: RankConfig, ends: RankEnds, is_over: Callable[[], bool]) -> RankConnections:
    from penstock.executor.rank import RankConnections
    from penstock.pipeline.ring_channel import RingChannel

    last = rank.num_stages - 1
    earlier = range(last) if rank.is_last else [rank.stage]
    plans = ZmqChannel.connect(connect_address(ends.plan_fd), f"core - stage {rank.stage}")
    return RankConnections(
        epoch=ends.epoch,
        is_over=is_over,
        plans=plans,
        results=plans if ends.results is None else RingChannel(ends.results, "results"),
        tokens=[
            RingChannel(handle, f"samples, stage {last} -> stage {stage}")
            for stage, handle in zip(earlier, ends.tokens, strict=True)
        ],
        incoming=_link(ends.incoming, rank.stage - 1, rank.wait_timeout_s),
        outgoing=[link for link in [_link(ends.outgoing, rank.stage, rank.wait_timeout_s)] if link],
    )


def _link(handle: LinkHandle | None, from_stage: int, timeout_s: float) -> Link | None:
    from penstock.pipeline.link import SharedMemoryLink

    if handle is None:
        return None
    return SharedMemoryLink(handle, f"stage {from_stage} -> stage {from_stage + 1}", timeout_s)


if __name__ == "__main__":
    leave(main())
