"""A process that waits to become a rank: `python -m penstock.rank.spare`, with the options of `rank.process`.

A host starts it while all is well, or shortly before a worker is asked for a rank. The process imports what
every rank needs, reports that, and waits without weights. When a rank is to be started, it becomes that rank
(`BecomeRank`), and does all that `rank.process` does. That saves the start of the interpreter and the
imports: most of the time that a small model needs to come back. If its worker (the agent of a host) is
killed, the spare waits some seconds for the next worker (`process.successor`). Exit code: 0 if it never
became a rank, else that of the rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import setproctitle

from penstock.process import entry_points
from penstock.process.child import (
    StatusWriter,
    Warm,
    bind_to_parent,
    bound_thread_pools,
    keep_saying_alive,
    leave,
    name_child,
    run_child,
)
from penstock.process.config import SpareProcessConfig
from penstock.process.control import CONTROL_OPTION, BecomeRank, ControlReader
from penstock.process.successor import NoSuccessor, SpareSelf, SuccessorDoor, end_with, follow
from penstock.process.torch_import import cheap_torch_import
from penstock.rank.process import live, process_title


def main(arguments: Sequence[str] | None = None) -> int:
    """Wait in this process until a rank is to be started, then run it; return the exit code."""
    return run_child(entry_points.SPARE, arguments, SpareProcessConfig, _run, more=[CONTROL_OPTION])


def _run(config: SpareProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    door = _door(config)
    name_child("penstock spare")
    bound_thread_pools(config.threads)
    keep_saying_alive(status)
    aside = threading.Thread(target=_import_rank, args=[config.nice], name="imports")
    aside.start()
    aside.join()
    import penstock.rank.rank  # noqa: F401  # imported already; if that failed, the error is raised here

    own = SpareSelf(threads=config.threads, own_bytes=own_bytes())
    status.write(Warm(own_bytes=own.own_bytes))
    control, end_with_parent = ControlReader.inherited(options), partial(bind_to_parent, config)
    while not isinstance(message := control.receive(), BecomeRank):  # the process that started it is gone
        parent = door.await_parent(own)
        if parent is None:
            return 0
        control.close()
        control = follow(parent, status)
        end_with_parent = partial(end_with, control.fileno())
    door.close()
    end_with_parent()
    rank = message.read()
    setproctitle.setproctitle(process_title(rank))
    return live(rank, status, control)


def _door(config: SpareProcessConfig) -> SuccessorDoor | NoSuccessor:
    """Return the door for the next worker; if the config names none, let this process die with its parent."""
    if config.successor_path:
        with contextlib.suppress(OSError):
            return SuccessorDoor(Path(config.successor_path))
    bind_to_parent(config)
    return NoSuccessor()


def _import_rank(nice: int) -> None:
    """Import what a rank needs; run in a thread of its own, whose priority this lowers for good.

    Linux does not let a thread raise its priority again, so the main thread must keep its own.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
    with cheap_torch_import():
        import penstock.rank.rank  # noqa: F401


def own_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Return the bytes of resident memory that this process shares with no file and no other process.

    Args:
        statm: the file in which Linux reports a process's pages.
    """
    resident, shared = (int(field) for field in statm.read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    leave(main())
