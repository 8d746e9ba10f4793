"""The core loses its pipe and goes on over another one; every rank of which has forgotten everything."""

from __future__ import annotations

import pytest

from fakes import CoreRig
from penstock.config.engine import SchedulerConfig
from penstock.errors import ErrorInfo

STAGES = 3


def _killed() -> ErrorInfo:
    return ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)


def one_row() -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, prefill_chunk=8)


def rig_with_requests() -> CoreRig:
    rig = CoreRig(num_stages=STAGES, async_depth=1, num_blocks=24, recovers=True)
    rig.add("greedy", 5, max_tokens=9)
    rig.add("seeded", 11, temperature=1.0, seed=7, max_tokens=12)
    rig.add("long", 23, max_tokens=20)
    return rig


@pytest.mark.parametrize("num_steps", range(0, 40, 3))
def test_r4_requests_go_on_where_they_were(num_steps: int) -> None:
    rig = rig_with_requests()
    for _ in range(num_steps):
        rig.step(timeout_s=1.0)
    before = {name: rig.tokens(name) for name in rig.requests}
    rig.executor.lose_stage(1, "killed")
    assert rig.step() == []
    assert rig.core.loss is not None
    assert rig.core.loss.stage == 1
    assert not rig.core.has_pipe
    rig.add("late", 4, max_tokens=3)
    assert rig.step() == [], "nothing runs, and nothing ends, without a pipe"
    assert {name: rig.tokens(name) for name in before} == before

    rig.rejoin()
    rig.run_until_idle()
    for arrival, name in enumerate(rig.requests):
        assert rig.result(name) == rig.expected(name, arrival)
    assert rig.core.loss is None
    assert rig.allocator.num_free_blocks == 24


def test_r4_losing_the_pipe_again_and_again() -> None:
    rig = rig_with_requests()
    for _ in range(12):
        for _ in range(4):
            rig.step(timeout_s=1.0)
        assert rig.core.lose_epoch(_killed()) == []
        rig.rejoin()
    rig.run_until_idle()
    for arrival, name in enumerate(rig.requests):
        assert rig.result(name) == rig.expected(name, arrival)
    assert rig.core.stats().epoch == 12


def test_a_request_that_is_there_at_two_losses_and_gains_nothing_is_quarantined() -> None:
    rig = CoreRig(num_stages=STAGES, latency=None, recovers=True)
    rig.add("poison", 5, max_tokens=9)
    rig.step()
    rig.core.lose_epoch(_killed())
    rig.rejoin()
    rig.step()
    assert rig.core.num_inflight == 1
    (update,) = rig.core.lose_epoch(_killed())
    assert update.error is not None
    assert (update.request_id, update.error.code) == ("poison", "quarantined")
    rig.rejoin()
    rig.add("good", 3, max_tokens=4)
    rig.run_until_idle()
    assert rig.result("good") == rig.expected("good", 1)


def test_when_it_takes_long_only_those_that_have_started_end() -> None:
    rig = CoreRig(num_stages=STAGES, recovers=True, scheduler=one_row())
    rig.add("running", 5, max_tokens=9)
    rig.step()
    rig.add("waiting", 3, max_tokens=4)
    (update,) = rig.core.lose_epoch(_killed(), ends="started")
    assert (update.request_id, update.error) == ("running", _killed())
    rig.rejoin()
    rig.run_until_idle()
    assert rig.result("waiting") == rig.expected("waiting", 1)


def test_r15_where_nobody_may_wait_all_requests_end_and_later_ones_go_on() -> None:
    rig = CoreRig(num_stages=STAGES, recovers=True, scheduler=one_row())
    rig.add("running", 5, max_tokens=9)
    rig.step()
    rig.add("waiting", 3, max_tokens=4)
    updates = rig.core.lose_epoch(_killed(), ends="all")
    assert {update.request_id: update.error for update in updates} == {
        "running": _killed(),
        "waiting": _killed(),
    }
    assert rig.core.stats().is_loss_lasting
    rig.rejoin()
    rig.add("later", 3, max_tokens=4)
    rig.run_until_idle()
    assert rig.result("later") == rig.expected("later", 2)


def test_r5_the_loss_is_told_until_a_step_has_crossed() -> None:
    rig = CoreRig(num_stages=STAGES, latency=None, recovers=True)
    rig.settle()
    rig.core.lose_epoch(_killed())
    assert rig.core.stats().loss == _killed()
    rig.rejoin()
    rig.step()
    assert rig.core.num_inflight == 1, "the probe is due at once"
    assert rig.core.stats().loss == _killed()
    rig.settle()
    assert rig.core.stats().loss is None


def test_waiting_requests_expire_without_a_pipe_too() -> None:
    rig = CoreRig(num_stages=STAGES, recovers=True)
    rig.core.lose_epoch(_killed())
    rig.add("a", 4)
    rig.clock.advance(1e4)
    (update,) = rig.step()
    assert update.error is not None
    assert update.error.code == "queue_timeout"


def test_a_request_that_is_aborted_meanwhile_is_gone() -> None:
    rig = rig_with_requests()
    for _ in range(8):
        rig.step(timeout_s=1.0)
    rig.core.lose_epoch(_killed())
    assert rig.abort("long")
    rig.rejoin()
    rig.run_until_idle()
    assert rig.finish_reason("long") is None
    assert rig.result("greedy") == rig.expected("greedy", 0)
