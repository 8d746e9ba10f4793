"""What one front has asked the core for and not heard the end of: enough to ask the next core the same.

A pause outlives the core that was told of it: whatever core comes after begins with one. Kept by
`engine.async_engine`, as `engine.live_requests` is for requests.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from penstock.engine.ipc import Operate, Operated
from penstock.operations import Operation, OperationDone, Pause, Resume


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation under way; whoever waits for the answer may give up."""

    message: Operate
    answer: asyncio.Future[OperationDone]


class AskedOperations:
    """In the order in which they were asked."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, Asked] = {}
        self._is_paused = False

    def ask(self, operation: Operation) -> Asked:
        """It is to be sent to the core, if there is one."""
        number = next(self._numbers)
        answer: asyncio.Future[OperationDone] = asyncio.get_running_loop().create_future()
        self._open[number] = asked = Asked(Operate(number, operation), answer)
        return asked

    def note(self, is_paused: bool) -> None:
        """The core has said how it is; while it is asked to pause or resume, it may not know of it yet."""
        if not any(isinstance(asked.message.operation, Pause | Resume) for asked in self._open.values()):
            self._is_paused = is_paused

    def close(self, message: Operated) -> None:
        """The core has said that one is complete."""
        asked = self._open.pop(message.number, None)
        if asked is None:
            return
        if message.done.error is None and isinstance(asked.message.operation, Pause | Resume):
            self._is_paused = isinstance(asked.message.operation, Pause)
        if not asked.answer.done():
            asked.answer.set_result(message.done)

    def first(self) -> list[Operate]:
        """What a new core is to be asked before it hears of any request: to begin paused, if it was."""
        return [Operate(next(self._numbers), Pause("keep"))] if self._is_paused else []

    def again(self) -> list[Operate]:
        """And what when it has heard of all: whatever an operation says of them is true of it then."""
        return [asked.message for asked in self._open.values()]
