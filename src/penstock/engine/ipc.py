"""The wire between the engine core and its clients: messages, and the two ends of a zmq socket pair.

The core has a `CoreSocket` (ROUTER), and each client a `ClientSocket` (DEALER). Messages are msgspec structs,
one zmq frame each; decoding checks their types. zmq's limits on queued messages (high-water marks) are off,
so that it drops none while a connection lasts. The number of admitted requests bounds the number of messages,
besides one heartbeat a second.

The core's socket is bound to a path (`ipc:///...`), or to a listening descriptor that the core inherits
(`fd:7`), which leaves no file behind (`hosts.local_socket`). Only this module and
`pipeline.links.plan_channel` use zmq.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

import msgspec
import zmq

from penstock.batch import RankLoaded, SpansKey, StageSpans
from penstock.engine.stats import CoreStats
from penstock.errors import LinkClosedError, ProtocolError
from penstock.operations import OpenSession, Operation, OperationDone
from penstock.pipeline.links.plan_channel import bind_socket, has_message
from penstock.process.pipe_hosts import PipeHosts
from penstock.request import GenerationRequest, RequestUpdate

HEARTBEAT_S = 1.0  # the core sends its statistics at least this often, also when nothing happens
SILENCE_S = 10 * HEARTBEAT_S
AWAY_S = 60.0  # how long a client waits for the next core when one is lost


def silence_limit_s(heartbeat_limit_s: float) -> float:
    """Return the seconds of silence after which a client with running requests gives up the core.

    It is more than `heartbeat_limit_s`, after which the supervisor kills a silent core. The next core may
    therefore come before clients give up.
    """
    return max(SILENCE_S, heartbeat_limit_s + SILENCE_S / 2)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A client's first message to the core, which answers with `Welcome` once all stages work."""


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """A client's message to run a request: a new one, or one that a lost core has begun.

    Attributes:
        output_ids: tokens that a lost core had generated for the request; None: the request is new.
        num_scores: how many log-probabilities of prompt tokens a lost core had returned.
    """

    request: GenerationRequest
    output_ids: list[int] | None = None
    num_scores: int = 0


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """A client's message to end these requests.

    Unknown ids are ignored; no update of the requests follows.
    """

    request_ids: list[str]


class GetTrace(msgspec.Struct, frozen=True, tag="get_trace", omit_defaults=True):
    """A client's request for the timed work of the stages, which the core answers with a `Trace`.

    Attributes:
        seen: None: the client wants the work of the last seconds, of the first rank of each stage. A list:
            the client has reports up to these keys, one for each rank, and wants the work of all ranks since
            then.
    """

    seen: list[SpansKey] | None = None


class Operate(msgspec.Struct, frozen=True, tag="operate"):
    """A client's message to carry out an administrator's operation, such as a pause.

    An `Operated` with the same number answers it when the operation is complete or has failed.
    """

    number: int
    operation: Operation


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """The core's answer to `Hello` when the pipeline is ready: what clients need to know of the pipeline.

    Attributes:
        num_blocks: number of KV blocks on each rank, each of `block_size` tokens.
        max_model_len: the largest number of tokens that a prompt and its output may have together.
        stages: what each rank reported when it had loaded.
        seed: the engine's seed, from which the seeds of sequences without a seed are derived.
        num_sequences: number of sequences that this core was asked for so far, by all clients.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    stages: list[RankLoaded]
    seed: int = 0
    num_sequences: int = 0


class StepUpdates(msgspec.Struct, frozen=True, tag="updates"):
    """The core's message with the newest updates of one client's requests, and the core's statistics.

    If there are no updates for a second, it is sent without any, as a heartbeat.
    """

    updates: list[RequestUpdate]
    stats: CoreStats


class Trace(msgspec.Struct, frozen=True, tag="trace"):
    """The core's answer to `GetTrace`: the timed work of stages or ranks, ordered by stage and time."""

    spans: list[StageSpans]


class Operated(msgspec.Struct, frozen=True, tag="operated"):
    """The core's answer to `Operate`: the operation of this number is complete, or has failed."""

    number: int
    done: OperationDone


class SessionsChanged(msgspec.Struct, frozen=True, tag="sessions"):
    """The core's message to every client about cache sessions that were opened, changed or closed.

    A session keeps the KV blocks that its requests have computed. A message has the changes since the last
    such message. The first one after a `Welcome` has all open sessions; it is not sent if none is open.
    A session that has changed is in `opened`.
    """

    opened: list[OpenSession]
    closed: list[str]


ClientToCore = Hello | AddRequest | AbortRequests | GetTrace | Operate
CoreToClient = Welcome | StepUpdates | Trace | Operated | SessionsChanged | PipeHosts


class CoreGone:
    """A value that `ClientSocket.drain` returns in place of a message: the connection to the core is lost.

    Another core may later listen at the same address.
    """


