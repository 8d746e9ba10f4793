"""The seam for state, other than a KV cache, that a row carries from token to token.

Keys and values of a rejected draft are written over, and cost nothing. A recurrent layer, or a head that
drafts from hidden states, has one state a row, which has taken in the draft already. So it is told of each
step what may have to be taken back:

    step(row, 70..74)      commit(row, 1)           positions 70, 71 and 72 stay, 73 is taken back
    step(row, 73..77)      step(row, 77..81)        a window, and one that follows it on a guess
                           commit(row, 0)           the first stays whole
                           rewind(row, 78)          of the second one position stays; no more is told of it

What is kept to go back, a copy of the state or its inputs, is the affair of the implementation. Called by
`runner.request_rows` on every stage, in the order of the steps. No family needs it yet.
"""

from __future__ import annotations

from collections.abc import Sequence


class RowState:
    """The interface of such state, and the implementation where rows carry none."""

    def begin(self, row: int) -> None:
        """Begin the state of a row that a new request gets; the state of the one before is void."""

    def step(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], are_sampled: Sequence[bool]
    ) -> None:
        """Note that positions from `starts` to before `ends` of these rows are computed now.

        Args:
            are_sampled: whether a `commit` or a `rewind` will say how many positions stay; else all stay.
        """

    def commit(self, row: int, num_rejected: int) -> None:
        """Take back the last `num_rejected` positions of the oldest uncommitted sampled step of a row.

        The other positions of that step stay. If any is taken back, the steps behind it are void: they are
        committed in turn, with all their positions rejected, or the row is rewound.
        """

    def rewind(self, row: int, length: int) -> None:
        """Keep only the positions below `length`; the steps so far are not committed or rewound again."""

    def drop(self, row: int) -> None:
        """Drop the state of a row whose request has ended."""


NO_STATE = RowState()
