"""A request waits for guesses that are computed elsewhere where that is worth it, and no longer."""

from __future__ import annotations

import math

import pytest

from drafters import SlowDrafter
from fakes import CoreRig, FakeClock
from penstock.scheduler.cost_model import StageCost
from penstock.speculation.awaiting import guesses_worth_waiting
from penstock.speculation.drafter import Draft

STEP_S = 0.05
TICK_S = 0.001


class Rig(CoreRig):
    """A core of one stage whose steps take a while; time passes in ticks."""

    def __init__(self, **given: object) -> None:
        self.drafters: list[SlowDrafter] = []
        clock = FakeClock()

        def drafter(request_of: object) -> SlowDrafter:
            self.drafters.append(SlowDrafter(request_of, clock))  # type: ignore[arg-type]
            return self.drafters[-1]

        cost = StageCost(read=STEP_S, per_token=0.0)
        defaults = {
            "clock": clock,
            "drafter": drafter,
            "num_drafts": 4,
            "eos_token_ids": (),
            "num_blocks": 64,
            "num_stages": 1,
            "costs": (cost, cost),
        }
        super().__init__(**(defaults | given))  # type: ignore[arg-type]

    def pass_until_idle(self) -> float:
        """Returns the seconds that it took. A result comes `STEP_S` after its plan."""
        began, due = self.clock.now, math.inf
        while not self.core.is_idle:
            self.step()
            if self.core.num_inflight and math.isinf(due):
                due = self.clock.now + STEP_S
            self.clock.advance(TICK_S)
            if self.clock.now >= due:
                due = math.inf
                self.settle()
            assert self.clock.now < began + 60.0, "it hangs"
        return self.clock.now - began


def drafts_of(rig: CoreRig) -> list[int]:
    return [sum(map(len, plan.drafts.values())) for plan in rig.plans if plan.rows]


def test_a_request_goes_on_when_its_guesses_are_there() -> None:
    rig = Rig()
    rig.add("r", 3, max_tokens=16)
    rig.pass_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert drafts_of(rig) == [0, 4, 4, 4]


def test_no_guess_is_waited_for_that_takes_as_long_as_a_step() -> None:
    rig = Rig()
    rig.drafters[0].token_s = 2 * STEP_S
    rig.add("r", 3, max_tokens=16)
    rig.pass_until_idle()
    assert drafts_of(rig) == [0] * 16


def test_a_drafter_that_breaks_its_promise_is_waited_for_a_bounded_time() -> None:
    rig = Rig()
    rig.drafters[0].is_stuck = True
    rig.add("r", 3, max_tokens=6)
    took = rig.pass_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert drafts_of(rig) == [0] * 6
    longest = 2 * 4 * rig.drafters[0].token_s + 0.005
    assert took <= 6 * (STEP_S + 3 * TICK_S) + 3 * longest  # three times, and then it waits no more


def test_others_run_while_one_waits() -> None:
    rig = Rig(num_stages=2)
    rig.drafters[0].is_stuck = True
    rig.add("waits", 3, max_tokens=4)
    rig.add("leaves it alone", 3, max_tokens=12, speculative=False)
    rig.pass_until_idle()
    for name in ("waits", "leaves it alone"):
        assert rig.result(name) == rig.expected(name)
    alone = [plan for plan in rig.plans if plan.rows and not plan.new_rows and len(plan.rows) == 1]
    assert len(alone) > 12 - 4


def test_a_request_that_waits_may_be_aborted() -> None:
    rig = Rig()
    rig.drafters[0].is_stuck = True
    rig.add("r", 3, max_tokens=6)
    rig.step()
    rig.settle()
    assert rig.core.num_inflight == 0
    assert rig.core.next_wakeup() < rig.clock.now + 1.0
    rig.core.abort("r")
    rig.step()
    assert rig.core.is_idle
    assert rig.core.next_wakeup() >= rig.clock.now + 1.0


def test_a_request_that_waits_survives_the_loss_of_the_pipe() -> None:
    rig = Rig(recovers=True)
    rig.add("r", 3, max_tokens=12)
    rig.step()
    rig.settle()
    assert rig.core.num_inflight == 0
    rig.executor.lose_stage(0, "a test has ended it")
    rig.step()
    rig.rejoin()
    rig.pass_until_idle()
    assert rig.result("r") == rig.expected("r")


def test_the_drafter_is_closed_with_the_core() -> None:
    rig = Rig()
    rig.core.close()
    assert rig.drafters[0].is_closed


@pytest.mark.parametrize(
    ("draft", "wanted"),
    [
        (Draft([], 0.9, 0.1), 8),  # a step takes ten times as long as a guess
        (Draft([], 0.5, 0.1), 2),
        (Draft([], 0.9, 2.0), 0),  # and here half as long
        (Draft([1, 2, 3], 0.9, 2.0), 3),
        (Draft([1, 2, 3], 0.9, math.inf), 3),
        (Draft([1] * 9, 0.9, 0.1), 9),  # more than one step takes: they are there
        (Draft([], 0.0, 0.1), 0),
    ],
)
def test_what_is_worth_waiting_for(draft: Draft, wanted: int) -> None:
    assert guesses_worth_waiting(draft, 8, 1, lambda tokens: 1.0) == wanted


def test_more_rows_make_guesses_dear() -> None:
    draft = Draft([], 0.8, 0.01)
    sizes = [
        guesses_worth_waiting(draft, 8, rows, lambda tokens: max(1.0, tokens / 16)) for rows in (1, 8, 64)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (8, 0)
