"""Starts child processes on this machine, reads their status pipes, and ends them.

A child is `python -m penstock...` with its config on an inherited pipe and a status pipe to which it writes
JSON lines; later orders reach it over a control socket. A pidfd shows when it has ended, so that nothing
depends on the reports of a dying process. Children are in process groups of their own: Ctrl-C at a terminal
reaches only the supervisor, which then ends them in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from penstock.hosts.member import Member
from penstock.process.child import StatusEvent, decode_status
from penstock.process.control import ControlMessage
from penstock.process.readiness import Waitable, await_readable


class Control(Protocol):
    """The parent's end of the socket over which a running child gets orders (`process.control`)."""

    def send(self, message: ControlMessage) -> None: ...

    def close(self) -> None: ...


class NoControl:
    """The control of a child that gets no orders after its start; to send it one is a bug."""

    def send(self, message: ControlMessage) -> None:
        raise AssertionError(f"no process takes {message}")

    def close(self) -> None:
        """Do nothing."""


class Descriptor(NamedTuple):
    """A file descriptor as an object with `fileno`, so that a selector can wait for it."""

    number: int

    def fileno(self) -> int:
        return self.number


class Process(Protocol):
    """The part of `subprocess.Popen` that `LocalMember` needs of its process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class TakenProcess:
    """A process that this one has not started, such as the spare process of an earlier worker.

    Implements `Process`. The exit code of such a process cannot be read: once ended, it counts as killed.

    Attributes:
        pid: number of the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = os.pidfd_open(pid)
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        return self._exit_code if self._exit_code is not None else self._look(0.0)

    def wait(self) -> int:
        while (exit_code := self.poll()) is None:
            await_readable([self._end])
        return exit_code

    def _look(self, seconds: float) -> int | None:
        if await_readable([self._end], seconds):
            os.close(self._end)
            self._exit_code = -signal.SIGKILL
        return self._exit_code


class LocalMember(Member):
    """A process on this machine that the supervisor or an agent has started. Mostly made by `spawn`.

    Args:
        process: the process itself.
        status_fd: reading end of the pipe to which the process writes its status; closed with the member.
        control: sends orders to the process; closed with the member.
    """

    def __init__(
        self,
        process: Process,
        status_fd: int,
        control: Control,
        *,
        name: str,
        stage: int | None,
        member_index: int,
    ) -> None:
        super().__init__(name, stage, member_index)
        self._process = process
        self._end = Descriptor(os.pidfd_open(process.pid))
        self._status = Descriptor(status_fd)
        self._control = control
        self._sources: tuple[Waitable, ...] = (self._end, self._status)
        self._partial = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def identity(self) -> str:
        return f"pid {self.pid}"

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def sources(self) -> Collection[Waitable]:
        return self._sources

    def hand(self, message: ControlMessage) -> None:
        self._control.send(message)

    def show_threads(self) -> None:
        self.send_signal(signal.SIGUSR1)

    def ask_to_leave(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill_now(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end.number, number)

    def await_end(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        self._process.wait()
        self._control.close()
        for source in (self._end, self._status):
            os.close(source.number)

    def _receive(self) -> list[StatusEvent]:
        lines = (self._partial + self._read_pipe()).split(b"\n")
        self._partial = lines.pop()
        return [decode_status(line) for line in lines if line]

    def _read_pipe(self) -> bytes:
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._status.number, 65536):
                chunks.append(chunk)
            self._sources = (self._end,)  # the status pipe has reached its end, and is readable for ever
        return b"".join(chunks)


def spawn(
    module: str,
    config: bytes,
    *,
    name: str,
    stage: int | None = None,
    member_index: int = 0,
    inherit: Sequence[int] = (),
    arguments: Sequence[str] = (),
    control: Control | None = None,
    output_fd: int | None = None,
) -> LocalMember:
    """Start `python -m module` as a child of the calling thread, and return it as a member.

    That thread must outlive the child, since most children die with the thread that has started them. The
    child reports its status over a pipe that the member reads.

    Args:
        config: bytes that the child reads from its config pipe, to the end.
        name, stage, member_index: as for `Member`.
        inherit: further descriptors that the child inherits, under the same numbers.
        arguments: further arguments of its command line, beside `--config-fd` and `--status-fd`.
        control: sends later orders to the child, and is closed with the member; None: there are no orders.
        output_fd: descriptor for its standard output and error; None: those of this process.
    """
    with ExitStack() as theirs, ExitStack() as ours:  # if descriptors run out, those made so far are closed
        config_read, config_write = pipe(theirs, ours)
        status_read, status_write = pipe(ours, theirs)
        os.set_blocking(status_read, False)
        command = [sys.executable, "-P", "-m", module, "--config-fd", str(config_read)]
        command += ["--status-fd", str(status_write), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=[config_read, status_write, *inherit],
            process_group=0,
        )
        try:
            child = LocalMember(
                process,
                status_read,
                control or NoControl(),
                name=name,
                stage=stage,
                member_index=member_index,
            )
        except BaseException:
            process.kill()
            process.wait()
            raise
        ours.pop_all()
    # Written only now that the child reads, since a config may be longer than a pipe holds. Only the child
    # has the reading end, so that its death breaks the pipe and does not block this write.
    with os.fdopen(config_write, "wb") as writer, contextlib.suppress(BrokenPipeError):
        writer.write(config)
    return child


def pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    """Create a pipe; return its reading and its writing descriptor, each to be closed by its stack."""
    reader, writer = os.pipe()
    reading.callback(os.close, reader)
    writing.callback(os.close, writer)
    return reader, writer
