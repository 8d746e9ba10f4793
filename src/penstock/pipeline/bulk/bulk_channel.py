"""A bulk channel carries named payloads of bytes from one rank to another, and lets hidden states go first.

    BulkSender ──chunks, each when it has its turn──▶ ring or stream ──▶ BulkReceiver ──whole payloads──▶

A chunk is a part of a payload here. A bulk channel has a ring of its own, or a stream of its own. It does not
share the stream of a link: TCP keeps the order of bytes, so that a frame would wait for all chunks that the
kernel has taken before it, which may be megabytes. On a stream of their own, chunks wait here one at a time
while a link has frames to send (`pipeline.bulk.turns`), and the kernel is told to let other streams go first
(`StreamPath.precedence`).

The calls of both ends block, and must come from another thread than the one that computes. A payload arrives
whole and checked, or not at all. If the connection breaks, both ends raise `LinkClosedError`, which names the
payload that was under way. That payload is to be sent again over another channel; all payloads before it have
arrived. A channel takes the memory of a few chunks, over a ring as over TLS, and at the receiver that of one
payload more. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import xxhash

from penstock.errors import LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.pipeline.bulk.chunk import Bytes, Chunk, chunks_of
from penstock.pipeline.bulk.turns import Turns
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.links.frame import CHANGED_REMEDY
from penstock.pipeline.links.ring_channel import RingChannel
from penstock.pipeline.links.stream_channel import StreamChannel
from penstock.process.endpoints import ChannelEndpoint, RingHandle, StreamChannelHandle, opener_of

_AGAIN_REMEDY = "Send the payload again over another channel; the payloads before it have arrived."


class ChunkChannel(MessageChannel, Protocol):
    """A channel of messages whose sender can wait for room before it decides what to send."""

    def await_room(self, timeout_s: float) -> None:
        """Wait until a message could be sent at once; raise as `send` does."""
        ...


_OPENERS: Mapping[type, Callable[..., ChunkChannel]] = {
    RingHandle: RingChannel,
    StreamChannelHandle: StreamChannel,
}


def open_bulk(endpoint: ChannelEndpoint, name: str) -> ChunkChannel:
    """Return this process's end of a bulk channel, for a `BulkSender` or `BulkReceiver`.

    Args:
        endpoint: of a `BulkNeed`, as the host has handed it over. Its descriptors stay the caller's.
        name: for error messages, such as "bulk, stage 0 -> stage 1".

    Raises:
        ProtocolError: this build has no carrier for endpoints of this kind.
    """
    return opener_of(_OPENERS, endpoint, f"bulk channel {name}")(endpoint, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A payload that has arrived, whole and checked, with the name that its sender gave it."""

    name: str
    data: memoryview


class BulkSender:
    """The sending end of a bulk channel: cuts payloads into chunks, and sends each when links are idle.

    Args:
        channel: from `open_bulk`; belongs to the sender from now on.
        turns: decide when a chunk may go.
        timeout_s: deadline of a chunk's wait for room, and of its wait for its turn.
    """

    def __init__(self, channel: ChunkChannel, turns: Turns, *, timeout_s: float) -> None:
        self._channel, self._turns, self._timeout_s = channel, turns, timeout_s

    def send_payload(self, name: str, payload: Bytes) -> None:
        """Send a payload, waiting for room and turns, and return when its last chunk is on its way.

        Args:
            name: what the receiver knows it by, at most `chunk.MAX_NAME_BYTES` in UTF-8.
            payload: is not to change meanwhile.

        Raises:
            LinkClosedError: the receiver has gone, or this end was closed.
            WaitTimeoutError: the receiver takes nothing; or hidden states or the rate have kept a chunk back
                for too long. The next payload may be sent all the same: the receiver then forgets the chunks
                of this one.
        """
        for chunk in chunks_of(name, payload):
            try:
                self._channel.await_room(self._timeout_s)
                self._turns.await_turn(len(chunk.data), self._timeout_s)
                self._channel.send(chunk.pack(), self._timeout_s)
            except PeerError as error:
                raise _within(error, chunk.name, chunk.offset, chunk.payload_bytes) from error

    def close(self) -> None:
        """Tell the receiver that nothing follows; what was sent is still delivered."""
        self._channel.close()


