"""Skips steps that a wrong guess has made useless, as soon as a later plan says so.

    plans that wait here    7: guessed window of row 3    8: guessed window of row 3    9: rewinds row 3
                               void                          void                          is computed next

The core rewinds a row in the first plan that it makes after it has seen the wrong guess. Windows (guessed
steps) of the row may wait before that plan. A stage that takes each plan only when its turn comes would
compute all of them. So a stage takes all plans that have arrived, looks for rewound rows in them, and skips
the windows that are void. It may still compute the window that it is at when the rewinding plan arrives.

A stage of several ranks does not look ahead: its ranks compute together, and plans may arrive at them at
different times, so that they would not skip the same steps. Used by `pipeline.stage`. The module knows no
requests and no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.batch import GUESSED, CoreToRank, ScheduledBatch


class NoVoidSteps:
    """The base class of `VoidSteps`, and the implementation for a stage that computes every plan."""

    def next_message(self, receive: Callable[[], CoreToRank]) -> CoreToRank:
        """Return the core's next message; messages that `look_ahead` has taken come first.

        Args:
            receive: waits for a message and returns it.
        """
        return receive()

    def look_ahead(self, plan: ScheduledBatch, poll: Callable[[], CoreToRank | None]) -> None:
        """Find out whether the step of `plan` is void because a plan that waits behind it rewinds its row.

        In this class the method does nothing.

        Args:
            plan: the plan that is computed next.
            poll: returns the next message that has arrived behind it; None when there is none.
        """

    def has(self, step_id: int) -> bool:
        """Return whether the last `look_ahead` has found this step void; always False in this class."""
        return False


class VoidSteps(NoVoidSteps):
    """Takes plans ahead of their turn, to find rewound rows: steps that were guessed for them are void."""

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
        # If the rewound row's newest token was sampled before this step, the same request still has the row.
        # Else the row may have been freed and given to another request behind this plan.
        if any(one.row in plan.rows and one.step < plan.step_id for one in rewound):
            self._void_step = plan.step_id

    def has(self, step_id: int) -> bool:
        return step_id == self._void_step


NOTHING_VOID = NoVoidSteps()
