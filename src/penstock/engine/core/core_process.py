"""The engine core as a process: `python -m penstock.engine.core.core_process`.

One loop on one thread: wait for clients, ranks or the supervisor; take what clients sent; let the core settle
results and fill the pipe; send each client its updates. Started by the supervisor. Torch-free.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from penstock.batch import AllocateKV
from penstock.engine.core.calibration import calibrate
from penstock.engine.core.core import EngineCore
from penstock.engine.ipc import (
    HEARTBEAT_S,
    AbortRequests,
    AddRequest,
    ClientToCore,
    CoreSocket,
    CoreToClient,
    GetTrace,
    Operate,
    Operated,
    SessionsChanged,
    StepUpdates,
    Trace,
    Welcome,
)
from penstock.errors import ErrorInfo, PeerError, PenstockError, error_from_info
from penstock.executor.base import Executor, KVPlan
from penstock.executor.mp import MpExecutor
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.catalogue import StoreCatalogue
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.storage_tier import StorageTier, TierPolicy
from penstock.kvstore.opening import open_guarded
from penstock.process import entry_points
from penstock.process.child import (
    Abandoned,
    Ready,
    StatusEvent,
    StatusWriter,
    enter_child,
    keep_saying_alive,
    run_child,
)
from penstock.process.config import NO_RESTARTS, CoreConfig, CoreEndpoints, CoreProcessConfig, Restarts
from penstock.process.control import ControlMessage, ControlReader, EpochLost, Stop
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.scheduler import Scheduler

ABANDON_S = 2.0
CATALOGUE_BYTES = 32 << 20  # a quarter of a kilobyte for each block
LOAD_GRACE_S = 60.0  # for the supervisor to end, and name, the stage that does not load
POLL_S = 0.1


def build_core(
    config: CoreConfig,
    executor: Executor,
    kv_plan: KVPlan,
    clock: Callable[[], float],
    *,
    recovers: bool = False,
    epoch: int = 0,
    restarts: Restarts = NO_RESTARTS,
) -> tuple[EngineCore, Scheduler]:
    """Scheduler and core over an executor that has been started; measures the stages."""
    calibration = calibrate(executor, config, kv_plan, clock, epoch=epoch)
    allocator = BlockAllocator(_pool(config, kv_plan.num_blocks), config.cache.block_size)
    scheduler = Scheduler(
        config.scheduler,
        allocator,
        num_stages=config.parallel.pipeline_parallel_size,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        seed=config.seed,
        clock=clock,
        costs=None if calibration.costs is None else calibration.costs.model,
        tier=_tier(config, allocator, clock),
    )
    core = EngineCore(
        scheduler,
        executor,
        config.parallel,
        clock,
        calibration=calibration,
        recovers=recovers,
        stall_timeout_s=config.stall_timeout_s,
        epoch=epoch,
        restarts=restarts,
    )
    return core, scheduler


def _pool(config: CoreConfig, num_blocks: int) -> BlockPool:
    cache = None
    if config.cache.enable_prefix_caching:
        cache = PrefixCache(num_blocks, eviction_order(config.cache.eviction_policy))
    return BlockPool(num_blocks, cache)


def _tier(config: CoreConfig, allocator: BlockAllocator, clock: Callable[[], float]) -> StorageTier | None:
    if config.store is None:
        return None
    url = config.store.url
    # Without a store the list of what the ranks have in memory is in memory too.
    listed = CATALOGUE_BYTES if url is None else 0
    store = open_guarded(url, quota_bytes=config.store.quota_bytes, host_bytes=listed)
    return StorageTier(
        allocator,
        StoreCatalogue(store, config.store.namespace, config.store.description),
        clock,
        TierPolicy(
            store_when_found=config.cache.kv_store_when_found,
            patience_s=config.cache.kv_store_patience_s,
        ),
    )


def refusals(request: GenerationRequest, error: PenstockError) -> list[RequestUpdate]:
    """The only update of each sequence of a request that the core has not taken."""
    info = error.info()
    return [
        RequestUpdate(request_id=one.request_id, finish_reason="error", error=info) for one in request.alone()
    ]


def prove_stages(core: EngineCore) -> None:
    """Send the first probe and wait until it has crossed every stage. Raises the cause if it does not."""
    while math.isinf(core.stats().last_result_age_s):
        core.step(timeout_s=HEARTBEAT_S)
        cause = core.failure or core.loss
        if cause is not None:
            raise error_from_info(cause)


class CoreServer:
    """Serves the clients of one core, which recovers, until the supervisor says stop.

    Args:
        core: in the epoch of its executor.
        executor: that of the core.
        welcome: what a client is told when it says hello.
        control: from the supervisor.
        join: makes the executor of another epoch, which is then started.
        beat: told that the loop turns.
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
        join: Callable[[CoreEndpoints, AllocateKV], Executor] = MpExecutor,
        report: Callable[[StatusEvent], None] = lambda event: None,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._clients = clients
        self._welcome = welcome
        self._control = control
        self._join = join
        self._report = report
        self._pulse = beat
        self._epoch = core.epoch
        self._restarts = NO_RESTARTS
        self._told_loss: ErrorInfo | None = None
        self._clock = clock
        self._use(executor)
        self._owners: dict[str, bytes] = {}  # client of each live request
        self._known: set[bytes] = set()
        self._last_beat = clock()

    def run(self) -> None:
        """Returns when told to stop."""
        while True:
            ready = self._clients.wait(self._sources, self._patience())
            if self._control.fileno() in ready and not self._obey(self._control.receive()):
                return
            for client, request in self._clients.drain():
                self._take(client, request)
            self._join_ranks()
            self._advance()
            self._tell_done()
            self._tell_supervisor()

    def shutdown(self) -> None:
        """Let the ranks go."""
        if self._executor is not None:
            self._executor.shutdown()
        self._core.close()

    def _use(self, executor: Executor | None) -> None:
        """Talk to the ranks over this one; None between two epochs."""
        self._executor = executor
        rank_fds = [] if executor is None else executor.wait_fds()
        self._sources = [*rank_fds, self._control.fileno()]

    def _obey(self, message: ControlMessage) -> bool:
        """Whether to go on."""
        if isinstance(message, EpochLost):
            self._lose(message)
        elif isinstance(message, CoreEndpoints):
            self._begin_epoch(message)
        else:
            self._abandon()
            return False
        return True

    def _lose(self, lost: EpochLost) -> None:
        """The supervisor knows the first cause, whatever the core has noticed."""
        if self._executor is not None and not self._core.has_pipe:
            self._executor.abandon()  # not all ranks had come
        updates = self._core.lose_epoch(lost.error, is_final=lost.is_final)
        self._told_loss = lost.error
        self._use(None)
        self._send_updates(updates)
        self._beat()

    def _begin_epoch(self, ends: CoreEndpoints) -> None:
        """The ranks come to these ends; `_join_ranks` waits for them."""
        _, first_step = self._core.steps_in_flight
        start = AllocateKV(num_blocks=self._welcome.num_blocks, epoch=ends.epoch, first_step=first_step)
        self._epoch, self._restarts = ends.epoch, ends.restarts
        self._use(self._join(ends, start))
        gc.collect()  # the executor of the epoch before, and the memory of its ring

    def _join_ranks(self) -> None:
        """Enter the epoch once all ranks are there."""
        if self._executor is None or self._core.has_pipe:
            return
        try:
            if self._executor.poll_start() is not None:
                self._core.enter_epoch(self._epoch, self._executor, self._restarts)
        except PenstockError as error:  # a rank that cannot load says why
            self._executor.abandon()
            self._core.lose_epoch(error.info())
            self._use(None)

    def _tell_done(self) -> None:
        """Everybody, which sessions are open; whoever asked for an operation, that it is complete; everybody,
        what is so since."""
        opened, closed = self._core.operations.sessions.take_changes()
        if opened or closed:
            self._send_all(SessionsChanged(opened, closed))
        done = self._core.operations.take_done()
        if done:
            self._beat()
        for (client, number), how in done:
            self._send(client, Operated(number, how))

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
            self._pulse()
            before = self._core.steps_in_flight
            updates = self._core.step()
            if updates:
                self._send_updates(updates)
            elif self._core.steps_in_flight == before:
                break
        if self._clock() - self._last_beat >= HEARTBEAT_S:
            self._beat()

    def _abandon(self) -> None:
        """End what still runs, and let the steps in flight come back, so that no rank sends to nobody."""
        for request_id in self._owners:
            self._core.abort(request_id)
        deadline = self._clock() + ABANDON_S
        while self._core.num_inflight and self._clock() < deadline:
            self._core.step(timeout_s=POLL_S)

    def _take(self, client: bytes, message: ClientToCore) -> None:
        if isinstance(message, AddRequest):
            self._add(client, message)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._core.abort(request_id)
                self._owners.pop(request_id, None)
        elif isinstance(message, GetTrace):
            self._send(client, Trace(self._core.spans()))
        elif isinstance(message, Operate):
            next_step = self._core.steps_in_flight[1]
            ticket = client, message.number
            self._send_updates(self._core.operations.accept(ticket, message.operation, next_step))
        else:
            self._known.add(client)
            self._send(client, self._welcome)
            if opened := self._core.operations.sessions.opened():
                self._send(client, SessionsChanged(opened, []))
            self._send(client, StepUpdates([], self._core.stats()))

    def _add(self, client: bytes, message: AddRequest) -> None:
        asked = self._welcome.num_sequences + 1 + len(message.request.followers)
        self._welcome = msgspec.structs.replace(self._welcome, num_sequences=asked)
        try:
            self._core.add_request(message.request, message.output_ids, message.num_scores)
            self._owners |= {one.request_id: client for one in message.request.alone()}
        except PenstockError as error:
            self._send(client, StepUpdates(refusals(message.request, error), self._core.stats()))

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
            self._send(client, StepUpdates(own_updates, stats))

    def _beat(self) -> None:
        self._last_beat = self._clock()
        self._send_all(StepUpdates([], self._core.stats()))

    def _send_all(self, message: CoreToClient) -> None:
        for client in list(self._known):
            self._send(client, message)

    def _send(self, client: bytes, message: CoreToClient) -> None:
        """A client that has gone cannot abort what it asked for (row R13)."""
        if self._clients.send(client, message):
            return
        self._known.discard(client)
        for request_id in [mine for mine, owner in self._owners.items() if owner == client]:
            self._core.abort(request_id)
            del self._owners[request_id]


