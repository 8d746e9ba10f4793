"""The pooling of a prompt's hidden states, after the final norm, to one vector: on the last stage, by chunks.

A small state object of `runner.model_runner`, which calls `apply` with each plan, and `step` with its hidden
states. Ranks that share the last stage all pool the same states; one of them sends the vectors to the core.
Every vector is float32 [hidden_size], as computed: `engine.client.vectors` normalises and shortens it.

    last    the state of the last token, as it is
    cls     the state of the first token, as it is
    mean    the states of all tokens, added up in float64 one after the other, divided by their number

Sums are taken in the order of positions. So if the states have the same bits, the vector has the same bits,
however the prompt is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.batch import ScheduledBatch
from penstock.config.engine import Pooling

_SLAB = 64  # tokens that are added in one call, which takes memory for [_SLAB + 1, hidden] float64

States = NDArray[np.float32]  # [num_tokens, hidden]


class Pool(Protocol):
    """The states that are gathered of one prompt."""

    def wanted(self, start: int, count: int, is_last: bool) -> range:
        """Return which tokens of a chunk are wanted, as indices in the chunk.

        Args:
            start: position of the chunk's first token.
            count: tokens of the chunk.
            is_last: the prompt ends with the chunk.
        """
        ...

    def take(self, states: States) -> None:
        """Take the wanted states of the chunk, in order; they are not kept."""
        ...

    def vector(self) -> NDArray[np.float32]:
        """Return the vector [hidden], once the whole prompt was taken."""
        ...


class _OneToken:
    """A `Pool` for the state of one token, the first or the last.

    Args:
        is_first: it is the first token.
    """

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self._state: NDArray[np.float32] | None = None

    def wanted(self, start: int, count: int, is_last: bool) -> range:
        if self._is_first:
            return range(start == 0)
        return range(count - is_last, count)

    def take(self, states: States) -> None:
        (state,) = states
        self._state = state.copy()

    def vector(self) -> NDArray[np.float32]:
        assert self._state is not None, "the token has not run in this row"
        return self._state


class _MeanOfTokens:
    """A `Pool` for the mean over all tokens."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sum: NDArray[np.float64] = np.zeros(0)

    def wanted(self, start: int, count: int, is_last: bool) -> range:
        assert start == self._num_tokens, "a token is missing, or comes twice"
        return range(count)

    def take(self, states: States) -> None:
        if self._num_tokens == 0:
            self._sum = np.zeros(states.shape[1])
        for first in range(0, len(states), _SLAB):
            slab = np.concatenate([self._sum[None], states[first : first + _SLAB]])
            self._sum = np.add.accumulate(slab)[-1].copy()  # `accumulate` adds in order; `sum` does not
        self._num_tokens += len(states)

    def vector(self) -> NDArray[np.float32]:
        return (self._sum / self._num_tokens).astype(np.float32)


_POOLS: dict[Pooling, Callable[[], Pool]] = {
    "last": lambda: _OneToken(is_first=False),
    "cls": lambda: _OneToken(is_first=True),
    "mean": _MeanOfTokens,
}


class PoolingRows:
    """The rows of a rank whose requests are pooled. On stages before the last nothing is ever gathered."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def reset(self) -> None:
        """Forget all rows."""
        self._pools.clear()

    def apply(self, plan: ScheduledBatch) -> None:
        """Free the plan's freed rows, then take its new ones; a request that starts again is pooled anew."""
        for row in plan.freed_rows:
            self._pools.pop(row, None)
        for new in plan.new_rows:
            if new.pooling is not None:
                self._pools[new.row] = _POOLS[new.pooling]()

    def step(self, plan: ScheduledBatch, states_of: Callable[[NDArray[np.int64]], States]) -> list[bytes]:
        """Take the states of the plan's tokens in rows that are pooled.

        Args:
            states_of: returns the hidden states of some tokens of the step, by their indices ([n] int64,
                rising), as float32.

        Returns:
            The vector of each row in `plan.pooled`: float32 [hidden] as bytes; empty if it is not finite.
        """
        if not self._pools:
            return []
        wanted, parts = self._wanted(plan)
        if wanted:
            states, taken = states_of(np.array(wanted, dtype=np.int64)), 0
            for pool, count in parts:
                pool.take(states[taken : taken + count])
                taken += count
        return [_encoded(self._pools[row].vector()) for row in plan.pooled]

    def _wanted(self, plan: ScheduledBatch) -> tuple[list[int], list[tuple[Pool, int]]]:
        """Return the indices of the step's tokens that are wanted, and how many of them each pool gets."""
        whole, first = frozenset(plan.pooled), 0
        tokens: list[int] = []
        parts: list[tuple[Pool, int]] = []
        for row, start, count in zip(plan.rows, plan.start_positions, plan.num_tokens, strict=True):
            pool = self._pools.get(row)
            if pool is not None:
                own = pool.wanted(start, count, row in whole)
                if own:
                    tokens += range(first + own.start, first + own.stop)
                    parts.append((pool, len(own)))
            first += count
        return tokens, parts


def _encoded(vector: NDArray[np.float32]) -> bytes:
    return vector.astype("<f4").tobytes() if np.isfinite(vector).all() else b""
