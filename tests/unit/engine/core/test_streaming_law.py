"""One stream over many stages keeps the law of speculation in a pipe, by the clock of a pipe that is simulated.

    tokens a second = (R + 1) / ((R + D) tau),  R = a / (1 - a)

for stages that take tau a token, D = trip / tau, and guesses that are right with chance a.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from drafters import SteadyDrafter
from fakes import CoreRig, FakeClock
from penstock.batch import GUESSED, ScheduledBatch
from penstock.scheduler.cost_model import StageCost
from timed_pipe import TimedPipe

TAU = 0.01
NUM_TOKENS = 300


def rig_of(num_stages: int, chance: float | None, **given: Any) -> CoreRig:
    clock = FakeClock()
    fixed = given.pop("fixed", False)
    pipe = {name: given.pop(name) for name in ("hop_s", "core_hop_s") if name in given}

    def seconds(stage: int, plan: ScheduledBatch) -> float:
        return TAU if fixed or len(plan.new_rows) else TAU * plan.total_tokens

    cost = StageCost(read=TAU, per_token=TAU / 100 if fixed else TAU)
    return CoreRig(
        **{
            "num_stages": num_stages,
            "num_blocks": 400,
            "max_model_len": 1000,
            "eos_token_ids": (),
            "num_drafts": 8,
            "costs": (cost, cost),
            "clock": clock,
            "executor_class": partial(TimedPipe, clock=clock, seconds=seconds, **pipe),
            "drafter": None if chance is None else partial(SteadyDrafter, chance=chance),
            **given,
        }
    )


def rate_of(rig: CoreRig, num_streams: int = 1) -> float:
    """Tokens a second of all streams together, behind their prompts."""
    for number in range(num_streams):
        rig.add(f"r{number}", 3, max_tokens=NUM_TOKENS)
    while not all(rig.tokens(f"r{number}") for number in range(num_streams)):
        rig.step(timeout_s=1.0)
    began, before = rig.clock(), sum(len(rig.tokens(f"r{number}")) for number in range(num_streams))
    rig.run_until_idle()
    for number in range(num_streams):
        assert rig.result(f"r{number}") == rig.expected(f"r{number}", number)
    return (num_streams * NUM_TOKENS - before) / (rig.clock() - began)


def law(depth: float, chance: float) -> float:
    right = chance / (1.0 - chance)
    return (right + 1.0) / ((right + depth) * TAU)


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8, 20])
def test_a_stream_keeps_the_law(num_stages: int, chance: float) -> None:
    rate = rate_of(rig_of(num_stages, chance))
    assert rate >= 0.9 * law(num_stages, chance)
    assert rate <= 1.35 * law(num_stages, chance), "a simulation that is too good is wrong"


def test_plain_decoding_is_one_token_a_trip() -> None:
    assert rate_of(rig_of(8, None)) == pytest.approx(1.0 / (8 * TAU), rel=0.01)
