"""The rows of the ranks' row tables, as the core gives them out.

A row is a request's index on every rank. When a row is freed, the next plan says so (`freed_rows`). That plan
may already give it to another request, under the next generation number. So tokens that are still in flight
for the former request are recognised as late.
"""

from __future__ import annotations


class RowPool:
    """The rows `0 .. num_rows - 1` (indices of requests on the ranks); the last one freed goes out first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self.generations = [-1] * num_rows  # of the request that has each row, or had it last; -1: none yet
        self._unannounced: list[int] = []  # freed since the last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self._free)

    def free_rows(self) -> list[int]:
        return list(self._free)

    def take(self) -> tuple[int, int]:
        """Return a free row and its next generation, which counts how often it was given out, from 0.

        The caller has checked that a row is free.
        """
        row = self._free.pop()
        self.generations[row] += 1
        return row, self.generations[row]

    def give_back(self, row: int) -> None:
        assert row not in self._free, f"row {row} is freed twice"
        self._free.append(row)
        self._unannounced.append(row)

    def announce_freed(self) -> list[int]:
        """Return the rows freed since the last call, for the plan being made to announce to the ranks."""
        freed, self._unannounced = self._unannounced, []
        return freed

    def check_invariants(self, rows_in_use: list[int]) -> None:
        every = sorted([*self._free, *rows_in_use])
        assert every == list(range(self.num_rows)), "a row is lost, or in use twice"
        assert set(self._unannounced) <= set(self._free), "a row in use is about to be announced as freed"
