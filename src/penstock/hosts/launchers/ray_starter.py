"""Lets Ray start the workers of an engine, with the help of a driver process (`ray_driver`).

    head ── PlaceWorkers ──▶ driver ──▶ Ray ──▶ actors ──▶ penstock worker ──▶ joins the head
         ◀── lines of text ──

No plan, token or tensor passes through Ray, nor does the join token: nodes find it in the file
`--join-token-file`, if they share files, or in their environment. When the driver ends, because a part of Ray
has ended, the engine goes on with the hosts that it has, and warns the user.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from penstock.errors import PenstockError, UnavailableError
from penstock.hosts.bell import LastingSource
from penstock.hosts.launchers.engine_hosts import Voices
from penstock.hosts.launchers.ray_messages import DriverReport, LostWorker, PlaceWorkers, Said, Warned
from penstock.hosts.launchers.starter import WantedWorkers
from penstock.process import entry_points
from penstock.process.readiness import Waitable
from penstock.told_text import shown_line

CLOSE_S = 15.0  # so long the driver has to give back what Ray has reserved
_MAX_LINE = 64 << 10
_READ_BYTES = 1 << 16

RAY_IS_GONE = (
    "Ray or its process on this node is lost; the engine keeps running, but lost hosts are not replaced"
)


class RayStarter:
    """A starter that lets Ray start the workers. Implements `WorkerStarter`.

    Args:
        order_for: returns the order to the driver for the workers that are wanted.
        voices: functions that show lines and warnings to the user.
        command: command line of the driver.
    """

    def __init__(
        self,
        order_for: Callable[[WantedWorkers], PlaceWorkers],
        voices: Voices,
        command: Sequence[str] = (sys.executable, "-P", "-m", entry_points.RAY_DRIVER),
    ) -> None:
        self._order_for = order_for
        self._voices = voices
        self._command = command
        self._driver: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._line = LastingSource()
        self._lost: list[str] = []
        self.failure: PenstockError | None = None

    @property
    def sources(self) -> Sequence[Waitable]:
        return [self._line]

    def start(self, wanted: WantedWorkers) -> None:
        self._voices.tell(f"Ray starts {wanted.counted}")
        self._driver = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's interrupt is for the supervisor, which ends in order
        )
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._line.use(self._driver.stdout)
        with contextlib.suppress(OSError):  # a driver that has ended is noticed by `attend`
            self._driver.stdin.write(msgspec.json.encode(self._order_for(wanted)) + b"\n")
            self._driver.stdin.flush()

    def attend(self) -> None:
        while self._driver is not None and (data := self._read()) is not None:
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(line)
            if not data or len(self._unread) > _MAX_LINE:
                self._lose_driver()

    def take_lost(self) -> Sequence[str]:
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        if self._driver is not None and self._driver.stdin is not None:
            with contextlib.suppress(OSError):
                self._driver.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(CLOSE_S)
            self._forget_driver()
        self._line.close()

    def _read(self) -> bytes | None:
        """Return what the driver has written; empty: it has ended; None: it is silent."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        poller = select.poll()  # not select, which knows the first 1,024 descriptors only
        poller.register(self._driver.stdout, select.POLLIN)
        if not poller.poll(0):
            return None
        with contextlib.suppress(OSError):
            return os.read(self._driver.stdout.fileno(), _READ_BYTES)
        return b""

    def _take(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=DriverReport)
        except msgspec.MsgspecError:
            return  # not a report: a library has printed something
        text = shown_line(report.text)
        if isinstance(report, Said | LostWorker):
            self._voices.tell(text)
            self._lost += [report.host] if isinstance(report, LostWorker) else []
        elif isinstance(report, Warned):
            self._voices.warn(text)
        else:
            self._fail(UnavailableError(text, remedy=report.remedy))

    def _fail(self, error: PenstockError) -> None:
        """Record that no worker will come any more; an engine that runs already goes on."""
        if self.failure is None:
            self.failure = error
            self._voices.warn(error.message)

    def _lose_driver(self) -> None:
        self._forget_driver()
        if self.failure is None:
            self.failure = UnavailableError(
                "the process that connects to Ray has ended.", remedy="See its output above."
            )
            self._voices.warn(RAY_IS_GONE)

    def _forget_driver(self) -> None:
        driver, self._driver = self._driver, None
        assert driver is not None
        self._line.leave()
        driver.kill()
        driver.wait()
        for stream in (driver.stdin, driver.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
