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

from penstock.config import CoreConfig, CoreProcessConfig
from penstock.engine.calibration import calibrate
from penstock.engine.control import PipelineLost, Stop, read_control
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
from penstock.executor.child import Ready, StatusWriter, enter_child, run_child
from penstock.executor.mp import MpExecutor
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.scheduler import Scheduler

ABANDON_S = 2.0
CAUSE_WAIT_S = 1.0  # longer than the supervisor takes to hear the ranks (`supervisor.CAUSE_GRACE_S`)
POLL_S = 0.1


def build_core(
    config: CoreConfig, executor: Executor, kv_plan: KVPlan, clock: Callable[[], float]
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
        if core.failure is not None:
            raise error_from_info(core.failure)


class CoreServer:
    """Serves the clients of one core until the supervisor says stop or the pipeline is lost.

    Args:
        welcome: what a client is told when it says hello.
        rank_fds: become readable when the executor may have results.
        control_fd: from the supervisor.
    """

    def __init__(
        self,
        core: EngineCore,
        clients: CoreSocket,
        welcome: Welcome,
        *,
        rank_fds: Sequence[int],
        control_fd: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._clients = clients
        self._welcome = welcome
        self._sources = [*rank_fds, control_fd]
        self._control_fd = control_fd
        self._clock = clock
        self._owners: dict[str, bytes] = {}  # client of each live request
        self._known: set[bytes] = set()
        self._last_beat = clock()

    def run(self) -> None:
        """Raises the first cause when the pipeline is lost; returns when told to stop."""
        while True:
            ready = self._clients.wait(self._sources, self._patience())
            if self._control_fd in ready:
                message = read_control(self._control_fd)
                if isinstance(message, PipelineLost):
                    self._fail(message.error)
                self._abandon()
                return
            for client, request in self._clients.drain():
                self._take(client, request)
            self._advance()
            if self._core.failure is not None:
                self._fail(self._cause(self._core.failure))

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
        readable, _, _ = select.select([self._control_fd], [], [], CAUSE_WAIT_S)
        message = read_control(self._control_fd) if readable else Stop()
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
    executor = MpExecutor(config.plan_addresses, config.results)
    closing.callback(executor.shutdown)
    kv_plan = _start(executor, clients)
    core, scheduler = build_core(config.core, executor, kv_plan, time.monotonic)
    welcome = Welcome(
        num_blocks=kv_plan.num_blocks,
        block_size=config.core.cache.block_size,
        max_model_len=scheduler.max_len,
        stages=kv_plan.ranks,
    )
    prove_stages(core)
    server = CoreServer(core, clients, welcome, rank_fds=executor.wait_fds(), control_fd=control_fd)
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
