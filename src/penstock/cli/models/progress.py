"""Shows how a download goes: on a terminal by a line that is rewritten, elsewhere by lines for each file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from penstock.cli.models.sizes import size_text
from penstock.cli.terminal import one_line
from penstock.hub.repository import HubFile
from penstock.hub.transfer import Progress

_EVERY_S = 0.2
_NAME_WIDTH = 48
_WIDTH = 100


class LinesProgress:
    """Writes a line if a file continues from an earlier download, and a line when the file is complete."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._file = HubFile(path="", size=0, blob="")

    def begin(self, file: HubFile, num_bytes: int) -> None:
        self._file = file
        if num_bytes:
            came = f"{size_text(num_bytes)} of {size_text(file.size)}"
            _write(self._stream, f"{_name(file)} continues at {came}\n")

    def advance(self, num_bytes: int) -> None:
        pass

    def end(self) -> None:
        _write(self._stream, f"{_name(self._file)} is complete, {size_text(self._file.size)}\n")


class BarProgress:
    """Rewrites one line of a terminal: the file, how much of it is here, and how fast it comes.

    Args:
        now: returns seconds of a clock that only goes forward.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float]) -> None:
        self._stream = stream
        self._now = now
        self._file = HubFile(path="", size=0, blob="")
        self._begun_at = self._shown_at = 0.0
        self._here = self._came = 0

    def begin(self, file: HubFile, num_bytes: int) -> None:
        self._file, self._here, self._came = file, num_bytes, 0
        self._begun_at = self._now()
        self._show()

    def advance(self, num_bytes: int) -> None:
        self._here += num_bytes
        self._came += max(0, num_bytes)
        if self._now() - self._shown_at >= _EVERY_S:
            self._show()

    def end(self) -> None:
        self._show()
        _write(self._stream, "\n")

    def _show(self) -> None:
        self._shown_at = self._now()
        seconds = self._shown_at - self._begun_at
        rate = f", {size_text(int(self._came / seconds))}/s" if seconds > 0 else ""
        text = f"{_name(self._file)}  {size_text(self._here)} of {size_text(self._file.size)}{rate}"
        _write(self._stream, f"\r{text:<{_WIDTH}}"[: _WIDTH + 1])


def progress_on(stream: TextIO, now: Callable[[], float]) -> Progress:
    """Return the display for a stream: a line that is rewritten on a terminal, else lines."""
    return BarProgress(stream, now) if stream.isatty() else LinesProgress(stream)


def _write(stream: TextIO, text: str) -> None:
    """Write a piece of the display. What a full disk does not take is left out: the download goes on."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError:
        pass


def _name(file: HubFile) -> str:
    name = one_line(file.path)
    return name if len(name) <= _NAME_WIDTH else f"…{name[-_NAME_WIDTH + 1 :]}"
