"""A channel of messages over a stream between hosts: plans, results and samples, in both directions.

One class serves the two-way channel of plans and the one-way channels alike. A message begins with its
length, twice, and its checksum (XXH3-64).

- The caller of `send` writes to the kernel itself, without waiting, so that no hand-over to another thread
  delays a plan.
- A thread of the channel writes what the kernel did not take at once. It also reads ahead into a bounded
  inbox, so that a sender need not wait until the receiver takes a message.
- One lock keeps these two threads from using the stream at the same time, which an SSL object does not allow.

No torch here.
"""

from __future__ import annotations

import math
import os
import select
import struct
from collections import deque
from contextlib import ExitStack
from threading import Condition, Lock
from typing import Any

import xxhash

from penstock.errors import LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.channel import SEND_TIMEOUT_S
from penstock.pipeline.links.frame import CHANGED_REMEDY
from penstock.pipeline.links.stream import Stream, stream_error
from penstock.pipeline.links.stream_opening import StreamThread
from penstock.process.endpoints import StreamChannelHandle

MAX_MESSAGE_BYTES = 1 << 30  # far above any plan: a greater length is not one of ours
_HEAD = struct.Struct("<IIQ")  # length, the same length XOR `_MARK`, checksum
_MARK = 0x4D545350
_READ_BYTES = 1 << 16
_REMEDY = "Run the same Penstock version on all hosts, and let nothing else connect to the link ports."
_LINGER_S = 1.0  # at a close, the last messages (a shutdown, the cause of a failure) get this long to leave


