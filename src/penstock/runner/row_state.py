"""The seam for state that a row carries from token to token, where it is no KV cache.

Keys and values of a rejected draft are written over, and cost nothing. A recurrent layer, or a head that
drafts from hidden states, has one state a row, which has taken in the draft already. So it is told of each
step what may have to be taken back:

    step(row, 70..74)      commit(row, 1)           positions 70, 71 and 72 stay, 73 is taken back
    step(row, 73..77)      step(row, 77..81)        a window, and one that follows it on a guess
                           commit(row, 0)           the first stays whole
                           rewind(row, 78)          of the second one position stays; no more is told of it

What is kept to go back, a copy of the state or its inputs, is the affair of whoever has it. Called by
`runner.request_rows` on every stage, in the order of the steps. No family needs it yet.
"""

from __future__ import annotations

from collections.abc import Sequence


class RowState:
    """Nobody carries a state."""

    def begin(self, row: int) -> None:
        """A request enters a row; who had it before is gone."""

    def step(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], are_sampled: Sequence[bool]
    ) -> None:
        """Positions from `starts` to before `ends` of these rows are computed now.

        Args:
            are_sampled: a `commit` or a `rewind` will tell how many of them stay; the others stay.
        """

    def commit(self, row: int, num_rejected: int) -> None:
        """Of the oldest step of a row that was sampled and not told of, so many of the last positions are
        taken back, and the others stay. Steps behind it are void then: the same is told of them in turn, with
        all their positions, or the row is rewound."""

    def rewind(self, row: int, length: int) -> None:
        """Positions below `length` stay, and no other; nothing more is told of the steps so far."""

    def drop(self, row: int) -> None:
        """The request of a row has ended."""


NO_STATE = RowState()
