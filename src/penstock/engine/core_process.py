"""The engine core as a process: `python -m penstock.engine.core_process`.

One loop on one thread: wait for clients, ranks or the supervisor; take what clients sent; let the core settle
results and fill the pipe; send each client its updates. Started by the supervisor. Torch-free.
"""

from __future__ import annotations

import gc
import math
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from penstock.batch import AllocateKV
from penstock.config import CoreConfig, CoreEnds, CoreProcessConfig
from penstock.engine.calibration import calibrate
from penstock.engine.core import EngineCore
from penstock.engine.ipc import (
    HEARTBEAT_S,
    AbortRequests,
    AddRequest,
    ClientToCore,
    CoreSocket,
    CoreToClient,
    EngineFailed,
    GetTrace,
    StepUpdates,
    Trace,
    Welcome,
)
from penstock.errors import ErrorInfo, PenstockError, error_from_info
from penstock.executor.base import Executor, KVPlan
from penstock.executor.child import Abandoned, Ready, StatusEvent, StatusWriter, enter_child, run_child
from penstock.executor.control import ControlMessage, ControlReader, EpochLost, PipelineLost, Stop
from penstock.executor.mp import MpExecutor
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.scheduler import Scheduler

ABANDON_S = 2.0
CAUSE_WAIT_S = 1.0  # longer than the supervisor takes to hear the ranks (`supervisor.CAUSE_GRACE_S`)
POLL_S = 0.1


def build_core(
    config: CoreConfig,
    executor: Executor,
    kv_plan: KVPlan,
    clock: Callable[[], float],
    *,
    recovers: bool = False,
) -> tuple[EngineCore, Scheduler]:
    """Scheduler and core over an executor that has been started; measures the stages."""
    calibration = calibrate(executor, config, kv_plan, clock)
    scheduler = Scheduler(
        config.scheduler,
        BlockAllocator(BlockPool(kv_plan.num_blocks), config.cache.block_size),
        num_stages=config.parallel.pipeline_parallel_size,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        seed=config.seed,
        clock=clock,
        costs=None if calibration.costs is None else calibration.costs.model,
    )
    core = EngineCore(
        scheduler,
        executor,
        config.parallel,
        clock,
        calibration=calibration,
        recovers=recovers,
        stall_timeout_s=config.stall_timeout_s,
    )
    return core, scheduler


def refusal(request: GenerationRequest, error: PenstockError) -> RequestUpdate:
    """The only update of a request that the core has not taken."""
    return RequestUpdate(request_id=request.request_id, finish_reason="error", error=error.info())


def prove_stages(core: EngineCore) -> None:
    """Send the first probe and wait until it has crossed every stage. Raises the cause if it does not."""
    while math.isinf(core.stats().last_result_age_s):
        core.step(timeout_s=HEARTBEAT_S)
        cause = core.failure or core.loss
        if cause is not None:
            raise error_from_info(cause)


