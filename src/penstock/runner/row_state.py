"""The interface of state, other than a KV cache, that a row carries from token to token.

Keys and values of a rejected draft (a wrong guess) are simply written over. A recurrent layer, or a head that
drafts from hidden states, has one state for each row, and the draft has changed it already. So an
implementation is called for each step with the positions that may have to be taken back (a..b: from a to
before b):

    step(row, 70..74)      commit(row, 1)           positions 70, 71 and 72 stay, 73 is taken back
    step(row, 73..77)      step(row, 77..81)        a window, and another that follows it on a guess
                           commit(row, 0)           the first window stays whole
                           rewind(row, 78)          one position of the second stays; no `commit` follows

Whether an implementation keeps copies of the state or its inputs, to go back, is its own affair. Called by
`runner.request_rows` on every stage, in the order of the steps. No family of models needs it yet.
"""

from __future__ import annotations

from collections.abc import Sequence


class RowState:
    """The state besides the KV cache that layers carry for each row: none, and the interface of such states.

    A recurrent layer would have such state.
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
            rows, starts, ends: the rows, each with its positions, from start to before end.
            are_sampled: for each row, whether a `commit` or a `rewind` follows that says how many positions
                stay. If not, all stay.
        """

    def commit(self, row: int, num_rejected: int) -> None:
        """Do nothing; an implementation takes back the last `num_rejected` positions of a step of a row.

        The step is the row's oldest sampled one that is not committed yet; its other positions stay. If a
        position is taken back, the row's later steps are void: each is committed in turn with all its
        positions rejected, or the row is rewound.
        """

    def rewind(self, row: int, length: int) -> None:
        """Do nothing; an implementation keeps only a row's positions below `length`.

        The row's steps so far are not committed or rewound again.
        """

    def drop(self, row: int) -> None:
        """Do nothing; an implementation drops the state of a row whose request has left it."""


NO_STATE = RowState()
