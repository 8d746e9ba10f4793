"""A head that serves a test module's `model`, and workers that find their weights at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weight_heads import WeightHead, WeightWorker


@pytest.fixture
def head(tmp_path: Path, model: Path) -> Iterator[WeightHead]:
    made = WeightHead(tmp_path / "head", model)
    yield made
    made.close()


@pytest.fixture
def new_worker(tmp_path: Path, head: WeightHead) -> Iterator[Callable[..., WeightWorker]]:
    """Makes a worker with a cache of this name, and with these models of its own."""
    made: list[WeightWorker] = []

    def make(*models: Path, name: str = "cache") -> WeightWorker:
        made.append(WeightWorker(tmp_path / name, head, *models))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
