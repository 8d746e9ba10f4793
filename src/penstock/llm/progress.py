"""The progress of many prompts on standard error: a bar on a terminal, else a line for each tenth."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO


class ProgressDisplay:
    """A display that shows nothing; its subclasses show something. Any thread may advance it."""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def advance(self) -> None:
        """Note that one more prompt is done."""


class ProgressLines(ProgressDisplay):
    """A display that prints a line whenever another tenth of the prompts is done."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream, self._num_done = total, stream, 0

    def advance(self) -> None:
        tenths = 10 * self._num_done // self._total
        self._num_done += 1
        if 10 * self._num_done // self._total > tenths:
            print(f"{self._num_done} of {self._total} prompts", file=self._stream, flush=True)


class ProgressBar(ProgressDisplay):
    """A display that draws a bar, which stays when it is full."""

    def __init__(self, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(console=Console(file=stream))
        self._task = self._bar.add_task("prompts", total=total)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)


def progress_of(total: int, wanted: bool | None) -> ProgressDisplay:
    """Return the display of so many prompts.

    Args:
        wanted: whether progress is shown; None: only on a terminal, and of several prompts.
    """
    stream = sys.stderr
    on_terminal = stream is not None and stream.isatty()
    if not total or wanted is False or (wanted is None and (total == 1 or not on_terminal)):
        return ProgressDisplay()
    return ProgressBar(total, stream) if on_terminal else ProgressLines(total, stream)
