"""Where requests are, and the order that keeps the oldest first."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from penstock.batch import RowSampling
from penstock.scheduler.queues import NO_ROW, RequestPhase, RequestQueues, RequestState

GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 1, 0, [], -1)


def make_state(arrival: int, prompt_len: int = 3, max_len: int = 10) -> RequestState:
    return RequestState(
        request_id=f"r{arrival}",
        arrival=arrival,
        arrival_time=float(arrival),
        prompt_len=prompt_len,
        max_len=max_len,
        stop_ids=frozenset(),
        sampling=GREEDY,
        token_ids=list(range(prompt_len)),
    )


def fill(count: int) -> RequestQueues:
    queues = RequestQueues()
    for arrival in range(count):
        queues.add(make_state(arrival))
    return queues


def admit_first(queues: RequestQueues, row: int) -> RequestState:
    request = next(queues.line())
    queues.admit(request, row)
    return request


def test_requests_are_admitted_in_order_of_arrival() -> None:
    queues = fill(3)
    assert queues.backlog_tokens == 9
    first = admit_first(queues, 5)
    assert (first.request_id, first.phase, first.row, first.prefill_len) == ("r0", RequestPhase.RUNNING, 5, 3)
    assert queues.backlog_tokens == 6
    assert [request.request_id for request in queues.line()] == ["r1", "r2"]
    queues.check_invariants()


def test_an_empty_line() -> None:
    assert list(RequestQueues().line()) == []


def test_a_request_that_was_passed_takes_its_place_by_age() -> None:
    """Issue 25, point 18. The youngest gives way, whoever started last."""
    queues = fill(4)
    passed, second, third, fourth = queues.line()
    for row, request in enumerate((second, fourth)):
        queues.admit(request, row)
    queues.check_invariants()
    queues.admit(passed, 2)
    assert queues.running == [passed, second, fourth]
    queues.check_invariants()
    assert queues.preempt_youngest() is fourth
    assert list(queues.line()) == [fourth, third]
    assert queues.preempt_youngest() is second
    assert list(queues.line()) == [second, fourth, third]
    queues.admit(fourth, 3)
    assert queues.preempt_youngest() is fourth
    assert list(queues.line()) == [second, fourth, third]
    queues.check_invariants()


def test_d10_a_preempted_request_is_next_and_prefills_all_it_knows() -> None:
    queues = fill(4)
    for row in range(3):
        admit_first(queues, row)
    victim = queues.running[-1]
    victim.token_ids += [7, 8]
    victim.num_scheduled = 4
    assert queues.preempt_youngest() is victim
    assert (victim.phase, victim.row, victim.num_scheduled, victim.prefill_len) == (
        RequestPhase.PREEMPTED,
        NO_ROW,
        0,
        0,
    )
    second = queues.preempt_youngest()
    queues.check_invariants()
    assert queues.backlog_tokens == 3 + 5 + 3
    assert admit_first(queues, 1) is second
    assert admit_first(queues, 2) is victim
    assert victim.prefill_len == 5
    queues.check_invariants()


def test_d10_a_late_token_of_a_preempted_request_counts_as_backlog() -> None:
    queues = fill(1)
    request = admit_first(queues, 0)
    queues.note_token(request, 9)
    assert queues.backlog_tokens == 0
    queues.preempt_youngest()
    queues.note_token(request, 8)
    assert queues.backlog_tokens == 5
    queues.check_invariants()


@pytest.mark.parametrize("place", ["running", "preempted", "waiting"])
def test_remove_forgets_a_request_wherever_it_is(place: str) -> None:
    queues = fill(3)
    admit_first(queues, 0)
    admit_first(queues, 1)
    queues.preempt_youngest()
    request = getattr(queues, place)[0]
    queues.remove(request)
    assert request.phase is RequestPhase.FINISHED
    assert request.row == NO_ROW
    assert request.request_id not in queues
    assert queues.get(request.request_id) is None
    assert len(queues) == 2
    queues.check_invariants()


def test_the_clock_of_plans_says_who_wants_a_decode() -> None:
    queues = fill(1)
    request = queues.waiting[0]
    admit_first(queues, 0)
    request.prefill_len, request.max_len = 3, 5
    decodes = []
    for request.num_scheduled in (2, 3, 4):  # at 4 both remaining tokens are on their way
        queues.turns_changed()
        assert request.is_prefilling == (queues.prefilling() == [request])
        decodes.append(list(queues.decoding()) == [request])
    assert decodes == [False, True, False]
    request.num_scheduled, request.num_unproven = 3, 1
    queues.turns_changed()
    assert not queues.decoding(), "its beginning may not come"


def fill_decoding(count: int, num_scheduled: int = 5) -> RequestQueues:
    """Return queues whose requests all decode, and were all sampled in step 0."""
    queues = fill(count)
    for row in range(count):
        admit_first(queues, row)
    for request in queues.running:
        request.num_scheduled, request.last_sampled_step = num_scheduled, 0
    return queues


def decode(queues: RequestQueues, arrivals: list[int], step_id: int) -> None:
    """Have a plan run a decode of each of these requests."""
    requests = [request for number in arrivals for request in queues.running if request.arrival == number]
    for request in requests:
        request.num_scheduled += 1
        request.last_sampled_step = step_id
    queues.decoded(requests)


def test_decodes_come_longest_unsampled_first_and_then_oldest_first() -> None:
    queues = fill_decoding(5)
    turns: list[list[int]] = [[request.arrival for request in queues.decoding()]]
    for step_id, arrivals in enumerate([[0, 1], [3, 2], [4, 0]], start=1):
        decode(queues, arrivals, step_id)
        turns.append([request.arrival for request in queues.decoding()])
        queues.check_invariants()
    assert turns == [[0, 1, 2, 3, 4], [2, 3, 4, 0, 1], [4, 0, 1, 2, 3], [1, 2, 3, 0, 4]]


def test_a_request_whose_tokens_are_all_planned_decodes_no_more() -> None:
    queues = fill_decoding(2, num_scheduled=8)  # of 10
    assert queues.attended == 18
    decode(queues, [0], 1)
    assert [request.arrival for request in queues.decoding()] == [1]
    assert queues.attended == 9
    queues.check_invariants()


def test_turns_are_the_same_kept_or_made_anew() -> None:
    """Kept from plan to plan they say what a look at all running requests says, whatever happens."""
    source, queues, step_id, row = Random(0), fill_decoding(3), 1, 3
    for arrival in range(3, 200):
        queues.add(make_state(arrival))
    for _ in range(400):
        match source.randrange(8):
            case 0 if len(queues.running) < 8 and (queues.preempted or queues.waiting):
                request = admit_first(queues, row)
                request.num_scheduled, request.last_sampled_step = request.prefill_len, step_id
            case 1 if len(queues.running) > 3:
                queues.preempt_youngest()
            case 2 if queues.running:
                queues.remove(source.choice(queues.running))
            case _:
                ready = [request.arrival for request in queues.decoding()]
                decode(queues, source.sample(ready, min(len(ready), 2)), step_id)
        step_id, row = step_id + 1, row + 1
        queues.check_invariants()
    assert step_id == 401


def reverse_running(queues: RequestQueues) -> None:
    queues.running.reverse()


def lose_one(queues: RequestQueues) -> None:
    queues.waiting.pop()


def miscount(queues: RequestQueues) -> None:
    queues.backlog_tokens += 1


def mislabel(queues: RequestQueues) -> None:
    queues.waiting[0].phase = RequestPhase.PREEMPTED


@pytest.mark.parametrize("damage", [reverse_running, lose_one, miscount, mislabel])
def test_check_invariants_sees_damage(damage: Callable[[RequestQueues], None]) -> None:
    queues = fill(4)
    admit_first(queues, 0)
    admit_first(queues, 1)
    queues.check_invariants()
    damage(queues)
    with pytest.raises(AssertionError):
        queues.check_invariants()


def test_order_survives_any_sequence_of_moves() -> None:
    random = Random(0)
    for _ in range(50):
        queues = RequestQueues()
        for arrival in range(60):
            move = random.randrange(4)
            if move == 0 or len(queues) == 0:
                queues.add(make_state(arrival))
            elif move == 1 and (line := list(queues.line())):
                queues.admit(random.choice(line), arrival)
            elif move == 2 and queues.running:
                queues.preempt_youngest()
            else:
                queues.remove(random.choice(list(queues)))
            queues.check_invariants()
