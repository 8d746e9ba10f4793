"""One stream over many stages keeps the law of speculation in a pipe, by the clock of a simulated pipe.

    tokens a second = (R + 1) / ((R + D) tau),  R = a / (1 - a)

for stages that take tau a token, D = trip / tau, and guesses that are right with chance a.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from drafters import SteadyDrafter
from fakes import CoreRig, FakeClock
from penstock.batch import ScheduledBatch
from penstock.scheduler.cost_model import StageCost
from penstock.scheduler.pacing import WireTime
from timed_pipe import TimedPipe

TAU = 0.01
NUM_TOKENS = 300


def rig_of(num_stages: int, chance: float | None, **given: Any) -> CoreRig:
    clock = FakeClock()
    fixed, slowest = given.pop("fixed", False), given.pop("slowest", None)
    pipe = {name: given.pop(name) for name in ("hop_s", "core_hop_s") if name in given}

    def seconds(stage: int, plan: ScheduledBatch) -> float:
        tau = 3 * TAU if stage == slowest else TAU
        return tau if fixed or len(plan.new_rows) else tau * plan.total_tokens

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


def law(depth: float, num_wrong: int) -> float:
    """Tokens a second, if so many guesses in the text are wrong: each costs a trip, each right one a beat."""
    return (NUM_TOKENS - 1) / ((NUM_TOKENS - 1 - num_wrong + num_wrong * depth) * TAU)


def wrong_guesses(rig: CoreRig) -> int:
    """Of those that were decided on; the first token of all is guessed by nobody."""
    told = rig.core.stats().scheduler.speculation
    return told.num_drafted - told.num_accepted + 1


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8, 20])
def test_a_stream_keeps_the_law(num_stages: int, chance: float) -> None:
    rig = rig_of(num_stages, chance)
    rate = rate_of(rig)
    num_wrong = wrong_guesses(rig)
    assert num_wrong == pytest.approx((1.0 - chance) * NUM_TOKENS, abs=3.5 * (NUM_TOKENS / 4) ** 0.5)
    assert 0.9 <= rate / law(num_stages, num_wrong) <= 1.05


@pytest.mark.parametrize(("num_stages", "chance", "least"), [(8, 0.9, 4.2), (20, 0.95, 9.0)])
def test_where_windows_cost_what_tokens_cost_a_stream_gains_more(
    num_stages: int, chance: float, least: float
) -> None:
    gain = rate_of(rig_of(num_stages, chance, fixed=True)) * num_stages * TAU  # plain: a token a trip
    assert gain >= least


def test_plain_decoding_is_one_token_a_trip() -> None:
    assert rate_of(rig_of(8, None)) == pytest.approx(1.0 / (8 * TAU), rel=0.01)


@pytest.mark.parametrize("chance", [0.5, 0.9])
def test_a_wire_counts_as_stages(chance: float) -> None:
    """Four stages of 10 ms with 22 ms on each wire: D = 4 + 3 x 2.2."""
    rig = rig_of(4, chance, hop_s=0.022, max_plans_in_flight=20)
    rig.depth.wire = WireTime(latency=0.066)
    depth = 4 + 0.066 / TAU
    rate, num_wrong = rate_of(rig), wrong_guesses(rig)
    assert 0.9 <= rate / law(depth, num_wrong) <= 1.05


def test_the_slowest_stage_is_not_held_up_by_void_windows() -> None:
    """Windows queue up before it; those behind a wrong guess pass, and the right one is next."""
    rig = rig_of(4, 0.8, slowest=2)
    rate, num_wrong = rate_of(rig), wrong_guesses(rig)
    trip_s, beat_s = 6 * TAU, 3 * TAU  # of 1, 1, 3 and 1
    expected_s = (NUM_TOKENS - 1 - num_wrong) * beat_s + num_wrong * trip_s
    assert (NUM_TOKENS - 1) / rate <= expected_s / 0.85
    pipe = rig.executor
    assert isinstance(pipe, TimedPipe)
    void = {plan.step_id for plan in rig.plans if pipe._void[plan.step_id]}
    assert void
    assert not void.intersection(pipe.computed[-1])
    for computed in pipe.computed[:-1]:
        assert len(void.intersection(computed)) <= 3 * num_wrong


@pytest.mark.parametrize("num_streams", [2, 3])
def test_few_streams_share_the_stages(num_streams: int) -> None:
    plain, drafted = rate_of(rig_of(4, None), num_streams), rate_of(rig_of(4, 0.9), num_streams)
    assert drafted > 1.1 * plain


def test_as_many_streams_as_stages_lose_nothing() -> None:
    plain, drafted = rate_of(rig_of(4, None), 8), rate_of(rig_of(4, 0.5), 8)
    assert drafted >= 0.98 * plain
