"""Writes records in a separate thread, so that a slow disk does not hold up the core.

    core ──calls──▶ queue (bounded) ──▶ redaction ──▶ compressed records ──▶ file

A full disk, a queue that fills up because the disk is too slow, or any other error ends the recording with
one line in the log. Requests do not notice it. The records that are in the file by then can be replayed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from typing import BinaryIO

from penstock.decisions.core_call import CoreCall
from penstock.decisions.log_file import RecordStream
from penstock.decisions.redaction import Redaction

MOST_WAITING = 20_000  # calls in the queue; a busy core makes some thousand a second
FLUSH_S = 0.25  # a record is in the file after so many seconds
CLOSE_S = 10.0  # for which `close` waits until the thread has written what is left

_logger = logging.getLogger(__name__)


class LogWriter:
    """Writes the records of calls to one file, until it is closed or an error stops it.

    Args:
        file: an open file that has its first line; the writer closes it at the end.
        path: path of the file, for messages.
        most_waiting: most calls that may wait in the queue.
    """

    def __init__(self, file: BinaryIO, path: Path, *, most_waiting: int = MOST_WAITING) -> None:
        self._file = file
        self._path = path
        self._most_waiting = most_waiting
        self._waiting: queue.SimpleQueue[CoreCall | None] = queue.SimpleQueue()
        self._redaction = Redaction()
        self._stream = RecordStream()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the writer has ended or was stopped, and so writes no further call."""
        return self._is_over.is_set()

    def put(self, call: CoreCall) -> None:
        """Queue a call, which must not change any more; the thread writes its record later."""
        if self.is_over:
            return
        if self._waiting.qsize() >= self._most_waiting:
            self._stop(f"{self._most_waiting} records of the core wait to be written")
            return
        self._waiting.put(call)

    def close(self) -> None:
        """Write what is left in the queue, and end the thread. May be called twice."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")
        finally:
            self._is_over.set()
            self._file.close()

    def _write_all(self) -> None:
        flush_at, has_more = 0.0, False
        while not self.is_over:
            try:
                call = self._waiting.get(timeout=FLUSH_S if has_more else None)
            except queue.Empty:
                self._write(self._stream.flush())
                has_more = False
                continue
            if call is None:
                self._write(self._stream.finish())
                return
            self._write(self._stream.add(self._redaction.record(call)))
            if not has_more:
                flush_at, has_more = time.monotonic() + FLUSH_S, True
            elif time.monotonic() >= flush_at:
                self._write(self._stream.flush())
                has_more = False

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _stop(self, why: str) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            _logger.error("recording of decisions in %s has stopped: %s.", self._path, why)
