"""The outputs of a host's processes: their host reads them line by line, or leaves them to the terminal.

`hosts.local` gives each process that it starts an output. On the head the process prints where the head does.
On a worker the output is a pipe, whose lines are printed there and sent to the head (`worker_log`).
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from typing import Protocol

from penstock.hosts.member import Member

MAX_LINE_BYTES = 4096  # a longer line is taken in pieces
_READ_BYTES = 1 << 14  # read from a pipe at once: a process that floods its pipe waits, and no other does


class ChildOutput:
    """The output of a process that this host starts: where the process prints, and its name.

    Attributes:
        fd: descriptor for its standard output and error; None: it prints where this process does.
        member: the process, once it is started; its name stands before its lines.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = fd
        self.member: Member | None = None

    @property
    def name(self) -> str:
        """The name of the process, another one once a spare process is used; "" while there is no process."""
        return "" if self.member is None else self.member.name


class Outputs(Protocol):
    """Decides where each process that a host starts prints; the interface of all outputs.

    The process prints where this one does (`InheritedOutputs`), or into a pipe that is read here
    (`PipedOutputs`).
    """

    def opened(self) -> contextlib.AbstractContextManager[ChildOutput]:
        """Return a context manager that gives the output for a process, which is to be started in the block.

        The process keeps its end of the output after the block.
        """
        ...


class InheritedOutputs:
    """The outputs of processes that print where this one does. Implements `Outputs`."""

    def opened(self) -> contextlib.AbstractContextManager[ChildOutput]:
        return contextlib.nullcontext(ChildOutput())


class _Pipe:
    """The reading end of an output, with an incomplete line."""

    def __init__(self, fd: int, output: ChildOutput) -> None:
        self.fd = fd
        self.output = output
        self._partial = b""

    def read(self) -> tuple[list[str], bool]:
        """Return the lines that have come, and whether more may follow."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return [], True
        *whole, self._partial = (self._partial + data).split(b"\n")
        if not data or len(self._partial) > MAX_LINE_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        return [line.decode("utf-8", "replace") for line in whole if line], bool(data)


class PipedOutputs:
    """The outputs of processes that print into pipes, which are read here. Implements `Outputs`.

    The descriptor of `fileno` is readable when a line has come.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pipes: dict[int, _Pipe] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    @contextlib.contextmanager
    def opened(self) -> Iterator[ChildOutput]:
        """Give a pipe as the output of the process that is started in the block; `take` returns its lines."""
        reader, writer = os.pipe()
        try:
            output = ChildOutput(writer)
            yield output
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        output.fd = None
        os.set_blocking(reader, False)
        self._pipes[reader] = _Pipe(reader, output)
        self._epoll.register(reader, select.EPOLLIN)

    def take(self) -> list[tuple[str, str]]:
        """Return the lines that have come since the last call, each behind the name of its process."""
        lines = []
        for fd, _ in self._epoll.poll(0):
            pipe = self._pipes[fd]
            name = pipe.output.name
            whole, may_go_on = pipe.read()
            lines += [(name, line) for line in whole]
            if not may_go_on:
                self._forget(pipe)
        return lines

    def close(self) -> None:
        """Stop reading, and close the pipes; processes that still print then get an error."""
        for pipe in list(self._pipes.values()):
            self._forget(pipe)
        self._epoll.close()

    def _forget(self, pipe: _Pipe) -> None:
        self._epoll.unregister(pipe.fd)
        os.close(self._pipes.pop(pipe.fd).fd)
