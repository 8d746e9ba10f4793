"""The messages between a worker that fetches weights and the head, and their framing.

A worker asks for a model by its identity and for tensors by their names. Many names are split into several
requests, so that each stays small. No message has a path.

    worker                                       head
    AskModel(identity)                   ──▶     Description: names and shapes of all tensors, small files
    AskDigests(identity, names)          ──▶     Sending(), then 16 bytes for each tensor
    AskParts(identity, files, tensors)   ──▶     Sending(), then for each its bytes and 16 bytes of digest

A message is its length in four bytes, and then msgpack. Bytes go in pieces of at most `PIECE_BYTES`, each
behind its length. The length `REFUSED` means that a `Refused` follows in place of the rest. Both ends block,
each in a thread of its own.
"""

from __future__ import annotations

import socket
import struct
from typing import Annotated, Any, TypeVar

import msgspec

from penstock.config.hosts import SAME_VERSION
from penstock.errors import (
    ErrorInfo,
    LinkClosedError,
    PeerError,
    PenstockError,
    ProtocolError,
    WaitTimeoutError,
    error_from_info,
)
from penstock.trust.tls import refusal

PIECE_BYTES = 1 << 20
DIGEST_BYTES = 16  # of XXH3-128, as in `weights.read_digests`
MAX_ASKED_BYTES = 4 << 20
MOST_NAMES = 4096  # the most names in one request
NAMES_BYTES = 1 << 20  # about the most bytes of the names in one request
MAX_TOLD_BYTES = 64 << 20
STALL_S = 60.0  # enough for a piece over the slowest network
REFUSED = 0xFFFFFFFF
SMALL_BYTES = 64 << 10  # smaller pieces are sent together with what comes next

_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size

Message = TypeVar("Message")
Names = Annotated[list[str], msgspec.Meta(max_length=MOST_NAMES)]


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """The name, type and shape of a tensor of a checkpoint; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SmallFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that ranks read beside the weights, by its name, its size and the digest of its content."""

    name: str
    num_bytes: int
    digest: bytes


class AskModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """A worker's question about what the model of this identity is made of."""

    model: bytes


class AskDigests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """A worker's request for the digests of these tensors of a model, in this order."""

    model: bytes
    tensors: Names


class AskParts(msgspec.Struct, frozen=True, kw_only=True, tag="parts"):
    """A worker's request for these small files of a model, and then these tensors, in this order."""

    model: bytes
    files: Names = []
    tensors: Names = []


class Description(msgspec.Struct, frozen=True, kw_only=True, tag="description"):
    """The head's answer to `AskModel`: the small files and the tensors that a model is made of."""

    files: list[SmallFile]
    tensors: list[TensorShape]


class Sending(msgspec.Struct, frozen=True, tag="sending"):
    """The head's message that the digests or parts that were asked for follow."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The head's message that what was asked for does not follow, and why."""

    error: ErrorInfo


Asked = AskModel | AskDigests | AskParts
Told = Description | Sending | Refused