class CoreServer:
    """Serves the clients of one core until the supervisor says stop or the pipeline is lost.

    Args:
        executor: that of the core.
        welcome: what a client is told when it says hello.
        control: from the supervisor.
        join: makes the executor of another epoch, which is then started.
        report: hears when the core leaves an epoch by itself, and when it has come through another one.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clients: CoreSocket,
        welcome: Welcome,
        control: ControlReader,
        *,
        join: Callable[[CoreEnds, AllocateKV], Executor] = MpExecutor,
        report: Callable[[StatusEvent], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._clients = clients
        self._welcome = welcome
        self._control = control
        self._join = join
        self._report = report
        self._epoch = 0
        self._told_loss: ErrorInfo | None = None
        self._clock = clock
        self._use(executor)
        self._owners: dict[str, bytes] = {}  # client of each live request
        self._known: set[bytes] = set()
        self._last_beat = clock()

    def run(self) -> None:
        """Raises the first cause when the pipeline is lost; returns when told to stop."""
        while True:
            ready = self._clients.wait(self._sources, self._patience())
            if self._control.fileno() in ready and not self._obey(self._control.receive()):
                return
            for client, request in self._clients.drain():
                self._take(client, request)
            self._join_ranks()
            self._advance()
            if self._core.failure is not None:
                self._fail(self._cause(self._core.failure))
            self._tell_supervisor()

    def shutdown(self) -> None:
        """Let the ranks go."""
        if self._executor is not None:
            self._executor.shutdown()

    def _use(self, executor: Executor | None) -> None:
        """Talk to the ranks over this one; None between two epochs."""
        self._executor = executor
        rank_fds = [] if executor is None else executor.wait_fds()
        self._sources = [*rank_fds, self._control.fileno()]

    def _obey(self, message: ControlMessage) -> bool:
        """Whether to go on."""
        if isinstance(message, PipelineLost):
            self._fail(message.error)
        elif isinstance(message, EpochLost):
            self._lose(message)
        elif isinstance(message, CoreEnds):
            self._begin_epoch(message)
        else:
            self._abandon()
            return False
        return True

    def _lose(self, lost: EpochLost) -> None:
        """The supervisor knows the first cause, whatever the core has noticed."""
        if self._executor is not None and not self._core.has_pipe:
            self._executor.abandon()  # not all ranks had come
        updates = self._core.lose_epoch(lost.error, restarts=lost.restarts, is_final=lost.is_final)
        self._told_loss = lost.error
        self._use(None)
        self._send_updates(updates)
        self._beat()

    def _begin_epoch(self, ends: CoreEnds) -> None:
        """The ranks come to these ends; `_join_ranks` waits for them."""
        _, first_step = self._core.steps_in_flight
        start = AllocateKV(num_blocks=self._welcome.num_blocks, epoch=ends.epoch, first_step=first_step)
        self._epoch = ends.epoch
        self._use(self._join(ends, start))
        gc.collect()  # the executor of the epoch before, and the memory of its ring

    def _join_ranks(self) -> None:
        """Enter the epoch once all ranks are there."""
        if self._executor is None or self._core.has_pipe:
            return
        try:
            if self._executor.poll_start() is not None:
                self._core.enter_epoch(self._epoch, self._executor)
        except PenstockError as error:  # a rank that cannot load says why
            self._executor.abandon()
            self._core.lose_epoch(error.info())
            self._use(None)

    def _tell_supervisor(self) -> None:
        """Of a loss that it may not know of, and of its end."""
        loss = self._core.loss
        if loss is not self._told_loss:
            self._told_loss = loss
            if loss is None:
                self._report(Ready(epoch=self._epoch))
            else:
                self._use(None)
                self._report(Abandoned(epoch=self._epoch, error=loss))
            self._beat()

    def _patience(self) -> float:
        now = self._clock()
        return max(0.0, min(self._core.next_wakeup(), self._last_beat + HEARTBEAT_S) - now)

    def _advance(self) -> None:
        """Step until nothing moves: descriptors are edge-triggered, and a submit may use up the edge."""
        while True:
            before = self._core.steps_in_flight
            updates = self._core.step()
            if self._core.failure is not None:
                return  # clients are told once, with the cause, instead of once per request
            if updates:
                self._send_updates(updates)
            elif self._core.steps_in_flight == before:
                break
        if self._clock() - self._last_beat >= HEARTBEAT_S:
            self._beat()

    def _cause(self, noticed: ErrorInfo) -> ErrorInfo:
        """The supervisor's word on a loss that the core noticed: it sees how a rank ended. Waits briefly."""
        readable, _, _ = select.select([self._control], [], [], CAUSE_WAIT_S)
        message = self._control.receive() if readable else Stop()
        return message.error if isinstance(message, PipelineLost) else noticed

    def _abandon(self) -> None:
        """End what still runs, and let the steps in flight come back, so that no rank sends to nobody."""
        for request_id in self._owners:
            self._core.abort(request_id)
        deadline = self._clock() + ABANDON_S
        while self._core.num_inflight and self._core.failure is None and self._clock() < deadline:
            self._core.step(timeout_s=POLL_S)

    def _take(self, client: bytes, message: ClientToCore) -> None:
        if isinstance(message, AddRequest):
            self._add(client, message.request)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._core.abort(request_id)
                self._owners.pop(request_id, None)
        elif isinstance(message, GetTrace):
            self._clients.send(client, Trace(self._core.spans()))
        else:
            self._known.add(client)
            self._clients.send(client, self._welcome)

    def _add(self, client: bytes, request: GenerationRequest) -> None:
        try:
            self._core.add_request(request)
            self._owners[request.request_id] = client
        except PenstockError as error:
            self._clients.send(client, StepUpdates([refusal(request, error)], self._core.stats()))

    def _send_updates(self, updates: list[RequestUpdate]) -> None:
        by_client: dict[bytes, list[RequestUpdate]] = {}
        owners = self._owners
        for update in updates:
            client = owners.get(update.request_id)
            if client is not None:
                by_client.setdefault(client, []).append(update)
                if update.finish_reason is not None:
                    del owners[update.request_id]
        stats = self._core.stats()
        for client, own_updates in by_client.items():
            self._clients.send(client, StepUpdates(own_updates, stats))

    def _beat(self) -> None:
        self._last_beat = self._clock()
        self._send_all(StepUpdates([], self._core.stats()))

    def _fail(self, error: ErrorInfo) -> None:
        self._send_all(EngineFailed(error))
        raise error_from_info(error)

    def _send_all(self, message: CoreToClient) -> None:
        for client in self._known:
            self._clients.send(client, message)


def _serve(config: CoreProcessConfig, control_fd: int, status: StatusWriter, closing: ExitStack) -> int:
    enter_child("penstock core", config.parent_pid)
    if config.core.cpus:
        os.sched_setaffinity(0, config.core.cpus)
    clients = CoreSocket(config.client_address)
    closing.callback(clients.close)
    control = ControlReader(control_fd)
    ends = control.receive()
    if not isinstance(ends, CoreEnds):
        return 0
    executor = MpExecutor(ends)
    stopping = closing.enter_context(ExitStack())
    stopping.callback(executor.shutdown)
    kv_plan = _start(executor, clients)
    core, scheduler = build_core(config.core, executor, kv_plan, time.monotonic, recovers=True)
    welcome = Welcome(
        num_blocks=kv_plan.num_blocks,
        block_size=config.core.cache.block_size,
        max_model_len=scheduler.max_len,
        stages=kv_plan.ranks,
    )
    prove_stages(core)
    server = CoreServer(core, executor, clients, welcome, control, report=status.write)
    stopping.pop_all()
    stopping.callback(server.shutdown)
    del executor  # it is the server's, and goes with its epoch
    status.write(Ready())
    gc.freeze()  # what was made so far lives for ever; the collector need not look at it again
    server.run()
    return 0


def _start(executor: Executor, clients: CoreSocket) -> KVPlan:
    """The handshake with the ranks; clients that wait already hear of its failure."""
    try:
        return executor.start()
    except PenstockError as error:
        for client, _ in clients.drain():
            clients.send(client, EngineFailed(error.info()))
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the core; returns the exit code."""
    with ExitStack() as closing:  # after the failure has been told: the ranks' end must not be seen before it
        return run_child(
            "penstock.engine.core_process",
            arguments,
            CoreProcessConfig,
            lambda config, status, options: _serve(config, options.control_fd, status, closing),
            more=["--control-fd"],
        )


if __name__ == "__main__":
    sys.exit(main())
