"""Who gives way (row D10)."""

from __future__ import annotations

from penstock.batch import RowSampling
from penstock.scheduler.preemption import choose_victim
from penstock.scheduler.queues import RequestState


def running(*last_sampled_steps: int) -> list[RequestState]:
    return [
        RequestState(
            request_id=f"r{arrival}",
            arrival=arrival,
            arrival_time=0.0,
            prompt_len=1,
            max_len=9,
            stop_ids=frozenset(),
            sampling=RowSampling(0.0, 0, 1.0, 0.0, 1, 0, [], -1),
            token_ids=[4],
            last_sampled_step=step,
        )
        for arrival, step in enumerate(last_sampled_steps)
    ]


def test_d10_the_youngest_gives_way_with_results_in_flight_too() -> None:
    requests = running(3, 3, 4)
    assert choose_victim(requests, requests[0], step_id=5) is requests[2]


def test_d10_the_youngest_itself_has_to_wait() -> None:
    requests = running(3, 3)
    assert choose_victim(requests, requests[1], step_id=5) is None


def test_d10_a_request_in_the_plan_being_made_stays() -> None:
    requests = running(3, 5)
    assert choose_victim(requests, requests[0], step_id=5) is None
