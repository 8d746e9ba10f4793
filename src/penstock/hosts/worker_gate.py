"""The gate where workers come in: a thread that serves the door, and hands over those that have joined.

The door (`trust.worker_door`) lets in hosts with a certificate of the cluster. The first message of a worker
says what its host can give. The gate then hands the worker's wire over to the supervisor.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from penstock.errors import PeerError, PenstockError, describe
from penstock.hosts.agent_messages import AgentHello, ToHead
from penstock.hosts.agent_wire import MAX_HELLO_BYTES, MAX_TOLD_BYTES, AgentWire
from penstock.hosts.bell import Bell
from penstock.hosts.logs.line_ration import LineRation
from penstock.trust.door import Door, Entered
from penstock.trust.head_join import NOBODY, ConnectedHosts, HeadConversation, HeadJoin, WeightsVisit
from penstock.trust.peer_names import PeerName

HELLO_S = 10.0  # so long an agent has to send its first message
_LOOK_S = 0.05  # between two looks for that message
_IDLE_S = 0.5  # between two looks at whether the gate is closed
REFUSED_AT_ONCE, REFUSED_PER_S = 10, 1.0  # so many refused peers are reported one by one, the others counted


class JoinedWorker(NamedTuple):
    """A worker that has joined the head.

    Attributes:
        host: name of its host.
        serial: serial number of its certificate.
        wire: the connection to its agent.
        hello: the agent's first message, which says what its host can give.
        address: address from which it has connected.
        local_address: address of this host at which the worker has reached it.
    """

    host: str
    serial: int
    wire: AgentWire[ToHead]
    hello: AgentHello
    address: str
    local_address: str


class _Arriving(NamedTuple):
    host: str
    serial: int
    wire: AgentWire[ToHead]
    address: str
    local_address: str
    deadline: float


def _send_away(connection: socket.socket, visitor: PeerName) -> None:
    connection.close()


class WorkerGate:
    """The gate of the head: its thread accepts the connections of workers and hands over those that join.

    It can be polled (`fileno`): it is readable when a worker has joined, or a peer was refused.

    Args:
        make_door: makes the door, which checks each peer; the thread of the gate serves it. Its argument is a
            function that the door calls with the address of each refused peer, and the error.
        connected: names of the hosts that are connected, as the door knows them.
        give_weights: takes the connections over which workers fetch weights, and the names of their hosts; it
            is called in the thread of the gate, and must not wait.
        receive_visitor: takes the connection and the name of a host that only looks whether it could join.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        make_door: Callable[[Callable[[str, PenstockError], None]], Door[HeadConversation]],
        connected: ConnectedHosts,
        give_weights: Callable[[socket.socket, str], None] = lambda connection, host: connection.close(),
        receive_visitor: Callable[[socket.socket, PeerName], None] = _send_away,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive_visitor = receive_visitor
        self._door = make_door(self._refuse)
        self._connected = connected
        self._give_weights = give_weights
        self._refused: queue.SimpleQueue[tuple[str, PenstockError]] = queue.SimpleQueue()
        self._ration = LineRation(clock, REFUSED_AT_ONCE, REFUSED_PER_S)
        self._left_out: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._bell = Bell()
        self._joined: queue.SimpleQueue[JoinedWorker] = queue.SimpleQueue()
        self._arriving: list[_Arriving] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="listener for workers", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def take(self) -> list[JoinedWorker]:
        """Return the workers that have joined since the last call."""
        self._bell.hush()
        joined = []
        while not self._joined.empty():
            joined.append(self._joined.get())
        return joined

    def take_refused(self) -> list[tuple[str, PenstockError]]:
        """Return the peers that were refused since the last call: the address of each, and the error.

        Their number is bounded; `take_left_out` counts the others.
        """
        refused = []
        while not self._refused.empty():
            refused.append(self._refused.get())
        return refused

    def take_left_out(self) -> int:
        """Return how many more peers were refused since the last call than `take_refused` returns."""
        num_left_out = 0
        while not self._left_out.empty():
            num_left_out += self._left_out.get()
        return num_left_out

    def leave(self, host: str) -> None:
        """Free the name of a host whose connection has ended, so that the host can join again."""
        self._connected.leave(host)

    def send_away(self, worker: JoinedWorker) -> None:
        """Close the connection to a worker, which can join again."""
        worker.wire.close()
        self.leave(worker.host)

    def close(self) -> None:
        """Stop the thread and the door, so that no worker joins any more; close connections not yet taken."""
        self._is_over.set()
        self._thread.join()
        self._door.close()
        for wire in [
            *(arriving.wire for arriving in self._arriving),
            *(worker.wire for worker in self.take()),
        ]:
            wire.close()
        self._bell.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            for entered in self._door.serve(_LOOK_S if self._arriving else _IDLE_S):
                self._receive(entered)
            self._arriving = [worker for worker in self._arriving if not self._has_said_hello(worker)]
            if num_left_out := self._ration.take_dropped():
                self._left_out.put(num_left_out)
                self._bell.ring()

    def _receive(self, entered: Entered[HeadConversation]) -> None:
        """Pass a connection on; if that fails, for example without memory for a thread, close it.

        The gate goes on for all other connections.
        """
        try:
            self._pass_on(entered)
        except Exception as error:
            entered.connection.close()
            if not isinstance(entered.conversation, WeightsVisit) and entered.conversation.is_connected:
                self.leave(entered.conversation.host)
            self._refuse(entered.address, PeerError(f"the head cannot serve it: {describe(error).message}"))

    def _pass_on(self, entered: Entered[HeadConversation]) -> None:
        if isinstance(entered.conversation, WeightsVisit):
            self._give_weights(entered.connection, entered.conversation.host)
        elif entered.conversation.is_connected:
            self._begin(entered.conversation, entered.connection, entered.address)
        elif entered.conversation.visitor != NOBODY:
            self._receive_visitor(entered.connection, entered.conversation.visitor)
        else:
            entered.connection.close()  # the worker has got its certificate, and connects again with it

    def _refuse(self, address: str, error: PenstockError) -> None:
        """Report a peer that was not let in, within bounds: peers may come without end."""
        if self._ration.admit():
            self._refused.put((address, error))
            self._bell.ring()

    def _begin(self, worker: HeadJoin, connection: socket.socket, address: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        local_address = str(connection.getsockname()[0])
        wire: AgentWire[ToHead] = AgentWire(connection, ToHead, MAX_HELLO_BYTES)
        deadline = time.monotonic() + HELLO_S
        self._arriving.append(_Arriving(worker.host, worker.serial, wire, address, local_address, deadline))

    def _has_said_hello(self, worker: _Arriving) -> bool:
        """Return whether the worker need not be waited for any more: it has joined, or was sent away."""
        told = worker.wire.receive()
        if told and isinstance(told[0], AgentHello):
            worker.wire.max_bytes = MAX_TOLD_BYTES
            self._joined.put(
                JoinedWorker(
                    worker.host,
                    worker.serial,
                    worker.wire,
                    told[0],
                    worker.address,
                    worker.local_address,
                )
            )
            self._bell.ring()
            return True
        if told or worker.wire.failure is not None or time.monotonic() > worker.deadline:
            error = worker.wire.failure or PenstockError("it did not report the resources of its host.")
            worker.wire.close()
            self.leave(worker.host)
            self._refuse(worker.address, error)
            return True
        return False
