"""Connects streams between hosts, proves the identities of both ends, and runs each stream in a thread.

`StreamThread` opens a stream in a thread of its own and hands it to a carrier, so that opening a link never
blocks: the other end may still load its weights. Whatever goes wrong reaches the carrier as one typed
error. If an end is closed before the two have met, the other end cannot notice that. The host of the closed
end does, and ends the epoch. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import LinkClosedError, PeerError, PenstockError, WaitTimeoutError
from penstock.pipeline.links.stream import Interruption, Stream, stream_error
from penstock.pipeline.links.stream_security import Wait, proof_of, secured
from penstock.process.endpoints import AcceptedStream, ConnectedStream, DialledStream, StreamPath, opener_of
from penstock.trust.door import DEFAULT_LIMITS, Door

CONNECT_TIMEOUT_S = 10.0  # for all addresses of a name together
LIMITS = DEFAULT_LIMITS  # on what unknown peers may cost
_LEAVE_S = 5.0  # far longer than a stopped thread needs to end
_REACH_REMEDY = "Check that the link ports (--link-ports) of that host are open in its firewall."


class Opening(ABC):
    """The interface of the ways to connect one end of a stream: dialling, accepting, and taking over."""

    @abstractmethod
    def connect(self, interruption: Interruption, deadline: float, name: str) -> socket.socket:
        """Connect to the other end, prove both ends' identities, and return the socket.

        Args:
            interruption: ends the wait when the stream is over.
            deadline: by `time.monotonic`.
            name: name of the link or channel, for error messages.

        Raises:
            StreamEndedError: the interruption has ended the stream before it was connected.
            PeerError: the other end does not come, cannot be reached or is not the one expected.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing
        """Close the sockets that the opening still holds; this base class has none."""


class Dialling(Opening):
    """Connects a stream by dialling the other end's host and port."""

    def __init__(self, way: DialledStream, path: StreamPath) -> None:
        self._way = way
        self._proof = proof_of(path.security, "dialler")

    def connect(self, interruption: Interruption, deadline: float, name: str) -> socket.socket:
        """Dial each address of the host until one answers, and return the socket once it is safe.

        Implements `Opening.connect`.
        """
        connected = self._dial(interruption, name)
        return secured(connected, self._proof, _waiting(interruption, deadline))

    def _dial(self, interruption: Interruption, name: str) -> socket.socket:
        place = f"{self._way.host} port {self._way.port}"
        addresses = _resolve(self._way, interruption, name)
        until = time.monotonic() + CONNECT_TIMEOUT_S
        why = "it has no address"
        for number, (family, address) in enumerate(addresses):
            share = (until - time.monotonic()) / (len(addresses) - number)
            try:
                deadline = time.monotonic() + share
                return _connect(family, address, self._way.own_address, interruption, deadline)
            except TimeoutError:
                why = f"no answer within {share:.3g} s"
            except OSError as error:
                why = os.strerror(error.errno or 0).lower()
        raise LinkClosedError(f"{name}: {place} cannot be reached: {why}.", remedy=_REACH_REMEDY)


class Accepting(Opening):
    """Connects a stream by listening for the other end.

    Other peers are sent away, and cost no more than `LIMITS` says.
    """

    def __init__(self, way: AcceptedStream, path: StreamPath) -> None:
        proof = proof_of(path.security, "accepter")
        self._listener = socket.socket(fileno=os.dup(way.listen_fd))
        self._refused = ""  # the peer that was sent away last
        self._door = Door(self._listener, proof.wrap, proof.begin, self._note_refusal, LIMITS)

    def connect(self, interruption: Interruption, deadline: float, name: str) -> socket.socket:
        """Wait until the expected peer has dialled and proved its identity, and return the socket to it.

        Implements `Opening.connect`.
        """
        began = time.monotonic()
        while True:
            patience_s = self._door.patience_s()
            try:
                until = min(deadline, time.monotonic() + patience_s)
                interruption.wait(self._door.fileno(), select.POLLIN, until)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise self._late(name, time.monotonic() - began) from None
            entered = [visitor.connection for visitor in self._door.serve(0)]
            for connection in entered[1:]:  # the expected peer has dialled more than once
                connection.close()
            if entered:
                return entered[0]

    def close(self) -> None:
        """Stop listening, even if the host still has the listener: later dials are refused."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _note_refusal(self, address: str, error: PenstockError) -> None:
        self._refused = f" The last refused connection, from {address}: {error.message}"

    def _late(self, name: str, seconds: float) -> WaitTimeoutError:
        port = self._listener.getsockname()[1]
        return WaitTimeoutError(
            f"{name}: no connection came to port {port} within {seconds:.3g} s.{self._refused}",
            remedy=_REACH_REMEDY,
        )


class TakingOver(Opening):
    """Takes over a socket that this process's host has connected."""

    def __init__(self, way: ConnectedStream, path: StreamPath) -> None:
        self._proof = proof_of(path.security, way.side)
        self._connected = socket.socket(fileno=os.dup(way.stream_fd))
        self._connected.setblocking(False)

    def connect(self, interruption: Interruption, deadline: float, name: str) -> socket.socket:
        """Prove both ends' identities over the connected socket, and return it.

        Implements `Opening.connect`.
        """
        connected = socket.socket(fileno=self._connected.detach())
        return secured(connected, self._proof, _waiting(interruption, deadline))

    def close(self) -> None:
        """Shut the socket down if it did not become a stream, even if the host still holds the socket."""
        with contextlib.suppress(OSError):
            self._connected.shutdown(socket.SHUT_RDWR)
        self._connected.close()


