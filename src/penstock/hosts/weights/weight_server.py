"""Gives workers the tensors of the models that the head serves, each connection in a thread of its own.

The threads read files and send them. Reading, digesting and TLS run without the interpreter's lock, so that
the supervisor, in the same process, goes on. A worker that asks for something that does not exist gets an
error.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from penstock.errors import PeerError, PenstockError, ProtocolError, describe
from penstock.hosts.weights.served_models import ServedModel, ServedModels
from penstock.hosts.weights.tensor_digests import file_state, opened, read_pieces
from penstock.hosts.weights.weight_wire import (
    HEAD_BYTES,
    MAX_ASKED_BYTES,
    PIECE_BYTES,
    STALL_S,
    AskDigests,
    Asked,
    AskModel,
    AskParts,
    Refused,
    Sending,
    WeightWire,
)
from penstock.weights.checkpoint import TensorEntry

MAX_CONNECTIONS = 8  # the most connections of one host at a time
CLOSE_S = 5.0  # so long `close` waits for a thread that reads from a slow disk


class _Served(NamedTuple):
    """The host of a connection, and the thread that serves it."""

    host: str
    thread: threading.Thread


class WeightServer:
    """The head's server of the connections over which workers fetch weights.

    Args:
        models: the models that workers may ask for.
        stall_s: the longest wait for a worker.
    """

    def __init__(self, models: ServedModels, stall_s: float = STALL_S) -> None:
        self._models = models
        self._stall_s = stall_s
        self._served: dict[WeightWire, _Served] = {}
        self._is_closed = False
        self._mutex = threading.Lock()

    def serve(self, connection: socket.socket, host: str) -> None:
        """Serve a connection of a worker in a thread, until the worker closes it; return at once.

        A connection beyond `MAX_CONNECTIONS` of its host is closed.

        Raises:
            RuntimeError: no thread can be started; the connection stays the caller's.
        """
        wire = WeightWire(connection, self._stall_s)
        thread = threading.Thread(
            target=self._run, args=(wire, host), name=f"weights for {host}", daemon=True
        )
        with self._mutex:
            num_open = sum(served.host == host for served in self._served.values())
            if self._is_closed or num_open >= MAX_CONNECTIONS:
                wire.close()
                return
            self._served[wire] = _Served(host, thread)
            try:
                thread.start()
            except RuntimeError:  # no memory, or too many threads
                del self._served[wire]
                raise

    def hosts(self) -> set[str]:
        """Return the names of the hosts that have a connection."""
        with self._mutex:
            return {served.host for served in self._served.values()}

    def drop(self, host: str) -> None:
        """End all connections of the host of this name. Does not wait for their threads."""
        with self._mutex:
            for wire, served in self._served.items():
                if served.host == host:
                    wire.abort()

    def close(self) -> None:
        """End all connections, and wait some seconds at most for each of their threads; refuse new ones."""
        with self._mutex:
            self._is_closed = True
            all_served = dict(self._served)
        for wire in all_served:
            wire.abort()
        for served in all_served.values():
            served.thread.join(CLOSE_S)

    def _run(self, wire: WeightWire, host: str) -> None:
        try:
            with contextlib.suppress(PeerError):  # the worker has left, or the connection is broken
                _Conversation(wire, self._models).run()
        finally:
            self._models.digests.keep()
            wire.close()
            with self._mutex:
                del self._served[wire]


class _Conversation:
    """The conversation over one connection."""

    def __init__(self, wire: WeightWire, models: ServedModels) -> None:
        self._wire = wire
        self._models = models
        self._buffer = memoryview(bytearray(HEAD_BYTES + PIECE_BYTES))
        self._data = self._buffer[HEAD_BYTES:]

    def run(self) -> None:
        """Answer the worker's requests; raise `PeerError` at the end of the connection."""
        while True:
            asked: Asked = self._wire.receive(Asked, MAX_ASKED_BYTES)
            try:
                model = self._models.open(asked.model)
                if isinstance(asked, AskModel):
                    self._wire.send(model.description())
                    continue
                parts = list(_checked(model, asked))
            except PenstockError as error:
                self._wire.send(Refused(describe(error)))
                continue
            self._wire.send(Sending())
            self._send(asked, model, parts)

    def _send(self, asked: AskDigests | AskParts, model: ServedModel, entries: list[TensorEntry]) -> None:
        try:
            if isinstance(asked, AskDigests):
                for entry in entries:
                    self._send_small(self._models.digests.of(entry))
                    self._wire.flush()  # sent at once, since the next digest may need a slow read
                return
            for name in asked.files:
                self._send_file(model.small_file(name))
            for entry in entries:
                self._send_tensor(entry)
            self._wire.flush()
        except PeerError:
            raise
        except PenstockError as error:  # of a file that has changed, or a disk
            self._wire.send_refusal(error)
        self._models.digests.keep()

    def _send_tensor(self, entry: TensorEntry) -> None:
        digest = xxhash.xxh3_128()
        with opened(entry) as file:
            state = file_state(file)
            for size in read_pieces(entry, file, self._data):
                digest.update(self._data[:size])
                self._wire.send_piece(self._buffer, size)
            self._models.digests.note(entry, file, state, digest.digest())
        self._send_small(digest.digest())

    def _send_file(self, content: bytes) -> None:
        for begin in range(0, len(content), PIECE_BYTES):
            self._send_small(content[begin : begin + PIECE_BYTES])
        self._send_small(xxhash.xxh3_128_digest(content))

    def _send_small(self, content: bytes) -> None:
        self._data[: len(content)] = content
        self._wire.send_piece(self._buffer, len(content))


def _checked(model: ServedModel, asked: AskDigests | AskParts) -> Iterator[TensorEntry]:
    """Yield the requested tensors; raise an error if the model has no tensor or file of a name."""
    if len(asked.tensors) > model.num_tensors:
        raise ProtocolError(f"a worker requested more than the {model.num_tensors} tensors of the model.")
    if isinstance(asked, AskParts):
        if len(asked.files) > model.num_small_files:
            raise ProtocolError(
                f"a worker requested more than {model.num_small_files} files besides weights."
            )
        for name in asked.files:
            model.small_file(name)
    for name in asked.tensors:
        yield model.tensor(name)
