"""Keeps views of persistent memory from step to step, because making them again takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K")
V = TypeVar("V")

MOST_VIEWS = 256  # steps of a steady load need a few


class KeptViews(Generic[K, V]):
    """The views that `make` gave for each key. It forgets all when there are too many.

    Args:
        make: returns a key's view, always the same.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._views: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._views)

    def clear(self) -> None:
        """Forget all views, so that each is made anew."""
        self._views.clear()

    def of(self, key: K) -> V:
        view = self._views.get(key)
        if view is None:
            if len(self._views) == MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = self._make(key)
        return view


def words_of(values: NDArray[np.int64]) -> memoryview[int]:
    """Return the numbers of a contiguous array, one after the other, to be read and written without numpy.

    Args:
        values: of any shape.
    """
    return values.reshape(-1).data.cast("B").cast("q")