_encoder = msgspec.msgpack.Encoder()
_to_core: msgspec.msgpack.Decoder[ClientToCore] = msgspec.msgpack.Decoder(ClientToCore)
_to_client: msgspec.msgpack.Decoder[CoreToClient] = msgspec.msgpack.Decoder(CoreToClient)


def _open(kind: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # zmq does not reconnect: the next core must get a `Hello` first
    socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # wait for a core that is still starting
    return context, socket


class _Endpoint:
    """The base of both ends: a socket in a zmq context of its own; a second `close` does nothing."""

    def __init__(self, kind: int) -> None:
        self._context, self._socket = _open(kind)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._context.term()


class CoreSocket(_Endpoint):
    """The core's end of the wire, with many clients, each known by an opaque id.

    After it is closed, zmq tries for half a second more to send what is queued.
    """

    def __init__(self, address: str) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise a send to a lost client would not fail
        bind_socket(self._socket, address)
        self._poller = zmq.Poller()
        self._polled: tuple[int, ...] | None = None  # descriptors that are waited for beside the socket

    def wait(self, others: Sequence[int], timeout_s: float) -> set[int]:
        """Wait until a client's message has come or one of `others` is readable, at most `timeout_s` seconds.

        Args:
            others: file descriptors to wait for besides the socket.

        Returns:
            Those of `others` that are readable.
        """
        if self._polled != tuple(others):
            self._polled = tuple(others)
            self._poller = zmq.Poller()
            for source in (self._socket, *others):
                self._poller.register(source, zmq.POLLIN)
        ready = self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        return {source for source, _ in ready if isinstance(source, int)}

    def drain(self) -> list[tuple[bytes, ClientToCore]]:
        """Return all messages that have come, each with the id of its client, without waiting."""
        received: list[tuple[bytes, ClientToCore]] = []
        while has_message(self._socket):
            client, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            received.append((client, _decode_to_core(frame)))
        return received

    def send(self, client: bytes, message: CoreToClient) -> bool:
        """Send a client a message without waiting, and return whether the client is still connected."""
        try:
            self._socket.send_multipart((client, _encoder.encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


class ClientSocket(_Endpoint):
    """A client's end of the wire, connected to one core.

    When the core goes away, `drain` returns a `CoreGone`, and `reconnect` connects to the core that comes
    next. The last messages of a core that has gone may be lost.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connect()

    def _connect(self) -> None:
        super().__init__(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._socket.connect(self._address)
        self._has_no_peer = False

    def reconnect(self) -> None:
        """Drop the connection, and open another to the same address, where the next core will listen.

        Does not wait for that core. Messages of the old connection that were not read are lost, in both
        directions. `filenos` returns other descriptors from now on.
        """
        self.close()
        self._connect()

    def filenos(self) -> list[int]:
        """Return file descriptors that become readable when `drain` may have something.

        They are edge-triggered: call `drain` after each event on them, and after each `send`.
        """
        return [_descriptor(self._socket), _descriptor(self._monitor)]

    def __enter__(self) -> ClientSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, message: ClientToCore) -> None:
        """Send the core a message without waiting.

        Without a connection it is lost, and `drain` returns a `CoreGone`. Raises `LinkClosedError` if this
        socket was closed.
        """
        if self._socket.closed:
            raise LinkClosedError("the engine client is closed.")
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # there is no connection any more
            self._has_no_peer = True

    def drain(self) -> list[CoreToClient | CoreGone]:
        """Return all messages that have come, without waiting, and last a `CoreGone` if the core is lost."""
        received: list[CoreToClient | CoreGone] = []
        if self._socket.closed:
            return received
        # Look for the loss first: all that the core had sent is then read too, and precedes the `CoreGone`.
        lost = self._is_lost() or self._has_no_peer
        while (frame := _receive_now(self._socket)) is not None:
            received.append(_decode_to_client(frame))
        return [*received, CoreGone()] if lost else received

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` seconds, and return whether `drain` may have something."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        return bool(poller.poll(max(0, round(timeout_s * 1000))))

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        super().close()

    def _is_lost(self) -> bool:
        lost = False
        while not self._monitor.closed and _receive_now(self._monitor) is not None:
            lost = True
        return lost


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _receive_now(socket: zmq.Socket[bytes]) -> bytes | None:
    """Return the last part of the next message, often its only one; None if no message has come."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)[-1]
    except zmq.Again:
        return None


def _decode_to_core(frame: bytes) -> ClientToCore:
    try:
        return _to_core.decode(frame)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a client sent an invalid message: {error}.") from error


def _decode_to_client(frame: bytes) -> CoreToClient:
    try:
        return _to_client.decode(frame)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the core sent an invalid message: {error}.") from error
