"""What one front has asked the core for and not heard the end of: enough to ask the next core the same.

A pause outlives the core that was told of it: whatever core comes after begins with one. Kept by
`engine.async_engine`, as `engine.live_requests` is for requests.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from penstock.engine.ipc import Operate, Operated
from penstock.operations import Operation, OperationDone, Pause


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
        """The core has said how it is; while an operation is open, it may not know of it yet."""
        if not self._open:
            self._is_paused = is_paused

    def close(self, message: Operated) -> None:
        """The core has said that one is complete."""
        asked = self._open.pop(message.number, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(message.done)

    def again(self) -> list[Operate]:
        """What a new core is to be asked, in this order."""
        before = list(self._open.values())
        first = [self.ask(Pause("keep"))] if self._is_paused else []
        return [asked.message for asked in [*first, *before]]
