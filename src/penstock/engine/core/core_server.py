"""The loop of the core's process: it serves clients, ranks and the supervisor on one thread.

    wait for any of them ──▶ obey the supervisor ──▶ take what clients sent ──▶ step ──▶ send updates ──▶ …

`engine.core.core_process` makes a `CoreServer` and runs it until the supervisor tells it to stop.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.batch import AllocateKV
from penstock.engine.core.core import EngineCore
from penstock.engine.core.core_clients import CoreClients
from penstock.engine.core.pipe_watch import PipeWatch
from penstock.engine.ipc import (
    HEARTBEAT_S,
    AbortRequests,
    AddRequest,
    ClientToCore,
    CoreSocket,
    GetTrace,
    Operate,
    Operated,
    SessionsChanged,
    Trace,
    Welcome,
)
from penstock.errors import ErrorInfo, PenstockError
from penstock.executor.base import NO_EXECUTOR, Executor
from penstock.executor.mp import MpExecutor
from penstock.process.child import Abandoned, Ready, StatusEvent
from penstock.process.control import ControlMessage, ControlReader, EpochLost, ExchangeLink
from penstock.process.endpoints import NO_RESTARTS, CoreEndpoints, Restarts
from penstock.process.pipe_hosts import PipeHosts
from penstock.process.rhythm import next_beat

ABANDON_S = 2.0  # so long, at the end, steps in flight may take to come back
POLL_S = 0.1
MOST_TURNS = 16  # of the core, before the loop looks again for what clients and the supervisor have sent


class _Epoch(NamedTuple):
    """The epoch that the core is in or joins, and the counts of process restarts before it."""

    number: int
    restarts: Restarts


class CoreServer:
    """The server of one core: it serves clients and steps the core until the supervisor tells it to stop.

    It goes on when ranks are lost: the core then enters the next epoch.

    Args:
        core: a core that has entered the epoch of `executor`.
        executor: executor of the core.
        socket: the core's end of the wire to its clients.
        welcome: the answer to a client's `Hello`.
        control: brings the messages of the supervisor.
        join: begins to connect to the ranks of another epoch, and returns the executor.
        report: called with an event for the supervisor: the core leaves an epoch by itself, a step has
            crossed all stages after a loss, or a link was found to be slow or well again.
        beat: called whenever the loop turns, as a sign of life.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        socket: CoreSocket,
        welcome: Welcome,
        control: ControlReader,
        *,
        join: Callable[[CoreEndpoints, AllocateKV], Executor] = MpExecutor,
        report: Callable[[StatusEvent], None] = lambda event: None,
        beat: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._socket = socket
        self._clients = CoreClients(socket, core.abort, core.stats)
        self._welcome = welcome
        self._control = control
        self._join = join
        self._report = report
        self._pulse = beat
        self._epoch = _Epoch(core.epoch, NO_RESTARTS)
        self._pipe = PipeWatch()
        self._told_loss: ErrorInfo | None = None
        self._clock = clock
        self._use(executor)
        self._last_beat = clock()

    def run(self) -> None:
        """Serve clients in this thread until the supervisor tells the process to stop."""
        patience_s = 0.0
        while True:
            ready = self._socket.wait([*self._sources, *self._core.wait_sources()], patience_s)
            if self._control.fileno() in ready and not self._obey(self._control.receive()):
                return
            for client, request in self._socket.drain():
                self._take(client, request)
            self._join_ranks()
            # In every turn, whatever has ended the wait: the ranks' descriptors are edge-triggered, so a
            # result that is not taken now causes no further event.
            is_at_rest = self._advance()
            self._tell_done()
            self._tell_supervisor()
            patience_s = self._patience() if is_at_rest else 0.0

    def shutdown(self) -> None:
        """Let the ranks leave, and close the core."""
        self._executor.shutdown()
        self._core.close()

    def _use(self, executor: Executor) -> None:
        """Use this executor from now on; `NO_EXECUTOR` between two epochs."""
        self._executor = executor
        self._sources = [*executor.wait_sources(), self._control.fileno()]

    def _obey(self, message: ControlMessage) -> bool:
        """Carry out a message of the supervisor; return whether to go on."""
        if isinstance(message, EpochLost):
            self._lose(message)
        elif isinstance(message, CoreEndpoints):
            self._begin_epoch(message)
        elif isinstance(message, ExchangeLink):
            self._executor.exchange_link(message.order)
        elif isinstance(message, PipeHosts):
            self._pipe.note(message)
            self._show_hosts()
        else:
            self._abandon()
            return False
        return True

    def _lose(self, lost: EpochLost) -> None:
        """Lose the epoch, for the supervisor's reason: it knows the first cause, which the core may not."""
        if not self._core.has_pipe:
            self._executor.abandon()  # an executor that still waits for ranks, if there is one
        updates = self._core.lose_epoch(lost.error, ends=lost.ends)
        # The same object as `core.loss`: `_tell_supervisor` compares identities. Another object would make it
        # report the loss back to the supervisor.
        self._told_loss = lost.error
        self._use(NO_EXECUTOR)
        self._clients.send_updates(updates)
        self._beat()

    def _begin_epoch(self, ends: CoreEndpoints) -> None:
        """Begin to connect to the ranks of a new epoch; `_join_ranks` enters it once they have come."""
        # Steps are not counted anew: the ranks' decision logs of the new epoch begin with this step.
        _, first_step = self._core.steps_in_flight
        start = AllocateKV(num_blocks=self._welcome.num_blocks, epoch=ends.epoch, first_step=first_step)
        self._epoch = _Epoch(ends.epoch, ends.restarts)
        self._use(self._join(ends, start))
        gc.collect()  # frees the executor of the last epoch, with the memory of its ring

    def _join_ranks(self) -> None:
        """Enter the epoch if all ranks have come; do nothing within an epoch."""
        if self._core.has_pipe:
            return
        try:
            if (kv_plan := self._executor.poll_start()) is not None:
                number, restarts = self._epoch
                self._core.enter_epoch(number, self._executor, restarts, kv_plan.ranks)
        except PenstockError as error:  # a rank that cannot load says why
            self._executor.abandon()
            self._core.lose_epoch(error.info())
            self._use(NO_EXECUTOR)

    def _tell_done(self) -> None:
        """Report operations that are complete, and changes of sessions.

        All clients are told of sessions, before the client that asked is told that its operation is complete.
        """
        opened, closed = self._core.operations.sessions.take_changes()
        if opened or closed:
            self._clients.send_all(SessionsChanged(opened, closed))
        done = self._core.operations.take_done()
        if done:
            self._beat()
        for (client, number), how in done:
            self._clients.send(client, Operated(number, how))

    def _tell_supervisor(self) -> None:
        """Report a loss that the supervisor may not know of, and later the recovery from it."""
        loss = self._core.loss
        if loss is not self._told_loss:
            self._told_loss = loss
            if loss is None:
                self._report(Ready(epoch=self._epoch.number, numeric_classes=self._core.numeric_classes))
            else:
                self._use(NO_EXECUTOR)
                number = self._epoch.number
                self._report(Abandoned(epoch=number, error=loss, leave_s=self._core.leave_s))
            self._beat()

    def _patience(self) -> float:
        now = self._clock()
        return max(0.0, min(self._core.next_wakeup(), next_beat(self._last_beat, HEARTBEAT_S)) - now)

    def _advance(self) -> bool:
        """Step the core until nothing changes any more, and send the updates.

        The descriptors are edge-triggered, and submitting a plan may use up an edge: a result that came
        meanwhile would cause no event.

        Returns:
            Whether nothing changes any more. False after `MOST_TURNS`: where stages are quicker than the core
            there is always another result, and new requests and aborts must not wait for the last one.
        """
        is_at_rest = False
        for _ in range(MOST_TURNS):
            self._pulse()
            before = self._core.steps_in_flight
            updates = self._core.step()
            if updates:
                self._clients.send_updates(updates)
            elif self._core.steps_in_flight == before:
                is_at_rest = True
                break
        if self._clock() >= next_beat(self._last_beat, HEARTBEAT_S):
            self._beat()
        return is_at_rest

    def _abandon(self) -> None:
        """Abort all requests, and settle the steps in flight: no rank may send to a closed connection."""
        for request_id in self._clients.live_requests:
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
                self._clients.disown(request_id)
        elif isinstance(message, GetTrace):
            spans = self._core.spans() if message.seen is None else self._core.rank_spans(message.seen)
            self._clients.send(client, Trace(self._pipe.aligned(spans)))
        elif isinstance(message, Operate):
            self._clients.send_updates(self._core.operate((client, message.number), message.operation))
        else:
            opened = self._core.operations.sessions.opened()
            sessions = [SessionsChanged(opened, [])] if opened else []
            self._clients.welcome(client, [self._welcome, *sessions, *self._pipe.shown()])

    def _add(self, client: bytes, message: AddRequest) -> None:
        num_sequences = self._welcome.num_sequences + 1 + len(message.request.followers)
        self._welcome = msgspec.structs.replace(self._welcome, num_sequences=num_sequences)
        try:
            self._core.add_request(message.request, message.output_ids, message.num_scores)
            self._clients.own(client, message.request)
        except PenstockError as error:
            self._clients.refuse(client, message.request, error)

    def _beat(self) -> None:
        self._last_beat = self._clock()
        self._clients.beat()
        if judged := self._pipe.follow(self._core.spans):
            for link in judged:
                self._report(link)
            self._show_hosts()

    def _show_hosts(self) -> None:
        for hosts in self._pipe.shown():
            self._clients.send_all(hosts)
