"""The message channels between the core and the ranks of one host: zmq for processes, memory for threads.

`ZmqChannel` carries plans to a rank, and the rank's reports back. Results and samples have rings of their own
(`pipeline.links.ring_channel`). `QueueChannel` joins threads, and carries results and samples too. Both
implement `MessageChannel`, and do not look into messages. Each rank has a zmq PAIR socket: a PUB socket would
serve all ranks at once, but drops messages for a rank that is slow.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import zmq

from penstock.errors import LinkClosedError, PortInUseError, WaitTimeoutError
from penstock.pipeline.links.channel import SEND_TIMEOUT_S, PolledChannel
from penstock.pipeline.links.channel import MessageChannel as MessageChannel
from penstock.process.endpoints import SocketHandle, SocketListener

_QUEUE_LIMIT = 4096  # messages; far above the number of plans in flight: a full queue means a stopped peer
_LINGER_MS = 1_000  # after a close, the last messages (a shutdown, the cause of a failure) get this long


class ZmqChannel:
    """One end of a message channel over a zmq PAIR. Use `bind` on one side and `connect` on the other.

    Either side may come first. An end belongs to one thread. The socket's monitor notices that the other end
    has gone, even by kill -9.
    """

    def __init__(self, address: str, name: str = "") -> None:
        self._name = name or address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.HANDSHAKE_IVL, 0)  # a peer that is still starting is not a peer that has gone
        self._socket.set_hwm(_QUEUE_LIMIT)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._peer_gone = False

    @classmethod
    def bind(cls, address: str, name: str = "") -> ZmqChannel:
        """Return the end that owns the address; raise `PortInUseError` if it cannot be bound.

        Args:
            address: as zmq writes it, or `fd:N` for the descriptor of a listening socket.
            name: for error messages, such as "core - stage 1".
        """
        channel = cls(address, name)
        try:
            bind_socket(channel._socket, address)
        except zmq.ZMQError as error:
            channel.close()
            raise PortInUseError(f"cannot listen on {address}: {error}.") from error
        return channel

    @classmethod
    def connect(cls, address: str, name: str = "") -> ZmqChannel:
        """Return the end that connects to the address; it may be made before the other end."""
        channel = cls(address, name)
        channel._socket.connect(address)
        return channel

    @classmethod
    def listen_at(cls, endpoint: SocketListener, name: str = "") -> ZmqChannel:
        """Return the end that binds a listening socket given to this process; zmq closes its own copy."""
        return cls.bind(bind_address(os.dup(endpoint.listen_fd)), name)

    @classmethod
    def connect_to(cls, endpoint: SocketHandle, name: str = "") -> ZmqChannel:
        """Return the end that connects to a listening socket, by a descriptor of the socket's file.

        The descriptor must stay open as long as the channel.
        """
        return cls.connect(connect_address(endpoint.handle_fd), name)

    def pollables(self) -> list[Any]:
        """Return the socket and its monitor, which is readable once the other end has gone.

        Implements `PolledChannel.pollables`.
        """
        return [self._socket, self._monitor]

    def filenos(self) -> list[int]:
        """Return the edge-triggered descriptors of the socket and of its monitor.

        Implements `PolledChannel.filenos`.
        """
        return [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._check_open()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._wait_for_room(timeout_s)
            self._socket.send(frame, zmq.NOBLOCK)

    def recv(self, timeout_s: float | None) -> bytes | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._look()) is None:
            self._check_open()
            if timeout_s != 0:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._poller.poll(_milliseconds(remaining)):
                    return None
            if has_message(self._monitor):
                self._monitor.recv_multipart()
                self._peer_gone = True  # another turn of the loop takes what the peer had sent before
            elif timeout_s == 0:
                return None
        return frame

    def _wait_for_room(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(_milliseconds(timeout_s)))
        self._peer_gone = self._monitor in ready
        self._check_open()
        if not ready:
            raise WaitTimeoutError(
                f"channel {self._name}: the other end accepted no message for {timeout_s:g} s."
            )

    def _check_open(self) -> None:
        if self._peer_gone or self._socket.closed:
            raise LinkClosedError(f"channel {self._name}: the other end is closed.")

    def close(self) -> None:
        """Close this end; block at most `_LINGER_MS` for sent messages that are still to be delivered."""
        if not self._socket.closed:
            is_awaited = not (self._peer_gone or has_message(self._monitor))
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            # Without a peer zmq would keep the messages, and wait until another peer connects.
            self._socket.close(linger=_LINGER_MS if is_awaited else 0)
            self._context.term()

    def _look(self) -> bytes | None:
        if self._socket.closed or not has_message(self._socket):
            return None
        return self._socket.recv(zmq.NOBLOCK)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a zmq socket has a message to receive now; five times cheaper than to try and fail."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def wait_any(channels: Iterable[PolledChannel], timeout_s: float | None) -> None:
    """Wait until any channel has a message or has lost its other end, for at most `timeout_s`.

    Args:
        timeout_s: None waits without end.
    """
    poller = zmq.Poller()
    for channel in channels:
        for pollable in channel.pollables():
            poller.register(pollable, zmq.POLLIN)
    poller.poll(_milliseconds(timeout_s))


class QueueChannel:
    """One end of a message channel in memory between two threads, the twin of `ZmqChannel`.

    `send` never waits for room. What the queue holds is bounded nevertheless: ranks only answer plans, and
    the core sends no more plans than may be in flight.
    """

    def __init__(self, inbox: _Inbox, outbox: _Inbox) -> None:
        self._inbox = inbox
        self._outbox = outbox

    @classmethod
    def pair(cls, name: str = "in memory") -> tuple[QueueChannel, QueueChannel]:
        """Return the two ends of a new channel; `name` is for error messages."""
        (mine,), (theirs,) = cls._between([name])
        return mine, theirs

    @classmethod
    def star(cls, ranks: Sequence[str]) -> tuple[list[QueueChannel], list[QueueChannel]]:
        """Make channels from the core to ranks; return the core's ends, then the ranks' ends.

        The core's ends can be waited for together (`wait_any`).

        Args:
            ranks: their names, for error messages.
        """
        return cls._between([f"core - {rank}" for rank in ranks])

    @classmethod
    def _between(cls, names: Sequence[str]) -> tuple[list[QueueChannel], list[QueueChannel]]:
        shared = threading.Condition()
        inboxes = [(_Inbox(shared, name), _Inbox(threading.Condition(), name)) for name in names]
        return [cls(a, b) for a, b in inboxes], [cls(b, a) for a, b in inboxes]

    @staticmethod
    def wait_any(channels: Sequence[QueueChannel], timeout_s: float | None) -> None:
        """Wait until one of the core's ends of a star has a message or is closed, but at most `timeout_s`.

        Args:
            timeout_s: seconds; None: no limit.
        """
        inboxes = [channel._inbox for channel in channels]
        with inboxes[0].changed:
            inboxes[0].changed.wait_for(lambda: any(inbox.is_ready for inbox in inboxes), timeout_s)

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._outbox.put(frame)

    def recv(self, timeout_s: float | None) -> bytes | None:
        return self._inbox.get(timeout_s)

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


class _Inbox:
    """A queue that one side fills and the other empties."""

    def __init__(self, changed: threading.Condition, name: str) -> None:
        self.changed = changed
        self._name = name
        self._frames: deque[bytes] = deque()
        self._closed = False

    @property
    def is_ready(self) -> bool:
        return bool(self._frames) or self._closed

    def put(self, frame: bytes) -> None:
        with self.changed:
            self._check(not self._closed)
            self._frames.append(frame)
            self.changed.notify_all()

    def get(self, timeout_s: float | None) -> bytes | None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.is_ready, timeout_s):
                return None
            self._check(bool(self._frames))
            return self._frames.popleft()

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def _check(self, goes_on: bool) -> None:
        if not goes_on:
            raise LinkClosedError(f"channel {self._name}: the other end is closed.")


def bind_address(fd: int) -> str:
    """Return the address with which `bind_socket` takes over a listening socket, by its descriptor."""
    return f"fd:{fd}"


def connect_address(fd: int) -> str:
    """Return the zmq address that connects to a listening socket by an open handle (`O_PATH`) of its file."""
    return f"ipc:///proc/self/fd/{fd}"


def bind_socket(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind to a zmq address, or take over the inherited listening descriptor of an address such as `fd:7`."""
    if address.startswith("fd:"):
        socket.setsockopt(zmq.USE_FD, int(address[3:]))
        address = "ipc:///inherited"  # never looked at: the descriptor is bound already
    socket.bind(address)


def _milliseconds(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else math.ceil(timeout_s * 1000)
