"""Skips steps that a wrong guess has made useless, as soon as a later plan says so.

    plans that wait here    7: guessed window of row 3    8: guessed window of row 3    9: rewinds row 3
                               void                          void                          is computed next

The core rewinds a row in the first plan that it makes after it has seen the wrong guess. A stage that takes
each plan only when its turn comes would compute all windows (guessed steps of the row) before it. So it takes
what has come, looks for rewound rows, and lets the windows pass that these make void. It computes at most the
one that it is at.

A stage of several ranks does not look ahead: these compute together, and must not differ about what they
compute. Used by `pipeline.stage`. Knows no requests and no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.batch import GUESSED, CoreToRank, ScheduledBatch


class NoVoidSteps:
    """The base class of `VoidSteps`, and the implementation for a stage that computes every plan."""

    def next_message(self, receive: Callable[[], CoreToRank]) -> CoreToRank:
        """Return the core's next message; `receive` waits for it. Messages that came ahead go first."""
        return receive()

    def look_ahead(self, plan: ScheduledBatch, poll: Callable[[], CoreToRank | None]) -> None:
        """Find out whether a plan that has come behind `plan`, the next to be computed, makes its step void.

        Does nothing in this class.

        Args:
            poll: returns the next message that has come behind it; None when there is none.
        """

    def has(self, step_id: int) -> bool:
        """Return whether the last `look_ahead` has found this step void; always False in this class."""
        return False


class VoidSteps(NoVoidSteps):
    """Takes plans ahead of their time, to find rows rewound after a wrong guess, whose steps are void."""

    def __init__(self) -> None:
        self._waiting: deque[CoreToRank] = deque()
        self._void_step = -1

    def next_message(self, receive: Callable[[], CoreToRank]) -> CoreToRank:
        return self._waiting.popleft() if self._waiting else receive()

    def look_ahead(self, plan: ScheduledBatch, poll: Callable[[], CoreToRank | None]) -> None:
        while (message := poll()) is not None:
            self._waiting.append(message)
        if GUESSED not in plan.token_from:
            return
        rewound = (
            rewound
            for message in self._waiting
            if isinstance(message, ScheduledBatch)
            for rewound in message.rewound
        )
        # The newest token of a rewound row was sampled before: the row's request is the one of this plan.
        if any(one.row in plan.rows and one.step < plan.step_id for one in rewound):
            self._void_step = plan.step_id

    def has(self, step_id: int) -> bool:
        return step_id == self._void_step


NOTHING_VOID = NoVoidSteps()
