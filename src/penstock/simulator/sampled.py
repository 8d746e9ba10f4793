"""The samples of the last stage of a simulated pipe: always the same token.

A drafter that knows this token decides whether its guess is right (`simulator.accepted_drafts`).

The rules are those of the real last stage. A window yields its right guesses up to the first wrong one, and
one sampled token behind them. Windows that rest on a wrong guess are void until their row is rewound.
"""

from __future__ import annotations

from penstock.batch import GUESSED, ScheduledBatch

TOKEN, WRONG_TOKEN = 0, 1


class SampledRows:
    """The rows of the last stage, and which of them wait to be rewound."""

    def __init__(self) -> None:
        self._strayed: set[int] = set()  # rows with a wrong guess: windows that rest on it are void

    def sample(self, plan: ScheduledBatch) -> tuple[list[list[int]], list[int]]:
        """Return the ids of each sampled row of a plan, and how many of its drafts were rejected."""
        if not plan.drafts and not self._strayed:
            count = plan.need_sampled.count(True)
            return [[TOKEN]] * count, [0] * count
        self._strayed.difference_update([rewound.row for rewound in plan.rewound])
        self._strayed.difference_update([new.row for new in plan.new_rows])
        ids, rejected = [], []
        for index, is_sampled in enumerate(plan.need_sampled):
            if is_sampled:
                own = self._window(plan, index)
                ids.append(own)
                size = plan.num_tokens[index] if index in plan.drafts else 1
                rejected.append(size - len(own))
        return ids, rejected

    def _window(self, plan: ScheduledBatch, index: int) -> list[int]:
        row, drafts = plan.rows[index], plan.drafts.get(index, [])
        if plan.token_from[index] == GUESSED:
            if row in self._strayed or drafts[0] != TOKEN:
                self._strayed.add(row)
                return []
            drafts = drafts[1:]
        num_right = next((place for place, token in enumerate(drafts) if token != TOKEN), len(drafts))
        (self._strayed.discard if num_right == len(drafts) else self._strayed.add)(row)
        return [TOKEN] * (num_right + 1)