_WAYS: Mapping[type, Callable[[Any, StreamPath], Opening]] = {
    DialledStream: Dialling,
    AcceptedStream: Accepting,
    ConnectedStream: TakingOver,
}


def _waiting(interruption: Interruption, deadline: float) -> Wait:
    return lambda fd, events: interruption.wait(fd, events, deadline)


def _connect(
    family: int, address: Any, own_address: str, interruption: Interruption, deadline: float
) -> socket.socket:
    dialled = socket.socket(family, socket.SOCK_STREAM)
    try:
        dialled.setblocking(False)
        if own_address:
            dialled.bind(_numeric(own_address))
        begun = dialled.connect_ex(address)
        if begun == errno.EINPROGRESS:
            interruption.wait(dialled.fileno(), select.POLLOUT, deadline)
            begun = dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if begun:
            raise OSError(begun, os.strerror(begun))
    except BaseException:
        dialled.close()
        raise
    return dialled


def _numeric(own_address: str) -> Any:
    """Return an address of this host as `bind` takes it; a scope such as `%eth0` becomes a number."""
    return socket.getaddrinfo(own_address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4]


def _resolve(way: DialledStream, interruption: Interruption, name: str) -> list[tuple[int, Any]]:
    """Return the address family and the socket address of each address of the host to be dialled.

    A look-up of a name cannot be stopped. It has a thread of its own, which ends with the look-up.
    """
    with contextlib.suppress(OSError, UnicodeError):  # raised if the host is given by name
        return _addresses(way, socket.AI_NUMERICHOST)
    answers: list[tuple[int, Any]] = []
    failures: list[str] = []
    done, finished = os.pipe()

    def look_up() -> None:
        try:
            answers.extend(_addresses(way))
        except (OSError, UnicodeError) as error:
            failures.append(str(error))
        finally:
            os.close(finished)

    threading.Thread(target=look_up, name=f"look-up {way.host}", daemon=True).start()
    try:
        interruption.wait(done, select.POLLIN, time.monotonic() + CONNECT_TIMEOUT_S)
    except TimeoutError:
        failures.append("no answer")
    finally:
        os.close(done)
    if failures:
        raise LinkClosedError(
            f"{name}: the address of {way.host} cannot be found: {failures[0]}.",
            remedy="Give the workers addresses, or names that every host can resolve.",
        )
    return answers


def _addresses(way: DialledStream, flags: int = 0) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(way.host, way.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


class StreamThread:
    """The thread that opens one end of a stream and reads or writes it, from its making until `close`.

    Args:
        path: how the stream is connected. Its descriptors stay the caller's, which may close them at once.
        name: name of the link or channel, for error messages.
        use: reads and writes the stream; returns when the other end has closed it, and raises other ends.
        end: called with the reason when the stream is over; that is the last thing that the thread does.

    Raises:
        ProtocolError: the credentials or names that make the stream safe cannot be used.
        OSError: this process has no descriptor left; none stays open.
    """

    def __init__(
        self,
        path: StreamPath,
        name: str,
        use: Callable[[Stream], None],
        end: Callable[[PeerError], None],
    ) -> None:
        self._name, self._use, self._tell_end = name, use, end
        self._timeout_s, self._precedence = path.open_timeout_s, path.precedence
        self._opening = opener_of(_WAYS, path.way, name)(path.way, path)
        try:
            self._interruption = Interruption(path.end_fd)
        except OSError:
            self._opening.close()
            raise
        self._stream: Stream | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            connected = self._opening.connect(
                self._interruption, time.monotonic() + self._timeout_s, self._name
            )
            self._opening.close()  # no second peer is expected
            self._stream = Stream(connected, self._interruption, self._precedence)
            self._use(self._stream)
            error: PeerError = LinkClosedError(f"{self._name} was closed by the other end.")
        except Exception as caught:
            error = stream_error(self._name, self._told_reason(caught))
        self._tell_end(error)

    def _told_reason(self, caught: Exception) -> Exception:
        """Return the reason that the other end gave in TLS for leaving, if any; else `caught`."""
        if self._stream is not None and isinstance(caught, OSError):
            try:
                self._stream.raise_alert()
            except ssl.SSLError as alert:
                return alert
        return caught

    def has_lost_peer(self) -> bool:
        """Return whether the stream is over, even if the thread has not noticed yet."""
        return self._interruption.is_over() if self._stream is None else self._stream.has_lost_peer()

    def close(self) -> None:
        """Stop the thread, wait for it, and close all descriptors. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._interruption.stop()
        self._thread.join(_LEAVE_S)
        assert not self._thread.is_alive(), f"the thread of {self._name} does not end"
        # Only when the thread has ended: if a descriptor were closed while it is used, its number could go to
        # another file.
        if self._stream is not None:
            self._stream.close()
        self._opening.close()
        self._interruption.close()
