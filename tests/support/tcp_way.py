"""A port on this machine that leads to a server, and behaves as a bad network does."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_PIECE = 1 << 14
_NO_LINGER = struct.pack("ii", 1, 0)  # a close is then an RST


class Way:
    """A TCP proxy. Use as a context manager; leaving closes all connections.

    Args:
        to: the server's port.
        host: the server's address, and that of the way.

    Attributes:
        is_still: nothing more is passed on, in either direction.
        breaks_after: bytes of the server's answers, after which the connection is closed, once.
        drips: seconds between two bytes of an answer; 0 passes on whatever comes.
        num_connections: that have been made so far.
    """

    def __init__(self, to: int, host: str = "127.0.0.1") -> None:
        self._to = (host, to)
        self.is_still = False
        self.breaks_after: int | None = None
        self.drips = 0.0
        self.num_connections = 0
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._is_reset: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and accept none; a second call does nothing."""
        self._is_closed.set()
        with self._lock:
            for end in (self._listener, *self._ends):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def reset(self) -> None:
        """End all connections of now with an RST to both sides."""
        with self._lock:
            self._is_reset.update(self._ends)
            for end in self._ends:
                with suppress(OSError):  # it is closed already
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                    end.shutdown(socket.SHUT_RD)  # so that whoever reads from it closes it

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            try:
                far = socket.create_connection(self._to, 5)
            except OSError:  # the server is gone
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._ends += [near, far]
                if self._is_closed.is_set():
                    near.shutdown(socket.SHUT_RDWR)
                    far.shutdown(socket.SHUT_RDWR)
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass, args=(source, sink, is_answer))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE):
                if self.is_still:
                    continue
                if not is_answer:
                    sink.sendall(data)
                elif not self._answer(sink, data):
                    break
        with self._lock:  # not while some are woken still
            for end in (source, sink):
                with suppress(OSError):
                    if end in self._is_reset:
                        end.close()
                    else:
                        end.shutdown(socket.SHUT_RDWR)

    def _answer(self, sink: socket.socket, data: bytes) -> bool:
        """Pass on an answer, or a part of it; whether the connection lives on."""
        with self._lock:
            left = self.breaks_after
            if left is not None:
                self.breaks_after = left - len(data) if left >= len(data) else None
        if left is not None and left < len(data):
            sink.sendall(data[:left])
            return False
        if not self.drips:
            sink.sendall(data)
            return True
        for index in range(len(data)):
            if self._is_closed.wait(self.drips):
                return False
            sink.sendall(data[index : index + 1])
        return True
