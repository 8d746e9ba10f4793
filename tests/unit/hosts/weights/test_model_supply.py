"""What an agent hears of the weights of its ranks, beside its loop."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeClock
from penstock.errors import PeerError
from penstock.families.registry import resolve_model_directory
from penstock.hosts.weights.model_supply import Delivery, ModelSupply
from penstock.process.child import LoadProgressed
from penstock.process.control import UseModel
from penstock.trust.cancellation import CancelledError
from rank_configs import make_rank_configs

WAIT_S = 30.0
RANK = make_rank_configs(resolve_model_directory("demo"), 2)[1]
Search = Callable[[Any, Any], Path]  # notes, cancellation


class Supply:
    """A supply whose searches a test plays."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.told: list[str] = []
        self.searches: list[Search] = []
        self.asked: list[tuple[bytes, object]] = []
        self.supply = ModelSupply(self._find, self.told.append, self.clock)

    def deliveries(self, count: int) -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < count:
            assert select.select([self.supply], [], [], WAIT_S)[0], found
            found += self.supply.take()
        return found

    def _find(self, identity: bytes, rank: object, notes: Any, cancellation: Any) -> Path:
        self.asked.append((identity, rank))
        return self.searches.pop(0)(notes, cancellation)


@pytest.fixture
def supply() -> Iterator[Supply]:
    made = Supply()
    yield made
    made.supply.close()


def test_g1_a_rank_is_given_the_directory_that_was_found(supply: Supply) -> None:
    supply.searches = [lambda notes, cancellation: Path("/cache/models/1")]
    supply.supply.seek(7, b"identity", RANK)
    assert supply.deliveries(1) == [Delivery(7, UseModel(path="/cache/models/1", identity=b"identity"))]
    assert supply.asked == [(b"identity", RANK)]
    assert supply.told == []


def test_g1_progress_is_told_by_the_percent_and_to_the_user_now_and_then(supply: Supply) -> None:
    def search(notes: Any, cancellation: Any) -> Path:
        notes.say("comparing 2.0 MB")
        notes.begin(1_000_000)
        for _ in range(4):
            notes.add(1000)  # less than a percent, together
        notes.add(496_000)
        supply.clock.advance(6.0)
        notes.add(-100_000)
        notes.add(100_000)
        notes.add(100_000)
        supply.clock.advance(2.0)
        notes.add(400_000)
        return Path("/x")

    supply.searches = [search]
    supply.supply.seek(7, b"", RANK)
    progress = [news for _, news in supply.deliveries(4)][:-1]
    assert progress == [
        LoadProgressed(done=done, total=1_000_000, what="fetching") for done in (500_000, 600_000, 1_000_000)
    ]
    assert supply.told == [
        "stage 1: comparing 2.0 MB",
        "stage 1: fetching 1.0 MB from the head",
        "stage 1: fetching, 60 % of 1.0 MB received",
        "stage 1: fetched 1.0 MB in 8.0 s (0 MB/s)",
    ]


def test_g1_an_error_is_delivered_and_told(supply: Supply) -> None:
    error = PeerError("the disk is full.", remedy="Free space.", code="disk_full")

    def fail(notes: Any, cancellation: Any) -> Path:
        raise error

    def fail_by_accident(notes: Any, cancellation: Any) -> Path:
        raise ValueError("odd")

    supply.searches = [fail, fail_by_accident]
    supply.supply.seek(7, b"", RANK)
    supply.supply.seek(8, b"", RANK)
    first, second = supply.deliveries(2)
    assert first == Delivery(7, error)
    assert supply.told == ["stage 1 cannot get its weights: the disk is full. Free space."]
    assert isinstance(second.news, PeerError), "a rank that waits must not wait for ever"


def test_g1_a_rank_that_has_ended_is_delivered_nothing_and_its_search_is_cancelled(supply: Supply) -> None:
    begun = threading.Event()

    def wait(notes: Any, cancellation: Any) -> Path:
        begun.set()
        cancellation.pause(WAIT_S)
        raise AssertionError

    supply.searches = [wait, lambda notes, cancellation: Path("/second")]
    supply.supply.seek(7, b"", RANK)
    assert begun.wait(WAIT_S)
    supply.supply.forget(7)
    supply.supply.forget(7)
    supply.supply.seek(8, b"", RANK)
    assert [delivery.number for delivery in supply.deliveries(1)] == [8]


def test_close_ends_a_search(supply: Supply) -> None:
    begun, ended = threading.Event(), threading.Event()

    def wait(notes: Any, cancellation: Any) -> Path:
        begun.set()
        try:
            cancellation.pause(WAIT_S)
        except CancelledError:
            ended.set()
            raise
        raise AssertionError

    supply.searches = [wait]
    supply.supply.seek(7, b"", RANK)
    assert begun.wait(WAIT_S)
    supply.supply.close()
    assert ended.is_set()
