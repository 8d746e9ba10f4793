"""A rank's process: `python -m penstock.rank.process --config-fd N --status-fd M --control-fd K`.

Started by its host, which hands it the ends of its connections over the control socket, for each epoch anew.
Sets up the process before torch is imported, opens the connections, each by the carrier of its kind, and lets
`rank.rank` do the rest. Exit code: 0 after a shutdown, else that of the error.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import LinkClosedError, error_from_info
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.process import entry_points
from penstock.process.child import (
    Abandoned,
    StatusEvent,
    StatusWriter,
    bound_thread_pools,
    enter_child,
    keep_saying_alive,
    leave,
    run_child,
)
from penstock.process.config import RankConfig, RankProcessConfig
from penstock.process.control import CONTROL_OPTION, ControlReader, close_descriptors
from penstock.process.endpoints import LinkEndpoint, RankEndpoints

if TYPE_CHECKING:
    from penstock.pipeline.links.link import Link
    from penstock.rank.rank import RankConnections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    return run_child(entry_points.RANK, arguments, RankProcessConfig, _run, more=[CONTROL_OPTION])


def _run(config: RankProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child(process_title(config.rank), config)
    bound_thread_pools(config.rank.threads)
    keep_saying_alive(status)
    return live(config.rank, status, ControlReader.inherited(options))


def process_title(rank: RankConfig) -> str:
    """How tables of processes show it."""
    replica = "" if rank.replica is None else f"replica {rank.replica} "
    return f"penstock {replica}stage {rank.stage} tp {rank.tp_rank}"


def live(rank: RankConfig, status: StatusWriter, control: ControlReader) -> int:
    """Be this rank, from its weights to its end; the exit code. The process has been set up."""
    # Here and not above: torch reads its environment when it is imported.
    from penstock.rank.rank import run_rank

    located = control.await_model(rank)
    if located is None:
        return 0
    rank = located
    epochs = _epochs(rank, control, status.write)
    failed = run_rank(rank, epochs, status.write, loads_first=True)
    return 0 if failed is None else error_from_info(failed.error).exit_code


def _epochs(
    rank: RankConfig, control: ControlReader, report: Callable[[StatusEvent], None]
) -> Iterator[RankConnections]:
    """The connections of each epoch that the supervisor begins; waits for it. Ends with the supervisor."""
    while isinstance(ends := control.receive(), RankEndpoints):
        if control.has_news():  # that epoch is over before it has begun here
            error = LinkClosedError(f"epoch {ends.epoch} was over before this stage came to it.")
            report(Abandoned(epoch=ends.epoch, error=error.info()))
            close_descriptors(ends)
            continue
        yield _connect(rank, ends, control.has_news)
        close_descriptors(ends)
        gc.collect()  # links and views of their frames hold each other, and the memory of the epoch


def _connect(rank: RankConfig, ends: RankEndpoints, is_over: Callable[[], bool]) -> RankConnections:
    from penstock.pipeline.links.link_carriers import open_link, open_meeting
    from penstock.rank.rank import RankConnections

    def link(endpoint: LinkEndpoint, sender: str, receiver: str) -> Link:
        return open_link(endpoint, f"{sender} -> {receiver}", rank.wait_timeout_s)

    last, after = f"stage {rank.num_stages - 1}", f"stage {rank.stage + 1}"
    plans = open_channel(ends.plans, f"core - {rank.name}")
    samples = f"samples, {rank.name} -> earlier stages" if rank.is_last else f"samples, {last} -> {rank.name}"
    return RankConnections(
        epoch=ends.epoch,
        is_over=is_over,
        plans=plans,
        results=plans if ends.results is None else open_channel(ends.results, "results"),
        tokens=[open_channel(endpoint, samples) for endpoint in ends.tokens],
        incoming=None if ends.incoming is None else link(ends.incoming, f"stage {rank.stage - 1}", rank.name),
        outgoing=[link(endpoint, rank.name, after) for endpoint in ends.outgoing],
        meeting=None if ends.meeting is None else open_meeting(ends.meeting, f"stage {rank.stage}"),
    )


if __name__ == "__main__":
    leave(main())
