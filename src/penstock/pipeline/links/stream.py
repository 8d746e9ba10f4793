"""A connected stream between two processes, which one thread uses and any thread can stop.

`Interruption` says that a stream is over at this end, because its owner has closed it or its host has ended
the epoch. `Stream` waits for the other end and for an interruption together, so that no call outlives
either. `pipeline.links.stream_opening` connects streams; the carriers `stream_link` and `stream_channel`
read and write them. No torch here.

A stream is a TCP socket, plain or wrapped by `ssl`. Two threads must not use an SSL object at the same time;
both carriers see to that.

- `TCP_NODELAY` is set: a frame is written in one piece, and must not wait for the acknowledgement of the
  one before.
- Keepalive ends a stream whose path has been dead for some seconds. The heartbeat between hosts may not
  notice that, since it may cross by another cable. The kernels ask and answer each other, so that a stopped
  or busy process ends nothing. A kernel does not ask while it has unsent bytes; the kernel at the reading
  end of a one-way stream never has any, and always asks. A dialling end asks before the ends have met, too:
  it may wait for an hour until the other one has loaded.
- `TCP_USER_TIMEOUT` is unset while a stream lives: it would end links to a reader that has stopped reading.
- When a stream is closed, `TCP_USER_TIMEOUT` bounds how long the kernel goes on sending what was left to a
  host that is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import time
from collections.abc import Mapping, Sequence

from penstock.errors import LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.process.endpoints import Precedence
from penstock.trust.tls import refusal_of_certificate

_KEEPALIVE = {  # a dead path is noticed after 2 + 3 x 1 s; a silent host is given up sooner, after 3 s
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
}
_BAND_OF_BULK = 2  # TC_PRIO_BULK of <linux/pkt_sched.h>: the last band of the kernel's default queue
LOW_UNSENT_BYTES = 1 << 14  # of a stream of low precedence that the kernel takes before it can send them
_OF_PRECEDENCE: Mapping[Precedence, Mapping[tuple[int, int], int]] = {
    "normal": {},
    "low": {
        (socket.SOL_SOCKET, socket.SO_PRIORITY): _BAND_OF_BULK,
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT): LOW_UNSENT_BYTES,
    },
}
FAREWELL_MS = 10_000  # the kernel's time for what was written before the close
_MOST_LEFTOVERS = 64  # pieces of 64 KiB that a closing end reads and forgets
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_TLS_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # the end of a TLS stream: unannounced, announced
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
KeptPolls = dict[int, select.poll]  # by events
_WIRE_REMEDY = "Run the same Penstock version on all hosts, and let nothing else connect to the link ports."


class StreamEndedError(LinkClosedError):
    """The stream is over at this end: its owner has closed it, or its host has ended the epoch."""

    def __init__(self) -> None:
        super().__init__("the stream was closed at this end.")


class Interruption:
    """A signal that a stream is over at this end; it wakes every thread that waits for the stream in `wait`.

    Args:
        end_fd: an eventfd by which the host ends all streams of an epoch (`StreamPath`). It is duplicated,
            and never read.
    """

    def __init__(self, end_fd: int) -> None:
        self._end = os.dup(end_fd)
        try:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(self._end)
            raise

    def watch(self, poll: select.poll) -> None:
        """Register with `poll`, so that it returns once the stream is over."""
        poll.register(self._end, select.POLLIN)
        poll.register(self._stop, select.POLLIN)

    def is_over(self) -> bool:
        poll = select.poll()
        self.watch(poll)
        return bool(poll.poll(0))

    def poll_with(self, fd: int, events: int) -> select.poll:
        """Return a poll that returns once `fd` has one of `events` (of poll(2)), or the stream is over."""
        poll = select.poll()
        poll.register(fd, events)
        self.watch(poll)
        return poll

    def stop(self) -> None:
        """End the stream at this end: wake all threads that wait for it."""
        os.eventfd_write(self._stop, 1)

    def wait(self, fd: int, events: int, deadline: float | None = None) -> None:
        """Wait until `fd` has one of the events of poll(2), or an error.

        Args:
            deadline: by `time.monotonic`; None: without end.

        Raises:
            StreamEndedError: the stream is over.
            TimeoutError: the deadline has passed.
        """
        left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        ready = self.poll_with(fd, events).poll(left_ms)
        if not ready:
            raise TimeoutError
        raise_if_interrupted(ready, fd)

    def close(self) -> None:
        """Close the descriptors; no thread may be waiting in `wait` any more."""
        os.close(self._end)
        os.close(self._stop)


def raise_if_interrupted(ready: Sequence[tuple[int, int]], *others: int) -> None:
    """Raise `StreamEndedError` if a poll has found the interruption's descriptors ready.

    Args:
        ready: descriptors and events that poll(2) has returned.
        others: all descriptors of the poll that are not the interruption's.
    """
    if any(fd not in others for fd, _ in ready):
        raise StreamEndedError


def watch_path(connected: socket.socket) -> None:
    """Let the kernel end a connection whose path has been dead for some seconds."""
    if connected.family in _IP_FAMILIES:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


class Stream:
    """A connected stream of bytes; its calls belong to one thread, but for `close` and `has_lost_peer`.

    Args:
        connected: socket, plain or wrapped by `ssl` after its handshake. Belongs to the stream from now on.
        interruption: ends waits.
        precedence: as in `StreamPath`.
    """

    def __init__(
        self, connected: socket.socket, interruption: Interruption, precedence: Precedence = "normal"
    ) -> None:
        connected.setblocking(False)
        if connected.family in _IP_FAMILIES:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_path(connected)
            for (level, option), value in _OF_PRECEDENCE[precedence].items():
                connected.setsockopt(level, option, value)
        self._socket = connected
        self._interruption = interruption
        self._polls: KeptPolls = {}
        self.wanted = 0  # the events of poll(2) to wait for after a `try_read` or `try_write` returned None

    def fileno(self) -> int:
        return self._socket.fileno()

    def try_read(self, into: memoryview) -> int | None:
        """Read what is there into `into`; return the number of bytes, or None if none has come yet.

        0 is the end of the stream, whether TLS announced it or not: the reader knows by the lengths of frames
        whether one was cut off.
        """
        try:
            return self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError):
            self.wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            self.wanted = select.POLLOUT
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLError:
            raise
        except OSError:  # a reset: what has not been read is lost
            return 0
        return None

    def try_write(self, data: memoryview) -> int | None:
        """Write what fits now; return the number of bytes, or None if none does. Raises `OSError`."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.wanted = select.POLLOUT
        except ssl.SSLWantReadError:
            self.wanted = select.POLLIN
        return None

    def read(self, into: memoryview) -> bool:
        """Wait until `into` is filled; return False if the stream ends before. Raises `StreamEndedError`."""
        done = 0
        while done < len(into):
            count = self.try_read(into[done:])
            if count == 0:
                return False
            if count is None:
                self._await(self.wanted)
            else:
                done += count
        return True

    def write(self, data: memoryview) -> None:
        """Write all of `data`, however long the other end takes to read it.

        The other end must be one that only reads: if it stops writing, it counts as gone. What the kernel
        takes at once is written even after the stream has been stopped, so that frames sent before a close
        leave.

        Raises:
            StreamEndedError: the stream is over, and the kernel did not take the rest at once.
            OSError: the other end has gone.
        """
        done = 0
        while done < len(data):
            count = self.try_write(data[done:])
            if count is not None:
                done += count
                continue
            self._await(self.wanted | select.POLLRDHUP)
            if self.has_lost_peer():
                raise BrokenPipeError

    def await_events(self, events: int, nudge: int) -> None:
        """Wait until the socket has one of `events` (of poll(2)), or a thread writes the eventfd `nudge`.

        With `events` 0 only the nudge is waited for. Raises `StreamEndedError`.
        """
        poll = select.poll()
        if events:  # with none, poll(2) would still return at once for a peer that has gone, again and again
            poll.register(self.fileno(), events)
        poll.register(nudge, select.POLLIN)
        self._interruption.watch(poll)
        ready = poll.poll()
        if any(fd == nudge for fd, _ in ready):
            os.eventfd_read(nudge)
        raise_if_interrupted(ready, self.fileno(), nudge)

    def _await(self, events: int) -> None:
        """Wait for events of poll(2). A frame may take many waits, so the poll objects are used again."""
        poll = self._polls.get(events)
        if poll is None:
            poll = self._polls[events] = self._interruption.poll_with(self.fileno(), events)
        raise_if_interrupted(poll.poll(), self.fileno())

    def has_lost_peer(self) -> bool:
        """Return whether the stream is over or closed by either end. Any thread may ask."""
        descriptor = self.fileno()
        return descriptor < 0 or bool(self._interruption.poll_with(descriptor, _GONE).poll(0))

    def raise_alert(self) -> None:
        """Raise `ssl.SSLError` if the other end has said in TLS why it refuses this one."""
        with contextlib.suppress(
            BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError
        ):
            self.try_read(memoryview(bytearray(1)))

    def close(self) -> None:
        """Close the socket. The kernel goes on sending what was written, for `FAREWELL_MS` at most."""
        plain, rest = socket.socket, bytearray(1 << 16)
        with contextlib.suppress(OSError):
            plain.shutdown(self._socket, socket.SHUT_WR)
            if self._socket.family in _IP_FAMILIES:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, FAREWELL_MS)
            # A close with unread bytes would reset the connection, and the other end would lose what was
            # written last.
            for _ in range(_MOST_LEFTOVERS):
                if not plain.recv_into(self._socket, rest):
                    break
        self._socket.close()


def stream_error(name: str, error: Exception) -> PeerError:
    """Return an exception that a stream raised as a `PeerError` whose message begins with `name`.

    Args:
        name: name of the link or channel.
    """
    if isinstance(error, StreamEndedError):
        return LinkClosedError(f"{name} has ended.")
    if isinstance(error, ssl.SSLError):
        error = refusal_of_certificate(error) or error
    if isinstance(error, PeerError):
        is_named = error.message.startswith(name)
        told = f"{name}: {error.message}"
        return error if is_named else type(error)(told, remedy=error.remedy, code=error.code)
    if isinstance(error, ssl.SSLError) and not isinstance(error, _TLS_ENDS):
        why = (error.reason or str(error)).replace("_", " ").lower()
        return ProtocolError(f"{name}: TLS reports {why}.", remedy=_WIRE_REMEDY)
    if isinstance(error, TimeoutError):
        return WaitTimeoutError(f"{name}: the other end did not connect in time.")
    return LinkClosedError(f"{name} was closed by the other end.")
