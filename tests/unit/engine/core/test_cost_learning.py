"""From stage reports to costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.batch import GREEDY, NewRow, ScheduledBatch, ScoredTokens, StageSpans
from penstock.engine.core.cost_learning import CostLearner, step_times
from penstock.scheduler.cost_model import CostModel, StageCost
from penstock.trace.phases import Phase

MS = 10**6


def report(stage: int, began_ns: int, *steps: tuple[int, int, list[tuple[Phase, int]]]) -> StageSpans:
    """Steps (id, tokens, [(phase, milliseconds)])."""
    spans = [span for _, _, of_step in steps for span in of_step]
    index, places = 0, []
    for step, num_tokens, of_step in steps:
        places.append((index, step, num_tokens))
        index += len(of_step)
    return StageSpans(
        stage=stage,
        began_ns=began_ns,
        phases=bytes(phase for phase, _ in spans),
        durations_ns=[ms * MS for _, ms in spans],
        steps=places,
    )


LAST = [
    (Phase.TAKE, 1),
    (Phase.WAIT_PREV, 50),
    (Phase.COMM, 2),
    (Phase.FORWARD, 20),
    (Phase.SAMPLE, 8),
    (Phase.PUT, 3),
]


def decode(step: int, num_rows: int) -> ScheduledBatch:
    rows = list(range(num_rows))
    return ScheduledBatch(
        step_id=step,
        rows=rows,
        num_tokens=[1] * num_rows,
        start_positions=[7] * num_rows,
        need_sampled=[True] * num_rows,
    )


def test_waiting_is_no_cost_and_probes_are_no_steps() -> None:
    found = list(step_times(report(1, 0, (4, 2, LAST), (5, 0, LAST), (6, 1, LAST[:4]))))
    assert [times.step for times in found] == [4, 6]
    assert found[0][1:] == pytest.approx((0.020, 0.008, 0.006))
    assert found[1][1:] == pytest.approx((0.020, 0.0, 0.003))


def test_reports_teach_the_model_once_and_only_of_plans_that_were_submitted() -> None:
    costs = CostLearner(CostModel(1))
    costs.submitted(decode(4, 2), alone=False)
    costs.learn([report(0, 1, (3, 2, LAST))])
    assert costs.model.costs() is None, "step 3 was not submitted here"
    first = report(0, 2, (4, 2, LAST))
    costs.learn([first])
    (cost,) = costs.model.costs() or []
    assert (cost.read, cost.head_read, cost.overhead) == pytest.approx((0.020, 0.008, 0.006))
    costs.submitted(decode(5, 2), alone=False)
    slower = report(0, 3, (5, 2, [(Phase.FORWARD, 30), *LAST[4:]]))
    for _ in range(5):
        costs.learn([first, slower])
    (cost,) = costs.model.costs() or []
    assert cost.read == pytest.approx(0.022), "one slower step, counted once"


def test_steps_that_score_prompts_or_wait_for_the_store_say_nothing_of_others() -> None:
    costs = CostLearner(CostModel(1))
    costs.submitted(msgspec.structs.replace(decode(4, 2), scored=[ScoredTokens(0, 8, 1)]), alone=False)
    costs.submitted(msgspec.structs.replace(decode(5, 2), awaited=[3]), alone=False)
    costs.learn([report(0, 1, (4, 2, LAST), (5, 2, LAST))])
    assert costs.model.costs() is None


@pytest.mark.parametrize("what", [{"grammar": 7}, {"pooling": "mean"}], ids=["grammar", "pooling"])
def test_what_such_rows_do_in_the_sampling_phase_is_no_cost_of_the_head(what: dict[str, Any]) -> None:
    """Learned costs are equal with and without them; of their steps the rest is learnt."""
    slow = [*LAST[:4], (Phase.SAMPLE, 900), LAST[5]]

    def learned(special: dict[str, Any]) -> list[StageCost]:
        costs = CostLearner(CostModel(1))
        times = slow if special else LAST
        enters = NewRow(1, 0, "r", 3, [5, 6, 7], GREEDY, **special)
        leaves = NewRow(1, 1, "next", 3, [5, 6, 7], GREEDY)
        plans = [
            decode(0, 2),
            msgspec.structs.replace(decode(1, 4), new_rows=[enters]),
            decode(2, 4),
            msgspec.structs.replace(decode(3, 2), rows=[0, 2]),
            msgspec.structs.replace(decode(4, 4), freed_rows=[1], new_rows=[leaves]),
        ]
        for plan in plans:
            costs.submitted(plan, alone=False)
        with_row = [(1, 4, times), (2, 4, times)]
        costs.learn([report(0, 1, (0, 2, LAST), *with_row, (3, 2, LAST), (4, 4, LAST))])
        return costs.model.costs() or []

    assert learned(what) == learned({})
    (cost,) = learned(what)
    assert (cost.read, cost.head_read) == pytest.approx((0.020, 0.008))


def test_of_steps_of_such_rows_alone_the_layers_are_learnt() -> None:
    costs = CostLearner(CostModel(1))
    enters = NewRow(0, 0, "r", 3, [5, 6, 7], GREEDY, grammar=7)
    costs.submitted(msgspec.structs.replace(decode(0, 1), new_rows=[enters]), alone=False)
    costs.learn([report(0, 1, (0, 1, LAST))])
    (cost,) = costs.model.costs() or []
    assert (cost.read, cost.head_read, cost.per_sample) == pytest.approx((0.020, 0.0, 0.0))


def test_what_an_mtp_layer_reads_and_guesses_is_no_cost_of_the_head() -> None:
    costs = CostLearner(CostModel(1))
    costs.submitted(msgspec.structs.replace(decode(0, 2), mtp={0: 0, 1: 4}), alone=False)
    costs.learn([report(0, 1, (0, 2, LAST))])
    (cost,) = costs.model.costs() or []
    assert (cost.read, cost.head_read, cost.per_sample) == pytest.approx((0.020, 0.0, 0.0))


def test_steps_alone_and_shared_are_kept_apart() -> None:
    costs = CostLearner(CostModel(2))
    for step in range(2):
        costs.submitted(decode(step, 2), alone=step == 0)
    for stage in range(2):
        costs.learn([report(stage, 1, (0, 2, LAST), (1, 2, [(Phase.FORWARD, 40), *LAST[4:]]))])
    assert [cost.read for cost in costs.model.costs(alone=True) or []] == pytest.approx([0.020] * 2)
    assert [cost.read for cost in costs.model.costs() or []] == pytest.approx([0.040] * 2)


def test_shapes_of_steps_that_are_never_reported_do_not_pile_up() -> None:
    costs = CostLearner(CostModel(1))
    for step in range(5000):
        costs.submitted(decode(step, 1), alone=False)
    assert len(costs._steps) <= 4096
