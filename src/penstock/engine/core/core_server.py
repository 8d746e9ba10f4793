"""The loop of the core's process: clients, ranks and the supervisor, on one thread.

    wait for any of them ──▶ obey the supervisor ──▶ take what clients sent ──▶ step ──▶ send updates ──▶ …

`engine.core.core_process` makes one and runs it until the supervisor says stop.
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

ABANDON_S = 2.0
POLL_S = 0.1


class _Epoch(NamedTuple):
    """The epoch that the core is in, or joins, and the number of process restarts until then."""

    number: int
    restarts: Restarts


class CoreServer:
    """Serves the clients of one core and steps it, also over losses of ranks, until the supervisor says stop.

    Args:
        core: in the epoch of its executor.
        executor: executor of the core.
        socket: the core's end of the wire to its clients.
        welcome: message to a client that says hello.
        control: messages from the supervisor.
        join: makes the executor of another epoch, which is then started.
        beat: called whenever the loop turns, as a sign of life.
        report: called with an event for the supervisor: the core leaves an epoch by itself, has come through
            another one, or has found a link to be slow or well again.
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
        """Serve clients in this thread until the supervisor says stop."""
        while True:
            ready = self._socket.wait([*self._sources, *self._core.wait_sources()], self._patience())
            if self._control.fileno() in ready and not self._obey(self._control.receive()):
                return
            for client, request in self._socket.drain():
                self._take(client, request)
            self._join_ranks()
            # In every turn, whatever has ended the wait: the ranks' descriptors are edge-triggered, so that
            # what is not taken now causes no other event.
            self._advance()
            self._tell_done()
            self._tell_supervisor()

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
        """Lose the epoch; the supervisor knows the first cause, whatever the core has noticed."""
        if not self._core.has_pipe:
            self._executor.abandon()  # not all ranks had come
        updates = self._core.lose_epoch(lost.error, ends=lost.ends)
        # This very object: `_tell_supervisor` compares identities, and would report the loss back to where it
        # came from.
        self._told_loss = lost.error
        self._use(NO_EXECUTOR)
        self._clients.send_updates(updates)
        self._beat()

    def _begin_epoch(self, ends: CoreEndpoints) -> None:
        """Connect to the ends of a new epoch; `_join_ranks` waits for the ranks there."""
        # Steps are not counted anew: the ranks' logs of the new epoch begin with this step.
        _, first_step = self._core.steps_in_flight
        start = AllocateKV(num_blocks=self._welcome.num_blocks, epoch=ends.epoch, first_step=first_step)
        self._epoch = _Epoch(ends.epoch, ends.restarts)
        self._use(self._join(ends, start))
        gc.collect()  # the executor of the epoch before, and the memory of its ring

    def _join_ranks(self) -> None:
        """Enter the epoch once all ranks are there."""
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
        """Report a loss that the supervisor may not know of, and its end."""
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

    def _advance(self) -> None:
        """Step until nothing moves: descriptors are edge-triggered, and a submit may use up the edge."""
        while True:
            self._pulse()
            before = self._core.steps_in_flight
            updates = self._core.step()
            if updates:
                self._clients.send_updates(updates)
            elif self._core.steps_in_flight == before:
                break
        if self._clock() >= next_beat(self._last_beat, HEARTBEAT_S):
            self._beat()

    def _abandon(self) -> None:
        """End what still runs, and settle the steps in flight, so that ranks do not send to a closed end."""
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