class StreamChannel:
    """One end of a two-way, ordered, loss-free channel of messages between hosts, for calls of one thread.

    Args:
        handle: as the host has handed it over; its descriptors stay the caller's.
        name: for error messages, such as "core - stage 1".
    """

    def __init__(self, handle: StreamChannelHandle, name: str) -> None:
        self._name = f"channel {name}"
        self._outbox = _Outbox(handle.num_messages)
        self._error: PeerError | None = None  # why nothing more can be sent
        with ExitStack() as undo:  # closes what was made, such as if there are no more descriptors
            self._inbox = _Inbox(handle.num_messages)
            undo.callback(self._inbox.close)
            self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the thread
            undo.callback(os.close, self._nudge)
            self._thread = StreamThread(handle.path, self._name, self._use, self._end)
            undo.pop_all()

    def pollables(self) -> list[Any]:
        """Return one descriptor: it is readable while a message is there, or once the other end has gone."""
        return [self._inbox.fileno()]

    def filenos(self) -> list[int]:
        """Return the descriptor of `pollables`. Implements `PolledChannel.filenos`."""
        return [self._inbox.fileno()]

    def await_room(self, timeout_s: float) -> None:
        """Wait until a message could be sent at once; raise as `send` does."""
        with self._outbox.changed:
            self._wait_for_room(timeout_s)

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Queue one message and write what the kernel takes now; the channel's thread writes the rest.

        Waits while the queue is full. Implements `MessageChannel.send`.
        """
        head = _HEAD.pack(len(frame), len(frame) ^ _MARK, xxhash.xxh3_64_intdigest(frame))
        with self._outbox.changed:
            self._wait_for_room(timeout_s)
            try:
                is_whole = self._outbox.put(memoryview(head + frame))
            except OSError as error:
                raise stream_error(self._name, error) from error
        if not is_whole:
            os.eventfd_write(self._nudge, 1)

    def recv(self, timeout_s: float | None) -> bytes | None:
        """Return the next message, or None when none came in time. Implements `MessageChannel.recv`.

        Raises `ProtocolError`, too, if a message has changed on its way.
        """
        if self._nudge < 0:
            raise LinkClosedError(f"{self._name} has ended.")
        message = self._inbox.take(timeout_s)
        if self._inbox.has_room_again:
            os.eventfd_write(self._nudge, 1)
        return message

    def close(self) -> None:
        """Wait at most `_LINGER_S` for queued messages to leave; then stop the thread and the stream."""
        if self._nudge < 0:
            return
        with self._outbox.changed:
            self._outbox.changed.wait_for(lambda: self._error is not None or self._outbox.is_empty, _LINGER_S)
        self._thread.close()
        self._inbox.close()
        os.close(self._nudge)
        self._nudge = -1

    def _wait_for_room(self, timeout_s: float) -> None:
        """Wait for room in the outbox; the caller holds `changed`."""
        has_room = self._outbox.changed.wait_for(
            lambda: self._error is not None or self._outbox.has_room, timeout_s
        )
        if self._error is not None:
            raise _again(self._error)
        if not has_room:
            raise WaitTimeoutError(f"{self._name}: the other end accepted no message for {timeout_s:g} s.")

    def _use(self, stream: Stream) -> None:
        """Read ahead, and write what was left, until the other end has gone."""
        with self._outbox.changed:
            self._outbox.stream = stream
        incoming = _Incoming(self._name, self._inbox)
        into = memoryview(bytearray(_READ_BYTES))
        while True:
            with self._outbox.changed:
                events = self._outbox.flush()
            while not self._inbox.is_full:
                with self._outbox.changed:
                    count = stream.try_read(into)
                    wanted = stream.wanted
                if count is None:
                    events |= wanted
                    break
                if count == 0:
                    return
                incoming.add(into[:count])
            stream.await_events(events, self._nudge)

    def _end(self, error: PeerError) -> None:
        with self._outbox.changed:
            self._error = error
            self._outbox.changed.notify_all()
        self._inbox.end(error)


class _Outbox:
    """The bytes of sent messages that the kernel has not taken yet.

    Attributes:
        changed: lock of the outbox, and of the stream, which only one thread may use at a time.
        stream: the stream, once there is one.
    """

    def __init__(self, limit: int) -> None:
        self.changed = Condition()
        self.stream: Stream | None = None
        self._parts: deque[memoryview] = deque()
        self._limit = limit

    @property
    def has_room(self) -> bool:
        return len(self._parts) < self._limit

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def put(self, message: memoryview) -> bool:
        """Write what the kernel takes of a message, and keep the rest. Raises `OSError`.

        Returns:
            Whether nothing is left, of this message or of earlier ones.
        """
        self._parts.append(message)
        if self.stream is not None and len(self._parts) == 1:
            self.flush()
        return not self._parts

    def flush(self) -> int:
        """Write what the kernel takes now. Raises `OSError`.

        Returns:
            The events of poll(2) to wait for before the next call; 0 if nothing is left.
        """
        stream, parts = self.stream, self._parts
        assert stream is not None
        while parts:
            count = stream.try_write(parts[0])
            if count is None:
                return stream.wanted
            if count == len(parts[0]):
                parts.popleft()
                self.changed.notify_all()
            else:
                parts[0] = parts[0][count:]
        return 0


class _Inbox:
    """The messages that have come; a descriptor is readable while there is one, or at the stream's end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._messages: deque[bytes] = deque()
        self._error: PeerError | None = None
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._ready, select.POLLIN)

    def fileno(self) -> int:
        return self._ready

    @property
    def is_full(self) -> bool:
        return len(self._messages) >= self._limit

    @property
    def has_room_again(self) -> bool:
        """Whether the last `take` made room in a full inbox, so that the reading thread must be woken."""
        return len(self._messages) == self._limit - 1

    def put(self, message: bytes) -> None:
        with self._lock:
            self._messages.append(message)
            if len(self._messages) == 1:
                os.eventfd_write(self._ready, 1)

    def end(self, error: PeerError) -> None:
        """Record that nothing follows the messages that are here, and why."""
        with self._lock:
            self._error = error
            if not self._messages:
                os.eventfd_write(self._ready, 1)

    def take(self, timeout_s: float | None) -> bytes | None:
        """Return the next message, as `MessageChannel.recv` does."""
        if timeout_s != 0 and not self._messages and self._error is None:
            self._poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        with self._lock:
            if self._messages:
                message = self._messages.popleft()
                if not self._messages and self._error is None:
                    os.eventfd_read(self._ready)
                return message
            if self._error is not None:
                raise _again(self._error)
            return None

    def close(self) -> None:
        os.close(self._ready)


class _Incoming:
    """Cuts the incoming bytes into messages, and checks each.

    Args:
        name: name of the channel, for error messages.
    """

    def __init__(self, name: str, inbox: _Inbox) -> None:
        self._name, self._inbox = name, inbox
        self._pending = bytearray()

    def add(self, data: memoryview) -> None:
        """Take the next bytes; raise `ProtocolError` if they are not what a channel writes."""
        self._pending += data
        begin = 0
        with memoryview(self._pending) as pending:
            while len(pending) - begin >= _HEAD.size:
                length, again, checksum = _HEAD.unpack_from(pending, begin)
                if again != length ^ _MARK or length > MAX_MESSAGE_BYTES:
                    raise ProtocolError(
                        f"{self._name} received bytes that are not a message.", remedy=_REMEDY
                    )
                end = begin + _HEAD.size + length
                if len(pending) < end:
                    break
                message = bytes(pending[begin + _HEAD.size : end])
                if xxhash.xxh3_64_intdigest(message) != checksum:
                    raise ProtocolError(
                        f"a message of {self._name} was changed in transit: its checksum does not match.",
                        remedy=CHANGED_REMEDY,
                    )
                self._inbox.put(message)
                begin = end
        del self._pending[:begin]


def _again(error: PeerError) -> PeerError:
    """Return the same error, to be raised once more."""
    return type(error)(error.message, remedy=error.remedy, code=error.code)