def _serve(config: CoreProcessConfig, control_fd: int, status: StatusWriter, closing: ExitStack) -> int:
    replica = config.core.replica
    enter_child("penstock core" if replica is None else f"penstock replica {replica} core", config.parent_pid)
    pulse = keep_saying_alive(status)
    if config.core.cpus:
        os.sched_setaffinity(0, config.core.cpus)
    clients = CoreSocket(config.client_address)
    closing.callback(clients.close)
    control = ControlReader(control_fd)
    stopping = closing.enter_context(ExitStack())
    joined = _join_first(config.core, control, status.write, stopping)
    if joined is None:
        return 0
    executor, core, welcome = joined
    server = CoreServer(core, executor, clients, welcome, control, report=status.write, beat=pulse.beat)
    stopping.pop_all()
    stopping.callback(server.shutdown)
    del executor, joined  # it is the server's, and goes with its epoch
    status.write(Ready(epoch=core.epoch))
    gc.freeze()  # what was made so far lives for ever; the collector need not look at it again
    server.run()
    return 0


def _join_first(
    config: CoreConfig, control: ControlReader, report: Callable[[StatusEvent], None], stopping: ExitStack
) -> tuple[Executor, EngineCore, Welcome] | None:
    """Join the first epoch to which all ranks come; its executor ends with `stopping`. None: it is to stop.

    Where another core was before, a rank that is lost ends but the epoch: the next one is waited for.
    """
    while not isinstance(ends := control.receive(), Stop):
        if not isinstance(ends, CoreEndpoints):
            continue
        executor = MpExecutor(ends, load_timeout_s=config.parallel.load_timeout_s + LOAD_GRACE_S)
        stopping.callback(executor.shutdown)
        try:
            return executor, *_start(config, executor, ends, control)
        except PeerError as error:
            if ends.epoch == 0 and not control.has_news():
                raise
            stopping.pop_all()
            executor.abandon()
            report(Abandoned(epoch=ends.epoch, error=error.info()))
    return None


def _start(
    config: CoreConfig, executor: MpExecutor, ends: CoreEndpoints, control: ControlReader
) -> tuple[EngineCore, Welcome]:
    """A core over ranks that have come and have proved to work, and what its clients are told."""
    kv_plan = executor.start(control.has_news)
    core, scheduler = build_core(
        config, executor, kv_plan, time.monotonic, recovers=True, epoch=ends.epoch, restarts=ends.restarts
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
    """Run the core; returns the exit code."""
    with ExitStack() as closing:  # after the failure has been told: the ranks' end must not be seen before it
        return run_child(
            entry_points.CORE,
            arguments,
            CoreProcessConfig,
            lambda config, status, options: _serve(config, options.control_fd, status, closing),
            more=["--control-fd"],
        )


if __name__ == "__main__":
    sys.exit(main())
