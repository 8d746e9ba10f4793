"""The process of a rank: `python -m penstock.rank.process --config-fd N --status-fd M --control-fd K`.

Its host starts it, and hands it the ends of its connections over the control socket, for each epoch anew. The
module sets up the process before torch is imported, and opens each connection by the carrier of its kind;
`rank.rank` does the rest. Exit code: 0 after a shutdown, else that of the error.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.batch import LinkOrder
from penstock.errors import LinkClosedError, error_from_info
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.process import entry_points
from penstock.process.child import (
    Abandoned,
    LinkExchanged,
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
from penstock.process.torch_import import cheap_torch_import

if TYPE_CHECKING:
    from penstock.pipeline.links.link import Link
    from penstock.rank.rank import RankConnections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank in this process, and return the exit code of the process."""
    return run_child(entry_points.RANK, arguments, RankProcessConfig, _run, more=[CONTROL_OPTION])


def _run(config: RankProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child(process_title(config.rank), config)
    bound_thread_pools(config.rank.threads)
    keep_saying_alive(status)
    return live(config.rank, status, ControlReader.inherited(options))


def process_title(rank: RankConfig) -> str:
    """Return the title under which a rank's process stands in lists of processes (`ps`)."""
    replica = "" if rank.replica is None else f"replica {rank.replica} "
    return f"penstock {replica}stage {rank.stage} tp {rank.tp_rank}"


def live(rank: RankConfig, status: StatusWriter, control: ControlReader) -> int:
    """Run this rank from loading its weights to its end, in a process that is set up already.

    Args:
        status: takes the rank's reports to the supervisor.
        control: brings the connections of each epoch.

    Returns:
        The exit code of the process: 0 after an ordinary end, else that of the error.
    """
    # Here and not above: torch reads its environment when it is imported.
    with cheap_torch_import():
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
    """Yield the connections of each epoch that the supervisor begins, until the supervisor ends."""
    while isinstance(ends := control.receive(), RankEndpoints):
        if control.has_news():  # a newer message waits: that epoch was over before it began here
            error = LinkClosedError(f"epoch {ends.epoch} ended before this stage joined it.")
            report(Abandoned(epoch=ends.epoch, error=error.info()))
            close_descriptors(ends)
            continue
        try:
            yield _connect(rank, ends, control, report)
        finally:  # also if the rank ends with this epoch, which closes this generator; its process may go on
            close_descriptors(ends)
        gc.collect()  # links and views of their frames refer to each other, and keep the epoch's memory


def _connect(
    rank: RankConfig, ends: RankEndpoints, control: ControlReader, report: Callable[[StatusEvent], None]
) -> RankConnections:
    from penstock.pipeline.link_orders import LinkOrders
    from penstock.pipeline.links.link_carriers import open_link, open_meeting
    from penstock.pipeline.links.switched_link import SwitchedLink
    from penstock.rank.rank import RankConnections

    def link(endpoint: LinkEndpoint, sender: int) -> Link:
        return open_link(endpoint, _name_of_link(rank, sender), rank.wait_timeout_s)

    def open_end(order: LinkOrder) -> Link:
        attached = control.await_link(order.number, rank.wait_timeout_s)
        opened = link(attached.endpoint, order.stage)
        close_descriptors(attached)
        return opened

    last = f"stage {rank.num_stages - 1}"
    incoming = None if ends.incoming is None else SwitchedLink(link(ends.incoming, rank.stage - 1))
    outgoing = [SwitchedLink(link(endpoint, rank.stage), rank.depth) for endpoint in ends.outgoing]
    plans = open_channel(ends.plans, f"core - {rank.name}")
    samples = f"samples, {rank.name} -> earlier stages" if rank.is_last else f"samples, {last} -> {rank.name}"
    return RankConnections(
        epoch=ends.epoch,
        is_over=control.has_news,
        plans=plans,
        results=plans if ends.results is None else open_channel(ends.results, "results"),
        tokens=[open_channel(endpoint, samples) for endpoint in ends.tokens],
        incoming=incoming,
        outgoing=outgoing,
        meeting=None if ends.meeting is None else open_meeting(ends.meeting, f"stage {rank.stage}"),
        link_orders=LinkOrders(
            rank.stage,
            rank.tp_rank,
            incoming=incoming,
            outgoing=dict(zip(rank.receivers, outgoing, strict=True)),
            open_end=open_end,
            released=lambda number: report(LinkExchanged(epoch=ends.epoch, number=number)),
        ),
    )


def _name_of_link(rank: RankConfig, sender: int) -> str:
    """Return the name of a rank's link, such as "stage 0 -> stage 1".

    Args:
        sender: stage at the sending end of the link: the rank's own, or the one before.
    """
    if sender == rank.stage:
        return f"{rank.name} -> stage {rank.stage + 1}"
    return f"stage {sender} -> {rank.name}"


if __name__ == "__main__":
    leave(main())