class WeightWire:
    """One end of a connection between a worker and the head, over which weights are fetched.

    Args:
        connection: an authenticated connection, which the wire closes.
        stall_s: the longest wait for the other side, in seconds.

    All calls raise `PeerError` if the connection is lost, or the other side sends something unexpected. Those
    that receive also raise the error that the other side has sent in place of an answer.
    """

    def __init__(self, connection: socket.socket, stall_s: float = STALL_S) -> None:
        self._connection = connection
        connection.settimeout(stall_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(HEAD_BYTES)
        self._unsent = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, after the small pieces that were kept back before it."""
        encoded = msgspec.msgpack.encode(message)
        self._unsent += _LENGTH.pack(len(encoded)) + encoded
        self.flush()

    def receive(self, kind: Any, max_bytes: int) -> Any:
        """Wait for a message, and return it.

        Args:
            kind: type that the message must have.
            max_bytes: a longer message is refused.

        Raises:
            LinkClosedError: the other side has closed the connection.
            ProtocolError: the message is too long or of another type.
        """
        size = self._receive_length()
        if size > max_bytes:
            raise _other_version(f"a message of {size} bytes, more than {max_bytes}")
        content = bytearray(size)
        self._fill(memoryview(content))
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _other_version(f"a message that cannot be read: {error}") from error

    def ask(self, message: msgspec.Struct, kind: type[Message]) -> Message:
        """Send a request, and return the answer of this kind; raise the error if the other side refuses."""
        self.send(message)
        answer = self.receive(Told, MAX_TOLD_BYTES)
        if isinstance(answer, Refused):
            raise error_from_info(answer.error)
        if not isinstance(answer, kind):
            raise _other_version(f"a {type(answer).__name__} instead of a {kind.__name__}")
        return answer

    def send_piece(self, buffer: memoryview, size: int) -> None:
        """Send a piece of `size` bytes; a small one is kept back until more follows, or `flush` is called.

        Args:
            buffer: has the piece behind `HEAD_BYTES` free bytes, which are used for its length.
        """
        _LENGTH.pack_into(buffer, 0, size)
        if size < SMALL_BYTES:
            self._unsent += buffer[: HEAD_BYTES + size]
            if len(self._unsent) < SMALL_BYTES:
                return
            size = 0
        self.flush()
        if size:
            self._send(buffer[: HEAD_BYTES + size])

    def flush(self) -> None:
        """Send the small pieces that have been kept back."""
        if self._unsent:
            self._send(self._unsent)
            self._unsent.clear()

    def send_refusal(self, error: PenstockError) -> None:
        """Send an error in place of the next piece, which says why no more pieces follow."""
        self._unsent += _LENGTH.pack(REFUSED)
        self.send(Refused(error.info()))

    def receive_piece(self, memory: memoryview) -> int:
        """Wait for the next piece, put it into the beginning of `memory`, and return its size in bytes.

        Raises:
            PenstockError: the error that the other side has sent in place of the piece.
        """
        size = self._receive_length()
        if size == REFUSED:
            raise error_from_info(self.receive(Refused, MAX_TOLD_BYTES).error)
        if not 0 < size <= len(memory):
            raise _other_version(f"a piece of {size} bytes, more than {len(memory)}")
        self._fill(memory[:size])
        return size

    def receive_digest(self) -> bytes:
        """Wait for a digest, which is a piece of its own, and return it; raise as `receive_piece` does."""
        digest = bytearray(DIGEST_BYTES)
        size = self.receive_piece(memoryview(digest))
        if size != DIGEST_BYTES:
            raise _other_version(f"a digest of {size} bytes")
        return bytes(digest)

    def abort(self) -> None:
        """End the connection from another thread, so that whatever waits at it returns with an error."""
        try:
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # not TLS's own, which blocks
        except OSError:
            return  # it is broken already

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._connection.close()

    def _receive_length(self) -> int:
        self._fill(memoryview(self._head))
        return int(_LENGTH.unpack(self._head)[0])

    def _send(self, data: bytearray | memoryview) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise _lost(error) from error

    def _fill(self, memory: memoryview) -> None:
        filled = 0
        try:
            while filled < len(memory):
                count = self._connection.recv_into(memory[filled:])
                if not count:
                    raise LinkClosedError("the other side closed a connection for weights.")
                filled += count
        except OSError as error:
            raise _lost(error) from error


def _lost(error: OSError) -> PeerError:
    if isinstance(error, PeerError):
        return error
    if isinstance(error, TimeoutError):
        return WaitTimeoutError("the other side of a connection for weights stopped sending.")
    return LinkClosedError(f"the transfer of weights has stopped: {refusal(error).message}")


def _other_version(what: str) -> ProtocolError:
    return ProtocolError(
        f"the other side of a connection for weights sent {what}.",
        remedy=SAME_VERSION,
    )
