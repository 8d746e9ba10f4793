"""The traces (timed work of the stages) that a client has asked its core for and not received.

Kept by `engine.client.async_engine`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from penstock.batch import StageSpans
from penstock.errors import ErrorInfo, error_from_info


class AskedTraces:
    """The futures of the traces that have not come yet, oldest first. The core sends traces in this order."""

    def __init__(self) -> None:
        self._answers: deque[asyncio.Future[list[StageSpans]]] = deque()

    def ask(self) -> asyncio.Future[list[StageSpans]]:
        """Return the future of one more trace; the caller then asks the core for the trace.

        The caller may cancel the future.
        """
        answer: asyncio.Future[list[StageSpans]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        return answer

    def answer(self, spans: list[StageSpans]) -> None:
        """Resolve the oldest future with these spans of work, unless it was cancelled meanwhile."""
        answer = self._answers.popleft() if self._answers else None
        if answer is not None and not answer.done():
            answer.set_result(spans)

    def fail_all(self, error: ErrorInfo) -> None:
        """Fail all open futures with this error, since the traces that they wait for will not come.

        A trace is the timed work of the stages. The next core can be asked as before.
        """
        answers, self._answers = self._answers, deque()
        for answer in answers:
            if not answer.done():
                answer.set_exception(error_from_info(error))