class BulkReceiver:
    """Receives payloads over a bulk channel: joins their chunks, and checks order, length and checksum.

    A payload is named bytes that may be large, and that let hidden states go first.

    Args:
        channel: from `open_bulk`; belongs to the receiver from now on.
        name: name of the channel, for error messages.
        max_payload_bytes: a longer payload is refused (`ProtocolError`) before memory is taken for it.
    """

    def __init__(self, channel: MessageChannel, name: str, *, max_payload_bytes: int) -> None:
        self._channel, self._name = channel, f"bulk channel {name}"
        self._max_payload_bytes = max_payload_bytes
        self._arriving: _Arriving | None = None

    def receive_payload(self, timeout_s: float | None) -> Payload | None:
        """Return the next payload, or None when none was whole in time; the next call goes on with its parts.

        Args:
            timeout_s: 0 takes only what is there; None waits without end.

        Raises:
            LinkClosedError: the sender has gone; the message says within which payload.
            ProtocolError: a payload is longer than allowed, or a chunk is changed, or not the next one.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            message = self._receive(left_s)
            if message is None:
                return None
            payload = self._take(Chunk.unpack(message))
            if payload is not None:
                return payload

    def close(self) -> None:
        """Close the channel, which tells the sender."""
        self._channel.close()

    def _receive(self, timeout_s: float | None) -> bytes | None:
        try:
            return self._channel.recv(timeout_s)
        except LinkClosedError as error:
            arriving = self._arriving
            if arriving is None:
                raise
            raise _within(error, arriving.name, arriving.num_bytes, arriving.payload_bytes) from error

    def _take(self, chunk: Chunk) -> Payload | None:
        """Add a chunk to the payload under way, and return the payload once it is whole."""
        if chunk.offset == 0:  # a new payload: if the one before is not whole, the sender has given it up
            if chunk.payload_bytes > self._max_payload_bytes:
                raise ProtocolError(
                    f"{self._name} announced payload {chunk.name!r} of {chunk.payload_bytes} bytes, but the "
                    f"limit is {self._max_payload_bytes}."
                )
            self._arriving = _Arriving(chunk.name, chunk.payload_bytes)
        if self._arriving is None:
            raise ProtocolError(f"{self._name} delivered the middle of payload {chunk.name!r} first.")
        self._arriving.add(chunk, self._name)
        if not self._arriving.is_whole:
            return None
        payload, self._arriving = self._arriving.payload(), None
        return payload


class _Arriving:
    """A payload whose chunks are coming."""

    def __init__(self, name: str, payload_bytes: int) -> None:
        self.name, self.payload_bytes = name, payload_bytes
        self.num_bytes = 0  # that have come
        self._data = bytearray(payload_bytes)
        self._checksum = xxhash.xxh3_64()

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self.payload_bytes

    def add(self, chunk: Chunk, channel: str) -> None:
        """Check a chunk and take its data; raises `ProtocolError`."""
        expected, received = (
            (self.name, self.payload_bytes, self.num_bytes),
            (chunk.name, chunk.payload_bytes, chunk.offset),
        )
        if received != expected or chunk.end > self.payload_bytes:
            raise ProtocolError(
                f"{channel} delivered a chunk that is not the next one: (payload, bytes, offset) expected "
                f"{expected}, found {received}."
            )
        self._checksum.update(chunk.data)
        if self._checksum.intdigest() != chunk.checksum:
            raise ProtocolError(
                f"payload {self.name!r} of {channel} was changed in transit: the checksum at byte "
                f"{chunk.end} does not match.",
                remedy=CHANGED_REMEDY,
            )
        self._data[chunk.offset : chunk.end] = chunk.data
        self.num_bytes = chunk.end

    def payload(self) -> Payload:
        """Return the payload that has arrived."""
        return Payload(name=self.name, data=memoryview(self._data).toreadonly())


def _within(error: PeerError, name: str, num_bytes: int, payload_bytes: int) -> PeerError:
    """Return the same error, with the payload that was under way."""
    where = f"It stopped within payload {name!r}, after {num_bytes} of {payload_bytes} bytes."
    remedy = error.remedy if isinstance(error, WaitTimeoutError) else _AGAIN_REMEDY
    return type(error)(f"{error.message} {where}", remedy=remedy, code=error.code)
