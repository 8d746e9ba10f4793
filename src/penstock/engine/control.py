"""From the supervisor to the core, over a pipe: leave in order, or the pipeline is lost and why.

Messages are JSON lines. The end of the pipe means that the supervisor is gone.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from penstock.errors import ErrorInfo


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let the ranks go and leave."""


class PipelineLost(msgspec.Struct, frozen=True, tag="lost"):
    """Tell the clients, and leave."""

    error: ErrorInfo


ControlMessage = Stop | PipelineLost

_decoder: msgspec.json.Decoder[ControlMessage] = msgspec.json.Decoder(ControlMessage)


class ControlPipe:
    """The supervisor's end, and for a while the core's, which the core inherits."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def stop(self) -> None:
        self._write(Stop())

    def tell_loss(self, error: ErrorInfo) -> None:
        self._write(PipelineLost(error))

    def close_read_end(self) -> None:
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def close(self) -> None:
        self.close_read_end()
        os.close(self._write_fd)

    def _write(self, message: ControlMessage) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_fd, msgspec.json.encode(message) + b"\n")


def read_control(fd: int) -> ControlMessage:
    """The next message of a pipe that is readable; `Stop` at its end."""
    line = os.read(fd, 65536).partition(b"\n")[0]
    return _decoder.decode(line) if line else Stop()
