"""Fetches tensors from the head: asks for them by name, and continues over a new connection when one breaks.

Tensors that have come whole are not sent again; the one that was under way when the connection broke is. If
the connection breaks `MAX_TEARS` times without a whole tensor between, the client gives up. Used by
`hosts.weights.model_finder`, in threads of the worker.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import xxhash

from penstock.errors import LinkClosedError, PeerError, WaitTimeoutError
from penstock.hosts.weights.weight_wire import (
    MOST_NAMES,
    NAMES_BYTES,
    PIECE_BYTES,
    AskDigests,
    AskModel,
    AskParts,
    Description,
    Sending,
    WeightWire,
)
from penstock.trust.cancellation import Cancellation
from penstock.trust.join_messages import NOT_JOINED

MAX_TEARS = 4
_NAME_HEAD_BYTES = 5  # the most bytes before the characters of a string in msgpack
FIRST_PAUSE_S = 0.25  # before the first new connection; later pauses are longer

Connect = Callable[[Cancellation], socket.socket]  # returns an authenticated connection to the head
Result = TypeVar("Result")


class Part(NamedTuple):
    """A tensor, or a small file, that is to be fetched from the head."""

    name: str
    num_bytes: int
    is_file: bool = False


class Sink(Protocol):
    """The interface of an object that keeps the parts (tensors or small files) that are fetched."""

    def begin(self, number: int) -> None:
        """Begin the part with this number, for the first time or again; all its bytes follow."""
        ...

    def write(self, memory: memoryview) -> None:
        """Take the next bytes of the part; the memory is used again afterwards."""
        ...

    def end(self, digest: bytes) -> None:
        """End the part: all its bytes have come. Their digest has been checked against the head's."""
        ...


class WeightClient:
    """A client of the head's weight server, which connects when it must, and again when a connection breaks.

    One thread at a time may use it.

    Args:
        connect: opens a connection, unless the job is cancelled meanwhile.
        cancellation: ends the job for which the client fetches.
    """

    def __init__(self, connect: Connect, cancellation: Cancellation) -> None:
        self._connect = connect
        self._cancellation = cancellation
        self._wires: list[WeightWire] = []  # none, or one
        self._num_tears = 0

    def describe(self, model: bytes) -> Description:
        """Ask the head what the model of an identity is made of, and return it; raise `PenstockError`."""
        return self._tried(lambda wire: wire.ask(AskModel(model=model), Description))

    def digests(self, model: bytes, tensors: Sequence[str]) -> list[bytes]:
        """Ask the head for the digests of a model's tensors; return them in order; raise `PenstockError`."""

        def receive(wire: WeightWire) -> list[bytes]:
            digests: list[bytes] = []
            while left := tensors[len(digests) :]:
                names = left[: _num_at_once(left)]
                wire.ask(AskDigests(model=model, tensors=list(names)), Sending)
                digests += [wire.receive_digest() for _ in names]
            return digests

        return self._tried(receive) if tensors else []

    def fetch(self, model: bytes, parts: Sequence[Part], sink: Sink) -> None:
        """Fetch small files and tensors into a sink, in the order of `parts`, which has the files first.

        Args:
            model: identity of the model.

        Raises:
            PeerError: the connection breaks again and again.
            PenstockError: the head refuses, or the sink raises an error.
        """
        num_done = 0

        def receive(wire: WeightWire) -> None:
            nonlocal num_done
            while left := parts[num_done:]:
                now = left[: _num_at_once([part.name for part in left])]
                files, tensors = ([one.name for one in now if one.is_file is kind] for kind in (True, False))
                wire.ask(AskParts(model=model, files=files, tensors=tensors), Sending)
                for part in now:
                    sink.begin(num_done)
                    sink.end(self._receive_part(wire, part, sink))
                    num_done += 1
                    self._num_tears = 0

        if parts:
            self._tried(receive)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        for wire in self._wires:
            wire.close()
        self._wires.clear()

    def _receive_part(self, wire: WeightWire, part: Part, sink: Sink) -> bytes:
        """Receive the bytes of a part, and the digest, which must fit the bytes; return the digest."""
        digest = xxhash.xxh3_128()
        memory = memoryview(bytearray(min(PIECE_BYTES, part.num_bytes)))
        left = part.num_bytes
        while left:
            size = wire.receive_piece(memory[:left])
            digest.update(memory[:size])
            sink.write(memory[:size])
            left -= size
            self._cancellation.check()
        sent = wire.receive_digest()
        if digest.digest() != sent:
            raise LinkClosedError(f"{part.name} was changed on its way from the head.")
        return sent

    def _tried(self, action: Callable[[WeightWire], Result]) -> Result:
        """Carry out an action over the connection; if the connection breaks, again over a new one."""
        self._num_tears = 0
        while True:
            self._cancellation.check()
            try:
                return action(self._wire())
            except PeerError as error:
                self.close()
                if not _is_torn(error):
                    raise
                self._num_tears += 1
                if self._num_tears >= MAX_TEARS:
                    raise _given_up(error) from error
                self._cancellation.pause(FIRST_PAUSE_S * 2 ** (self._num_tears - 1))
            except BaseException:
                self.close()  # bytes that are still under way on it would confuse the next request
                raise

    def _wire(self) -> WeightWire:
        if not self._wires:
            connection = self._connect(self._cancellation)
            self._wires.append(WeightWire(connection))
            self._cancellation.add(connection)
        return self._wires[0]


def _num_at_once(names: Sequence[str]) -> int:
    """Return how many of these names go into one request; at least one."""
    num_bytes = accumulate(len(name.encode()) + _NAME_HEAD_BYTES for name in names[:MOST_NAMES])
    return max(1, sum(size <= NAMES_BYTES for size in num_bytes))


def _is_torn(error: PeerError) -> bool:
    """Return whether a new connection may help.

    With `NOT_JOINED` it may: the agent's connection to the head is broken too, and may soon be back.
    """
    return isinstance(error, LinkClosedError | WaitTimeoutError) or error.code == NOT_JOINED


def _given_up(error: PeerError) -> PeerError:
    """Return the error for a connection that breaks again and again, of the type of the last error."""
    return type(error)(
        f"the weights could not be fetched from the head in {MAX_TEARS} attempts: {error.message}",
        remedy="Check the network between this host and the head. The received part is kept for the next "
        "start.",
    )
