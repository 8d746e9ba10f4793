"""The seam for state, other than a KV cache, that a row carries from token to token.

Keys and values of a rejected draft (a wrong guess) are written over, and cost nothing. A recurrent layer, or
a head that drafts from hidden states, has one state a row, which has taken in the draft already. So it is
told of each step what may have to be taken back:

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
    """The state besides the KV cache that layers carry for each row (request's slot); here there is none.

    A recurrent layer would have such state. The class is the interface, too: its methods do nothing.
    """

    def begin(self, row: int) -> None:
        """Do nothing; an implementation begins the state of a row that a new request gets.

        The state of the former request is void then.
        """

    def step(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], are_sampled: Sequence[bool]
    ) -> None:
        """Do nothing; an implementation notes the positions of rows that a step computes now.

        Args:
            rows, starts, ends: the rows, and the positions from start to before end of each.
            are_sampled: for each row, whether a `commit` or a `rewind` will say how many positions stay; else
                all stay.
        """

    def commit(self, row: int, num_rejected: int) -> None:
        """Do nothing; an implementation takes back the last `num_rejected` positions of a step of a row.

        That is the row's oldest sampled step that is not committed. Its other positions stay. If any is taken
        back, the steps behind it are void: they are committed in turn, with all their positions rejected, or
        the row is rewound.
        """

    def rewind(self, row: int, length: int) -> None:
        """Do nothing; an implementation keeps only a row's positions below `length`.

        The row's steps so far are not committed or rewound again.
        """

    def drop(self, row: int) -> None:
        """Do nothing; an implementation drops the state of a row whose request has left it."""


NO_STATE = RowState()
