"""Windows that follow each other through the pipe on a guess, and what becomes of them when it was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from drafters import SteadyDrafter
from fakes import CoreRig
from penstock.batch import GUESSED, ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.scheduler.cost_model import StageCost

FREE = StageCost(read=1e-3, per_token=1e-6)  # windows cost what single tokens cost


def rig_of(chance: float = 1.0, **given: Any) -> CoreRig:
    return CoreRig(
        **{
            "drafter": partial(SteadyDrafter, chance=chance),
            "num_drafts": 3,
            "num_stages": 4,
            "eos_token_ids": (),
            "num_blocks": 400,
            "max_model_len": 400,
            "latency": None,
            **given,
        }
    )


def started(rig: CoreRig, count: int = 1, **sampling: Any) -> CoreRig:
    """With the first token of each request there, and its next plans on their way."""
    for number in range(count):
        rig.add(f"r{number}", 3, **{"max_tokens": 60, **sampling})
        rig.step()
        rig.settle(rig.core.num_inflight)
    return rig


def is_guessed(plan: ScheduledBatch) -> bool:
    return GUESSED in plan.token_from


def finished(rig: CoreRig) -> CoreRig:
    """With all requests at their end, which is the right one."""
    rig.run_until_idle()
    for arrival, request_id in enumerate(rig.requests):
        assert rig.result(request_id) == rig.expected(request_id, arrival)
    return rig


def test_right_guesses_fill_the_pipe() -> None:
    rig = started(rig_of())
    in_flight = rig.plans[-4:]
    assert rig.core.num_inflight == 4
    assert [is_guessed(plan) for plan in in_flight] == [False, True, True, True]
    assert [plan.num_tokens for plan in in_flight] == [[4], [4], [4], [4]]
    assert [plan.start_positions for plan in in_flight] == [[3], [7], [11], [15]]
    tokens, known = rig.expected("r0")[0], 1
    for plan in in_flight[1:]:
        assert plan.drafts[0] == tokens[known + 3 : known + 7]
        known += 4
    before = len(rig.tokens("r0"))
    rig.settle(1)
    assert len(rig.tokens("r0")) == before + 4
    assert rig.core.num_inflight == 4, "another one follows"
    told = finished(rig).core.stats().scheduler.speculation
    assert told.num_cancelled == 0
    assert told.num_accepted == told.num_drafted > 50
    assert not any(plan.rewound for plan in rig.plans)


def test_behind_a_wrong_guess_the_next_plan_rewinds_and_waits_for_nobody() -> None:
    rig = started(rig_of(0.7))
    while not any(plan.rewound for plan in rig.plans):
        rig.settle(1)
    right = next(plan for plan in rig.plans if plan.rewound)
    (rewound,), tokens = right.rewound, rig.tokens("r0")
    assert rewound.num_tokens == 3 + len(tokens)
    assert tokens[-len(rewound.newest_ids) :] == rewound.newest_ids
    assert not is_guessed(right)
    assert right.start_positions == [rewound.num_tokens - 1]
    void = [plan for plan in rig.plans if rewound.step < plan.step_id < right.step_id]
    assert len(void) == 2  # a third is hardly ever of use
    assert all(map(is_guessed, void))
    assert rig.executor.events.index(("submit", right.step_id)) == 1 + rig.executor.events.index(
        ("result", rewound.step)
    )
    finished(rig)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_requests", [1, 2, 3])
@pytest.mark.parametrize("async_depth", [0, 2])
def test_whatever_is_right_the_tokens_are(chance: float, num_requests: int, async_depth: int) -> None:
    rig = started(rig_of(chance, async_depth=async_depth), num_requests)
    finished(rig)
    rewound = [row for plan in rig.plans for row in plan.rewound]
    assert not rewound or any(map(is_guessed, rig.plans))
    told = rig.core.stats().scheduler.speculation
    if chance >= 0.5 and num_requests == 1:
        assert told.num_cancelled > 0
        assert 0 < told.num_accepted < told.num_drafted


def test_as_many_requests_as_stages_leave_no_room_for_guesses() -> None:
    rig = finished(started(rig_of(), 4, max_tokens=30))
    busy = [plan for plan in rig.plans if plan.step_id <= last_step_of_all(rig)]
    assert not any(map(is_guessed, busy))


def last_step_of_all(rig: CoreRig) -> int:
    """The last step before one of the requests ended."""
    return min(plan.step_id for plan in rig.plans if plan.freed_rows) - 8


def test_guessed_windows_come_last() -> None:
    """When a request is there that may run, it runs."""
    rig = started(rig_of())
    rig.add("other", 3, max_tokens=5)
    rig.settle(1)
    assert [plan.new_rows[0].request_id for plan in rig.plans[-1:]] == ["other"]
    finished(rig)


@pytest.mark.parametrize("seed", range(8))
def test_a_prompt_that_comes_does_not_let_a_stream_decode_too_soon(seed: int) -> None:
    """While prompts run, requests go on before their results are back; not behind guessed windows."""
    rig = started(
        rig_of(
            drafter=partial(SteadyDrafter, chance=0.8, seed=seed),
            num_drafts=1,
            async_depth=3,
            scheduler=SchedulerConfig(max_num_seqs=8, prefill_chunk=1),
        )
    )
    rig.add("other", 40, max_tokens=2)
    while rig.core.num_inflight:
        rig.settle(1)
    finished(rig)
    assert any(map(is_guessed, rig.plans))


def test_a_refusal_or_the_end_of_the_room_stops_guesses() -> None:
    rig = finished(started(rig_of(), speculative=False))
    assert not any(map(is_guessed, rig.plans))
    rig = finished(started(rig_of(), max_tokens=10))
    assert sum(sum(plan.num_tokens) for plan in rig.plans[1:]) == 9, "no token behind the last one"


def test_without_blocks_to_spare_nobody_guesses_ahead() -> None:
    rig = finished(started(rig_of(num_blocks=8, max_model_len=32), max_tokens=25))
    assert rig.core.stats().scheduler.num_preemptions == 0


def test_a_stop_in_a_window_ends_the_request_and_what_follows_is_nobodys() -> None:
    free = finished(started(rig_of()))
    tokens = free.tokens("r0")
    stop = next(token for token in tokens[6:] if token not in tokens[:6])
    rig = finished(started(rig_of(), stop_token_ids=[stop]))
    assert rig.finish_reason("r0") == "stop"
    assert rig.tokens("r0")[-1] == stop


def test_an_abort_leaves_windows_in_the_pipe_and_nothing_else() -> None:
    rig = started(rig_of(0.7))
    rig.settle(1)
    assert rig.abort("r0")
    rig.add("next", 3, max_tokens=20)
    rig.run_until_idle()
    assert rig.result("next") == rig.expected("next", 1)


def test_r1_a_loss_in_mid_stream_costs_no_token() -> None:
    rig = started(rig_of(0.7, recovers=True))
    for _ in range(3):
        rig.settle(1)
        rig.executor.lose_stage(2, "killed")
        rig.step()
        assert not rig.core.has_pipe
        rig.rejoin()
        rig.step()
        rig.settle(5)
    finished(rig)


@pytest.mark.parametrize("costs", [(FREE, FREE), (StageCost(read=1e-3, per_token=1e-3),) * 2])
def test_windows_are_as_large_as_pays(costs: Sequence[StageCost]) -> None:
    rig = finished(started(rig_of(0.9, costs=tuple(costs), num_drafts=7)))
    sizes = {plan.num_tokens[0] for plan in rig.plans if is_guessed(plan)}
    assert max(sizes) == (8 if costs[0] is FREE else 1)
