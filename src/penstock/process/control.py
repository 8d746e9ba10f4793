"""Carries orders, with file descriptors, from the supervisor to the core and the ranks.

A message is JSON in one packet over a socket pair, or in several if it is too large or has too many
descriptors for one. The descriptors travel beside the packets; in the JSON stands the index of each in the
list of descriptors. When the socket ends, the supervisor is gone. Torch-free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from penstock.batch import LinkOrder
from penstock.errors import ErrorInfo, LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.process.child import read_config
from penstock.process.config import RankConfig, RankProcessConfig
from penstock.process.endpoints import CoreEndpoints, LinkEndpoint, MeetingEndpoint, RankEndpoints
from penstock.process.pipe_hosts import PipeHosts
from penstock.process.readiness import await_readable

_MAX_BYTES = 1 << 16  # of the text in one packet
_MAX_DESCRIPTORS = 250  # beside one packet; the kernel takes at most 253
_MORE = b"\n"  # before the text of each packet but the last of a message; JSON is written without line ends


EndedRequests = Literal["none", "started", "all"]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """An order to stop: the core lets its ranks go, and the process ends."""


class EpochLost(msgspec.Struct, frozen=True, tag="epoch_lost"):
    """The message that the epoch is over: the core gives up the steps in flight, and waits for the next one.

    Attributes:
        error: why the epoch is over.
        ends: which requests end with the error, because the next epoch may take long to begin: none, those
            that have started, or all.
    """

    error: ErrorInfo
    ends: EndedRequests = "none"


class BeginMeasuring(msgspec.Struct, frozen=True, tag="begin_measuring"):
    """An order to a measuring process to begin: all ranks that are measured have loaded.

    Attributes:
        meeting: where the ranks of the stage add up their parts of tensors, if the stage has several ranks.
    """

    meeting: MeetingEndpoint | None = None


class BecomeRank(msgspec.Struct, frozen=True, tag="become_rank"):
    """An order to a spare process to become the rank whose config can be read from `config_fd`."""

    config_fd: int

    def read(self) -> RankConfig:
        """Read and return the config; it can be read only once."""
        return read_config(self.config_fd, RankProcessConfig).rank


class UseModel(msgspec.Struct, frozen=True, kw_only=True, tag="use_model"):
    """An order to a rank that was started without a model, which its own host has now.

    Attributes:
        path: path of a directory that has the files which the rank reads.
        identity: identity of the whole model (`kvstore.names.model_identity`).
    """

    path: str
    identity: bytes


class AttachLink(msgspec.Struct, frozen=True, kw_only=True, tag="attach_link"):
    """An order to a rank within an epoch: its end of a new link, which it opens when a plan says so."""

    number: int
    endpoint: LinkEndpoint


class ExchangeLink(msgspec.Struct, frozen=True, tag="exchange_link"):
    """An order to the core to put a link order into a plan, since both ranks have been handed their ends.

    Attributes:
        order: the link order for the ranks; the core may move it to a later step than it names.
    """

    order: LinkOrder


ControlMessage = (
    Stop
    | EpochLost
    | BeginMeasuring
    | BecomeRank
    | UseModel
    | AttachLink
    | ExchangeLink
    | RankEndpoints
    | CoreEndpoints
    | PipeHosts
)


class ControlSocket:
    """The two ends of a control socket in the supervisor, which keeps one; the child inherits the other.

    The supervisor closes its copy of the child's end with `close_child_end`.
    """

    def __init__(self) -> None:
        self._own, self._child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def child_fd(self) -> int:
        return self._child.fileno()

    def send(self, message: ControlMessage) -> None:
        """Send a message; if the child is gone the message is dropped, and its end is noticed elsewhere."""
        descriptors: list[int] = []

        def place(fd: int) -> int:
            descriptors.append(fd)
            return len(descriptors) - 1

        text = msgspec.json.encode(_with_descriptors(msgspec.to_builtins(message), place))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for packet, beside in _packets(text, descriptors):
                socket.send_fds(self._own, [packet], beside)

    def close_child_end(self) -> None:
        self._child.close()

    def close(self) -> None:
        self._own.close()
        self._child.close()


CONTROL_OPTION = "--control-fd"  # option of a child that inherits a control socket


class ControlReader:
    """The child's end of a control socket.

    Args:
        fd: inherited descriptor of the socket; `close` closes it.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._kept: deque[ControlMessage] = deque()  # kept for `receive` by `await_model` and `await_link`

    @classmethod
    def inherited(cls, options: argparse.Namespace) -> ControlReader:
        """Return the reader of this process; the descriptor is an argument of its start: `CONTROL_OPTION`."""
        return cls(options.control_fd)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is a message, or the supervisor is gone."""
        return self._socket.fileno()

    def has_news(self) -> bool:
        """Return whether a message has come, or the supervisor is gone.

        An epoch that the child is about to join may then be over.
        """
        return bool(self._kept or await_readable([self._socket], 0.0))

    def await_model(self, rank: RankConfig) -> RankConfig | None:
        """Wait for the model of a rank that was started without one; other messages are kept for `receive`.

        Returns:
            The config with the model; None if the rank is told to stop.
        """
        if rank.model_path:
            return rank
        while not isinstance(message := self._receive(), UseModel):
            if isinstance(message, Stop):
                return None
            self._kept.append(message)
        return msgspec.structs.replace(rank, model_path=message.path, model_identity=message.identity)

    def await_link(self, number: int, timeout_s: float) -> AttachLink:
        """Wait for this rank's end of a link within an epoch. Ends of other links are kept for later calls.

        Raises:
            LinkClosedError: another order has come, so that the epoch is over.
            WaitTimeoutError: the end was not handed over in time.
        """
        for message in self._kept:
            if isinstance(message, AttachLink) and message.number == number:
                self._kept.remove(message)
                return message
        while all(isinstance(message, AttachLink) for message in self._kept):
            if not await_readable([self._socket], timeout_s):
                raise WaitTimeoutError(f"link {number} was not handed over within {timeout_s:g} s.")
            message = self._receive()
            if isinstance(message, AttachLink) and message.number == number:
                return message
            self._kept.append(message)
        raise LinkClosedError(f"the epoch ended before link {number} was handed over.")

    def receive(self) -> ControlMessage:
        """Wait for the next message and return it; if the supervisor is gone, return `Stop`.

        The descriptors of the message belong to the caller. Ends of links that no plan has named are closed:
        their epoch is over.

        Raises:
            ProtocolError: the message is not one that this build knows.
            PeerError: this process has no room for the descriptors of the message.
        """
        while True:
            message = self._kept.popleft() if self._kept else self._receive()
            if not isinstance(message, AttachLink):
                return message
            close_descriptors(message)

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> ControlMessage:
        text, descriptors, has_all = b"", list[int](), True
        packet = _MORE
        while packet.startswith(_MORE):
            packet, beside, flags, _ = socket.recv_fds(
                self._socket, len(_MORE) + _MAX_BYTES, _MAX_DESCRIPTORS
            )
            text += packet.removeprefix(_MORE)
            descriptors += beside
            has_all = has_all and not flags & socket.MSG_CTRUNC  # the kernel drops those that are too many
        if not packet or not has_all:
            for fd in descriptors:
                os.close(fd)
        if not packet:
            return Stop()
        if not has_all:
            raise PeerError(
                "the supervisor handed over connections, and this process has too many open files for them.",
                remedy="Raise the limit with `ulimit -n 8192`.",
            )
        for fd in descriptors:
            os.set_inheritable(fd, False)
        fields = _with_descriptors(msgspec.json.decode(text), descriptors.__getitem__)
        try:
            message: ControlMessage = msgspec.convert(fields, ControlMessage)
        except msgspec.ValidationError as error:  # such as an endpoint of an unknown kind
            raise ProtocolError(
                f"the supervisor's message cannot be read: {error}.",
                remedy="Run the same Penstock version in all processes and on all hosts.",
            ) from error
        return message


def _packets(text: bytes, descriptors: list[int]) -> Iterator[tuple[bytes, list[int]]]:
    """Cut a message into packets; yield the bytes of each, and the descriptors that travel beside it."""
    number = max(_num_parts(len(text), _MAX_BYTES), _num_parts(len(descriptors), _MAX_DESCRIPTORS))
    size = _num_parts(len(text), number)  # all alike: an empty packet would be the end of the socket
    for part in range(number):
        beside = descriptors[part * _MAX_DESCRIPTORS : (part + 1) * _MAX_DESCRIPTORS]
        yield _MORE * (part < number - 1) + text[part * size : (part + 1) * size], beside


def _num_parts(length: int, most: int) -> int:
    """Return into how many parts of at most this length something is cut."""
    return -(-length // most)


def descriptors_of(message: ControlMessage) -> list[int]:
    """Return all descriptors that a message carries."""
    descriptors: list[int] = []

    def note(fd: int) -> int:
        descriptors.append(fd)
        return fd

    _with_descriptors(msgspec.to_builtins(message), note)
    return descriptors


def close_descriptors(message: ControlMessage) -> None:
    """Close all descriptors that came with a message; the links and channels opened from them stay open."""
    for fd in descriptors_of(message):
        os.close(fd)


def _with_descriptors(value: Any, renumber: Callable[[int], int]) -> Any:
    """Return a copy of nested fields in which `renumber` has replaced all fields `..._fd` and `..._fds`."""
    if isinstance(value, list):
        return [_with_descriptors(entry, renumber) for entry in value]
    if not isinstance(value, dict):
        return value
    changed: dict[str, Any] = {}
    for name, entry in value.items():
        if name.endswith("_fd"):
            changed[name] = renumber(entry)
        elif name.endswith("_fds"):
            changed[name] = [renumber(fd) for fd in entry]
        else:
            changed[name] = _with_descriptors(entry, renumber)
    return changed
