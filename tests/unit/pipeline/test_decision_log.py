"""The decision log: equal histories have equal digests, and no others (row d4, R14)."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest

from hand_core import new_row
from penstock.batch import ScheduledBatch
from penstock.errors import ProtocolError
from penstock.pipeline.decision_log import DecisionLog


def plans(epoch: int = 0, first_step: int = 0, count: int = 4) -> list[ScheduledBatch]:
    return [ScheduledBatch(step_id=first_step + i, epoch=epoch, freed_rows=[i]) for i in range(count)]


def nobody(plan: ScheduledBatch) -> list[str]:
    return []


def sealed(log: DecisionLog, entries: list[ScheduledBatch]) -> list[ScheduledBatch]:
    return [log.seal(entry) for entry in entries]


@pytest.mark.parametrize(("epoch", "first_step"), [(0, 0), (7, 0), (7, 123)])
def test_r14_who_applies_the_cores_plans_has_its_digest_after_each(epoch: int, first_step: int) -> None:
    core, ranks = DecisionLog(epoch, first_step), [DecisionLog(epoch, first_step) for _ in range(3)]
    for plan in plans(epoch, first_step):
        wire = core.seal(plan)
        for rank in ranks:
            rank.append(wire, nobody)
        assert {rank.digest for rank in ranks} == {core.digest} == {wire.digest}
        assert {rank.next_step for rank in ranks} == {core.next_step} == {plan.step_id + 1}


def test_d4_the_digest_of_a_plan_stands_for_all_before_it() -> None:
    """One plan changed anywhere, or two exchanged, changes every digest from there on."""
    entries = plans()
    digests = [plan.digest for plan in sealed(DecisionLog(), entries)]
    for index in range(len(entries)):
        other = [*entries]
        other[index] = msgspec.structs.replace(other[index], freed_rows=[99])
        found = [plan.digest for plan in sealed(DecisionLog(), other)]
        assert [a == b for a, b in zip(found, digests, strict=True)] == [i < index for i in range(4)]
    orders = {sealed(DecisionLog(), list(order))[-1].digest for order in permutations(entries)}
    assert len(orders) == 24


def test_d4_an_epoch_begins_a_chain_of_its_own() -> None:
    same = ScheduledBatch(step_id=5, freed_rows=[1])
    begins = [(epoch, first_step) for epoch in range(5) for first_step in range(5)]
    assert len({DecisionLog(*begin).seal(same).digest for begin in begins}) == len(begins)


def test_d4_a_plan_of_another_history_is_refused_with_step_and_requests() -> None:
    core, rank = DecisionLog(), DecisionLog()
    rank.append(DecisionLog().seal(ScheduledBatch(step_id=0, freed_rows=[1])), nobody)
    core.seal(ScheduledBatch(step_id=0, freed_rows=[2]))
    plan = core.seal(ScheduledBatch(step_id=1, new_rows=[new_row(0, [1], name="a")]))
    with pytest.raises(ProtocolError, match=r"step 1 .*digest expected 0x\w+, found 0x.*the step: a, b\."):
        rank.append(plan, lambda _: ["a", "b"])
    assert rank.next_step == 1


@pytest.mark.parametrize(("epoch", "step_id"), [(0, 1), (1, 0), (0, 3)])
def test_dr1_a_plan_out_of_turn_is_refused(epoch: int, step_id: int) -> None:
    rank = DecisionLog()
    complaint = rf"\(0, 0\), found \({epoch}, {step_id}\)\. Requests of the step: x"
    with pytest.raises(ProtocolError, match=complaint):
        rank.append(DecisionLog().seal(ScheduledBatch(step_id=step_id, epoch=epoch)), lambda _: ["x"])
