"""Who starts while an older request waits for room for its grammar (issue 25, point 18)."""

from __future__ import annotations

from random import Random

import msgspec

from penstock.batch import GREEDY
from penstock.request import StructuredOutputs
from penstock.scheduler.grammars import BYTES_AT_LEAST, BYTES_PER_BYTE, GrammarBuilds
from penstock.scheduler.queues import RequestQueues, RequestState
from penstock.scheduler.start_order import MAX_PASSED, StartOrder

SMALL = BYTES_AT_LEAST + 64 * BYTES_PER_BYTE  # more than any of these grammars is taken for


class Line:
    """Requests by number, and the choice among them.

    Args:
        max_grammars: that rows may have at once.
    """

    def __init__(self, max_grammars: int) -> None:
        self.queues = RequestQueues()
        self.grammars = GrammarBuilds(max_grammars * SMALL)
        self.order = StartOrder(self.queues, self.grammars)
        self._num_added = 0

    def add(self, *grammars: str) -> None:
        """Add a request for each grammar, the next number to each; "-" is none."""
        for grammar in grammars:
            structured = None if grammar == "-" else StructuredOutputs(regex=grammar)
            self.queues.add(
                RequestState(
                    request_id=str(self._num_added),
                    arrival=self._num_added,
                    arrival_time=0.0,
                    prompt_len=3,
                    max_len=20,
                    stop_ids=frozenset(),
                    sampling=msgspec.structs.replace(GREEDY, structured=structured),
                    token_ids=[5, 6, 7],
                )
            )
            self._num_added += 1

    def start(self, *, newcomers: bool = True) -> list[int]:
        """Start whoever may; their numbers, in that order."""
        started = []
        while (request := self.order.next_request(newcomers=newcomers)) is not None:
            self.queues.admit(request, request.arrival)
            self.grammars.enter(request)
            started.append(request.arrival)
        self.queues.check_invariants()
        return started

    def end(self, number: int) -> None:
        request = self.queues.get(str(number))
        assert request is not None
        self.grammars.leave(request)
        self.queues.remove(request)


def test_the_example_of_the_module() -> None:
    line = Line(2)
    line.add(*"ab", *"c-ad-")
    assert line.start() == [0, 1, 3, 4, 6]
    line.end(0)
    assert line.start() == [], "the fourth has the grammar too"
    line.end(4)
    assert line.start() == [2]
    line.end(1)
    assert line.start() == [5]


def test_without_grammars_requests_start_in_order() -> None:
    line = Line(1)
    line.add(*"----")
    assert line.start() == [0, 1, 2, 3]


def test_whoever_would_take_the_awaited_room_stays_behind() -> None:
    """A small grammar would fit now, and an unused one is there; both would keep the large one waiting."""
    line = Line(3)
    line.add("u")
    assert line.start() == [0]
    line.end(0)
    large = "c" * (2 * SMALL // BYTES_PER_BYTE)
    line.add("a", large, "u", "s", "a")
    assert line.start() == [1, 5]


def test_a_popular_grammar_starves_nobody() -> None:
    """Only rows that are older than the waiting request let others share their grammar."""
    line = Line(1)
    line.add("a", "b")
    assert line.start() == [0]
    line.add("a")
    assert line.start() == [2]
    line.end(0)
    line.add("a")
    assert line.start() == []
    line.end(2)
    assert line.start() == [1]
    line.end(1)
    assert line.start() == [3]


def test_so_many_are_passed_and_no_more() -> None:
    for num_passed, started in ((MAX_PASSED, 1), (MAX_PASSED + 1, 0)):
        line = Line(1)
        line.add("a", *(f"b{number}" for number in range(num_passed)), "-")
        assert len(line.start()) == 1 + started


def test_a_pause_lets_those_go_on_that_have_started() -> None:
    line = Line(1)
    line.add(*"ab-a")
    line.queues.get("3").queue_seconds = 0.0  # type: ignore[union-attr]
    assert line.start(newcomers=False) == [3]
    assert line.start() == [0, 2]


def test_everybody_starts_and_those_without_a_grammar_in_order() -> None:
    chance = Random(7)
    num_overtaken = 0
    for _ in range(60):
        line = Line(chance.randint(1, 3))
        grammars = [chance.choice("abcd--") for _ in range(24)]
        line.add(*grammars)
        started = line.start()
        while line.queues.running:
            line.end(chance.choice(line.queues.running).arrival)
            oldest = next(line.queues.line(), None)
            must_start = oldest is not None and line.grammars.has_room(oldest)
            new = line.start()
            assert not must_start or oldest is None or new[0] == oldest.arrival
            started += new
        assert sorted(started) == list(range(24))
        free = [number for number in started if grammars[number] == "-"]
        assert free == sorted(free)
        num_overtaken += started != sorted(started)
    assert num_overtaken > 30
