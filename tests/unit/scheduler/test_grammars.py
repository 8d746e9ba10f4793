"""What the last stage is to keep of grammars: bounds of number and size, and what is dropped for whom."""

from __future__ import annotations

import msgspec

from penstock.batch import GREEDY, NO_GRAMMAR, BuiltGrammar
from penstock.request import StructuredOutputs
from penstock.scheduler.grammars import BYTES_AT_LEAST, BYTES_PER_BYTE, GrammarBuilds
from penstock.scheduler.queues import RequestState

SMALL = BYTES_AT_LEAST + 64 * BYTES_PER_BYTE  # more than any of these is taken for

LARGE = 1 << 30


def request(arrival: int, text: str | None, *, max_len: int = 20) -> RequestState:
    structured = None if text is None else StructuredOutputs(regex=text)
    sampling = msgspec.structs.replace(GREEDY, structured=structured)
    return RequestState(
        request_id=f"r{arrival}",
        arrival=arrival,
        arrival_time=0.0,
        prompt_len=3,
        max_len=max_len,
        stop_ids=frozenset(),
        sampling=sampling,
        token_ids=[5, 6, 7],
    )


def used(desk: GrammarBuilds, arrival: int, text: str) -> int:
    """Of a request that has come and gone."""
    one = request(arrival, text)
    number = desk.enter(one)
    desk.settle([BuiltGrammar(number)])
    desk.leave(one)
    return number


def test_who_is_not_sampled_has_no_grammar() -> None:
    desk = GrammarBuilds(LARGE)
    for one in (request(0, None), request(1, "a", max_len=3)):
        assert desk.is_built(one)
        assert desk.has_room(one)
        assert desk.enter(one) == NO_GRAMMAR
        assert not one.awaits_grammar
        desk.leave(one)
    assert desk.take_dropped() == []
    desk.check_invariants([])


def test_grammars_that_nobody_has_are_kept_up_to_a_number_the_longest_unused_first() -> None:
    desk = GrammarBuilds(LARGE, max_unused=3)
    numbers = [used(desk, arrival, f"a{arrival}") for arrival in range(4)]
    assert desk.take_dropped() == numbers[:1]
    assert used(desk, 4, "a1") == numbers[1], "it was there"
    assert desk.take_dropped() == []
    newest = used(desk, 5, "b")
    assert desk.take_dropped() == [numbers[2]]
    assert desk.take_dropped() == [], "ranks are told once"
    assert newest == 4
    assert not desk.is_built(request(6, "a2"))
    assert used(desk, 7, "a2") == 5, "numbers are not used again"


def test_and_up_to_a_size() -> None:
    desk = GrammarBuilds(3 * SMALL)
    numbers = [used(desk, arrival, f"a{arrival}") for arrival in range(3)]
    assert desk.take_dropped() == []
    large = request(3, "b" * (SMALL // BYTES_PER_BYTE))
    desk.enter(large)
    assert desk.take_dropped() == numbers[:2]


def test_rows_have_grammars_up_to_a_size_and_one_may_be_larger_alone() -> None:
    desk = GrammarBuilds(2 * SMALL)
    first, same, second, third = (request(n, text) for n, text in enumerate("aabc"))
    huge = request(4, "d" * (4 * SMALL // BYTES_PER_BYTE))
    for one in (first, same, second):
        assert desk.has_room(one)
        desk.enter(one)
    assert not desk.has_room(third)
    assert desk.has_room(request(5, "a")), "it is there"
    desk.leave(second)
    assert desk.has_room(third)
    assert not desk.has_room(huge)
    desk.leave(first)
    assert not desk.has_room(huge)
    desk.leave(same)
    assert desk.has_room(huge)
    desk.enter(huge)
    desk.check_invariants([huge])


def test_what_is_told_late_concerns_nobody() -> None:
    desk = GrammarBuilds(LARGE)
    gone, other = request(0, "a"), request(1, "b")
    number = desk.enter(gone)
    desk.enter(other)
    assert desk.is_any_awaited
    desk.leave(gone)
    assert desk.take_dropped() == [number]
    told = [BuiltGrammar(number), BuiltGrammar(number, "no"), BuiltGrammar(77, "no")]
    assert desk.settle(told) == []
    assert other.awaits_grammar
    failed = BuiltGrammar(other.grammar, "no")
    assert desk.settle([failed]) == [(other, failed)]
    desk.leave(other)
    assert not desk.is_any_awaited
    desk.check_invariants([])


def test_ranks_that_have_forgotten_all_are_told_of_nothing() -> None:
    desk = GrammarBuilds(LARGE, max_unused=0)
    used(desk, 0, "a")
    one = request(1, "b")
    desk.enter(one)
    desk.forget_all()
    assert (one.grammar, one.awaits_grammar) == (NO_GRAMMAR, False)
    assert desk.take_dropped() == []
    assert desk.enter(one) == 2
    assert one.awaits_grammar
