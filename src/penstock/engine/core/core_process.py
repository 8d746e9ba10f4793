"""The engine core as a process: `python -m penstock.engine.core.core_process`.

It connects to the ranks, in the first epoch to which all of them come. It proves that a step crosses all
stages, and then serves clients until the supervisor tells it to stop. Started by the supervisor. Torch-free.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from penstock.decisions.recorder import NoRecorder, open_recorder
from penstock.drafting.drafter_child import DrafterChild
from penstock.engine.core.core import EngineCore
from penstock.engine.core.core_assembly import build_core, open_guides, prove_stages, start_drafting
from penstock.engine.core.core_server import CoreServer
from penstock.engine.ipc import CoreSocket, Welcome
from penstock.errors import PeerError
from penstock.executor.base import Executor
from penstock.executor.mp import MpExecutor
from penstock.process import entry_points
from penstock.process.child import (
    Abandoned,
    DrafterLoaded,
    Ready,
    StatusEvent,
    StatusWriter,
    enter_child,
    keep_saying_alive,
    run_child,
)
from penstock.process.config import CoreConfig, CoreProcessConfig
from penstock.process.control import CONTROL_OPTION, ControlReader, Stop
from penstock.process.endpoints import CoreEndpoints
from penstock.speculation.grammar_guides import NoGuides

LOAD_GRACE_S = 60.0  # so long after the load timeout the supervisor may take to end and name a slow stage


def _serve(
    config: CoreProcessConfig, control: ControlReader, status: StatusWriter, closing: ExitStack
) -> int:
    replica = config.core.replica
    enter_child("penstock core" if replica is None else f"penstock replica {replica} core", config)
    pulse = keep_saying_alive(status)
    recorder = open_recorder(config.core)
    closing.callback(recorder.close)
    drafting = start_drafting(config.core)  # before this process is bound to CPU cores: the child is free
    if drafting is not None:
        closing.callback(drafting.close)
    if config.core.cpus:
        os.sched_setaffinity(0, config.core.cpus)
    clients = CoreSocket(config.client_address)
    closing.callback(clients.close)
    if drafting is not None:
        # The draft model loads before the ranks look how much memory is free. A core that replaces another
        # one has its endpoints already (`has_news`), and does not wait.
        drafting.await_ready(config.core.parallel.load_timeout_s, control.has_news)
        status.write(DrafterLoaded())
    # The vocabulary is read while the ranks load. If ranks wait for this core (`has_news`), it is read later,
    # for the first request with a grammar.
    guides = open_guides(config.core, at_once=not control.has_news())
    stopping = closing.enter_context(ExitStack())
    joined = _join_first(config.core, control, status.write, stopping, drafting, guides, recorder)
    if joined is None:
        return 0
    executor, core, welcome = joined
    server = CoreServer(core, executor, clients, welcome, control, report=status.write, beat=pulse.beat)
    stopping.pop_all()
    stopping.callback(server.shutdown)
    del executor, joined  # the server owns the executor now, and drops it when the epoch ends
    status.write(Ready(epoch=core.epoch, numeric_classes=core.numeric_classes))
    gc.freeze()  # all objects made so far stay until the end; the garbage collector can skip them
    server.run()
    return 0


def _join_first(
    config: CoreConfig,
    control: ControlReader,
    report: Callable[[StatusEvent], None],
    stopping: ExitStack,
    drafting: DrafterChild | None,
    guides: NoGuides,
    recorder: NoRecorder,
) -> tuple[Executor, EngineCore, Welcome] | None:
    """Join the first epoch to which all ranks come; return None if this process is told to stop.

    The executor ends with `stopping`. If a rank is lost meanwhile, the error is raised at the first start of
    the engine. If this core replaces another one, only the epoch ends, and the next one is waited for.
    """
    while not isinstance(ends := control.receive(), Stop):
        if not isinstance(ends, CoreEndpoints):
            continue
        executor = MpExecutor(ends, load_timeout_s=config.parallel.load_timeout_s + LOAD_GRACE_S)
        stopping.callback(executor.shutdown)
        try:
            return executor, *_start(config, executor, ends, control, drafting, guides, recorder)
        except PeerError as error:
            if ends.epoch == 0 and not control.has_news():
                raise
            stopping.pop_all()
            executor.abandon()
            report(Abandoned(epoch=ends.epoch, error=error.info()))
    return None


def _start(
    config: CoreConfig,
    executor: MpExecutor,
    ends: CoreEndpoints,
    control: ControlReader,
    drafting: DrafterChild | None,
    guides: NoGuides,
    recorder: NoRecorder,
) -> tuple[EngineCore, Welcome]:
    """Return a core over ranks that are proved to work, and the `Welcome` message for the core's clients."""
    kv_plan = executor.start(control.has_news)
    core, scheduler = build_core(
        config,
        executor,
        kv_plan,
        time.monotonic,
        recovers=True,
        epoch=ends.epoch,
        restarts=ends.restarts,
        drafting=drafting,
        guides=guides,
        recorder=recorder,
    )
    prove_stages(core)
    return core, Welcome(
        num_blocks=kv_plan.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=scheduler.max_len,
        stages=kv_plan.ranks,
        seed=config.seed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine core in this process until it is told to stop, and return the exit code."""
    # Closed only after a failure is reported: otherwise the supervisor could see first that the ranks end.
    with ExitStack() as closing:
        return run_child(
            entry_points.CORE,
            arguments,
            CoreProcessConfig,
            lambda config, status, options: _serve(config, ControlReader.inherited(options), status, closing),
            more=[CONTROL_OPTION],
        )


if __name__ == "__main__":
    sys.exit(main())
