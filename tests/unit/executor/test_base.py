"""The core's end of all ranks: handshake, order, and the first cause of a failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hand_core import make_plan, new_row
from penstock.batch import (
    AllocateKV,
    EntryAnswers,
    EntryCall,
    LinkOrder,
    RankFailed,
    RankLoaded,
    RankReady,
    ScheduledBatch,
    Shutdown,
    StageSpans,
    StageTimes,
    StepResult,
    decode_to_rank,
    encode,
)
from penstock.engine.stats import stage_memory
from penstock.errors import (
    CheckpointError,
    ErrorInfo,
    LinkClosedError,
    ProtocolError,
    StageLostError,
    WaitTimeoutError,
)
from penstock.executor.base import LINK_LEAD_STEPS, RankChannels, first_cause
from penstock.executor.rank_reports import TRACE_S, RankReports
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.trace.phases import Phase

LONG = 30.0


class Fixture:
    """Three ranks whose ends the test holds."""

    def __init__(self) -> None:
        cores, self.ranks = QueueChannel.star(["stage 0", "stage 1", "stage 2"])
        self.now = 0.0
        self.waits: list[float | None] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.core = RankChannels(cores, wait=self._wait, clock=lambda: self.now)
        self._cores = cores

    def _wait(self, timeout_s: float | None) -> None:
        """Returns at once if something is there; else the given time passes on the injected clock."""
        self.waits.append(timeout_s)
        self.on_wait()
        QueueChannel.wait_any(self._cores, 0.001)
        if not any(end._inbox.is_ready for end in self._cores):
            self.now += timeout_s or 0.0

    def loaded(self, stage: int, max_blocks: int, block_bytes: int = 10) -> None:
        message = RankLoaded(
            stage=stage,
            max_blocks=max_blocks,
            block_bytes=block_bytes,
            tensor_bytes=1,
            bytes_read=1,
            load_seconds=0.0,
            is_invariant=False,
        )
        self.ranks[stage].send(encode(message))

    def failed(self, stage: int, kind: str, message: str) -> None:
        info = ErrorInfo(kind=kind, message=message, stage=stage)
        self.ranks[stage].send(encode(RankFailed(stage=stage, error=info)))


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_r4_a_handshake_ends_when_the_epoch_does(fixture: Fixture) -> None:
    """A rank that died before it connected leaves no trace at the socket."""
    fixture.loaded(0, 60)
    with pytest.raises(LinkClosedError, match="epoch 0 ended before all stages had joined"):
        fixture.core.handshake(LONG, is_over=lambda: len(fixture.waits) > 3)
    assert fixture.now < LONG / 2


def test_d9_all_stages_get_the_minimum_and_the_rest_is_reported(fixture: Fixture) -> None:
    for stage, max_blocks in ((2, 70), (0, 100), (1, 60)):
        fixture.loaded(stage, max_blocks, block_bytes=10 + stage)

    def answer() -> None:
        for stage, rank in enumerate(fixture.ranks):
            frame = rank.recv(0)
            assert frame is not None
            assert decode_to_rank(frame) == AllocateKV(num_blocks=60)
            rank.send(encode(RankReady(stage=stage)))

    fixture.on_wait = answer
    plan = fixture.core.handshake(LONG)
    assert len(fixture.waits) == 1
    assert fixture.core.poll_start() == plan
    assert plan.num_blocks == 60
    assert [rank.max_blocks for rank in plan.ranks] == [100, 60, 70]
    memory = stage_memory(plan.ranks, plan.num_blocks)
    assert [stage.stranded_bytes for stage in memory] == [400, 0, 120]


def test_a_failure_while_loading_is_raised_as_it_was(fixture: Fixture) -> None:
    fixture.loaded(0, 10)
    fixture.failed(1, "CheckpointError", "model.safetensors: tensor x: too short")
    with pytest.raises(CheckpointError, match="tensor x") as caught:
        fixture.core.handshake(LONG)
    assert caught.value.stage == 1
    assert caught.value.exit_code == 3


def test_ranks_that_stay_silent_are_named(fixture: Fixture) -> None:
    fixture.loaded(1, 10)
    with pytest.raises(WaitTimeoutError, match="30 s for stage 0, stage 2 to load its weights"):
        fixture.core.handshake(LONG)
    assert fixture.now == pytest.approx(LONG)


def test_a_plan_reaches_every_rank_as_the_same_bytes(fixture: Fixture) -> None:
    plan = make_plan(0, freed_rows=[3])
    fixture.core.submit_plan(plan)
    frames = [rank.recv(0) for rank in fixture.ranks]
    assert frames == [encode(plan)] * 3


def test_c11_every_rank_has_all_plans_in_order_before_any_rank_has_answered(fixture: Fixture) -> None:
    """No stage hands requests on, and no plan waits until a stage has computed the one before."""
    for step in range(4):
        fixture.core.submit_plan(make_plan(step, new_rows=[new_row(step, [1, 2])]))
    frames = [[rank.recv(0) for _ in range(4)] for rank in fixture.ranks]
    assert frames == [frames[0]] * 3
    plans = [decode_to_rank(frame) for frame in frames[0] if frame is not None]
    assert [plan.step_id for plan in plans if isinstance(plan, ScheduledBatch)] == [0, 1, 2, 3]
    assert [rank.recv(0) for rank in fixture.ranks] == [None] * 3


def test_d4_r14_each_plan_is_sealed_as_the_next_of_the_log(fixture: Fixture) -> None:
    log = DecisionLog()
    for step in range(5):
        digest = fixture.core.submit_plan(ScheduledBatch(step_id=step, freed_rows=[step]))
        for rank in fixture.ranks:
            frame = rank.recv(0)
            assert frame is not None
            plan = decode_to_rank(frame)
            assert isinstance(plan, ScheduledBatch)
            assert plan.digest == digest
        log.append(plan, lambda _: [])


def test_g1_a_link_is_ordered_by_the_next_plan_alone_and_soon_enough_for_its_ends_to_meet(
    fixture: Fixture,
) -> None:
    log, orders = DecisionLog(), []
    for step in range(3):
        if step == 1:
            for number, first_step in ((7, 900), (8, 0)):
                fixture.core.exchange_link(
                    LinkOrder(number=number, first_step=first_step, stage=0, sender=1, receiver=2)
                )
        fixture.core.submit_plan(ScheduledBatch(step_id=step))
        (plan,) = {rank.recv(0) for rank in fixture.ranks}
        assert plan is not None
        received = decode_to_rank(plan)
        assert isinstance(received, ScheduledBatch)
        log.append(received, lambda _: [])
        orders.append([(order.number, order.first_step) for order in received.links])
    assert orders == [[], [(8, 1 + LINK_LEAD_STEPS), (7, 900)], []]


def test_bytes_that_are_no_message_name_the_stage_that_sent_them(fixture: Fixture) -> None:
    fixture.ranks[1].send(b"\xc1")
    with pytest.raises(ProtocolError, match="cannot be read") as caught:
        fixture.core.poll_results(0.0)
    assert caught.value.stage == 1


def test_results_come_in_order_and_poll_waits_only_when_there_are_none(fixture: Fixture) -> None:
    for step in range(3):
        fixture.ranks[2].send(encode(StepResult(step_id=step)))
    assert [r.step_id for r in fixture.core.poll_results(LONG)] == [0, 1, 2]
    assert fixture.waits == []
    assert fixture.core.poll_results(0.0) == []
    assert fixture.waits == []
    assert fixture.core.poll_results(5.0) == []
    assert fixture.waits == [5.0]


def test_the_first_cause_is_told_and_not_its_consequences(fixture: Fixture) -> None:
    fixture.failed(0, "LinkClosedError", "link 0 -> 1 was closed")
    fixture.failed(2, "WaitTimeoutError", "nothing came")
    fixture.failed(1, "StageLostError", "stage 1 failed in step 5: RuntimeError: boom")
    with pytest.raises(StageLostError, match=r"stage 1 is lost.*step 5.*boom") as caught:
        fixture.core.poll_results(0.0)
    assert caught.value.stage == 1


def test_a_rank_that_goes_without_a_word_is_lost(fixture: Fixture) -> None:
    fixture.ranks[1].close()
    with pytest.raises(
        StageLostError, match="stage 1 is lost: stage 1 closed its connection without an error"
    ) as caught:
        fixture.core.poll_results(0.0)
    assert caught.value.stage == 1


def test_the_words_of_a_dying_rank_outweigh_its_silence() -> None:
    lonely = ErrorInfo(kind="LinkClosedError", message="the other end is closed", stage=0)
    gone = ErrorInfo(kind="StageLostError", message="gone", code="rank_gone", stage=1)
    cause = ErrorInfo(kind="CheckpointError", message="bad", stage=2)
    assert first_cause([lonely, gone, cause]) is cause
    assert first_cause([lonely, gone]) is gone
    assert first_cause([lonely]) is lonely


def test_who_waited_in_vain_explains_who_misses_it() -> None:
    stalled = WaitTimeoutError("step 7 has been in the stages for 5 s.").info()
    missed = LinkClosedError("channel core - stage 0: the other end is closed.").info()
    assert first_cause([missed, stalled]) is stalled
    assert first_cause([stalled, missed]) is stalled


def test_a_rank_that_misses_its_neighbour_waits_for_the_neighbours_own_words(fixture: Fixture) -> None:
    fixture.failed(0, "LinkClosedError", "link 0 -> 1 was closed")
    fixture.on_wait = lambda: fixture.failed(1, "NumericalError", "the cause")
    with pytest.raises(StageLostError, match="stage 1 is lost: the cause"):
        fixture.core.poll_results(0.0)


def test_results_sent_before_a_failure_are_delivered_first(fixture: Fixture) -> None:
    fixture.ranks[2].send(encode(StepResult(step_id=0)))
    fixture.failed(1, "NumericalError", "the cause")
    assert fixture.core.poll_results(0.0) == [StepResult(step_id=0)]
    fixture.core.submit_plan(make_plan(1))
    for _ in range(2):
        with pytest.raises(StageLostError, match="the cause"):
            fixture.core.poll_results(0.0)


def test_another_message_than_a_result_is_refused(fixture: Fixture) -> None:
    fixture.ranks[0].send(encode(RankReady(stage=0)))
    with pytest.raises(ProtocolError, match="expected StepResult from a rank, found RankReady"):
        fixture.core.poll_results(0.0)


def test_closing_says_shutdown_to_those_that_are_left_and_may_be_repeated(fixture: Fixture) -> None:
    fixture.ranks[0].close()
    fixture.core.shutdown()
    fixture.core.shutdown()
    for rank in fixture.ranks[1:]:
        frame = rank.recv(0)
        assert frame is not None
        assert decode_to_rank(frame) == Shutdown()
        with pytest.raises(LinkClosedError):
            rank.recv(0)


def test_a_rank_that_spoke_before_it_went_is_quoted() -> None:
    """Its end must not make its words the second cause: "gone" is only for those who said nothing."""
    core_end, rank_end = QueueChannel.pair()
    ranks = RankChannels([core_end], wait=lambda timeout_s: None)
    words = WaitTimeoutError("waited 60 s for the hidden states of step 7", stage=0).info()
    rank_end.send(encode(RankFailed(stage=0, error=words)))
    rank_end.close()
    with pytest.raises(StageLostError, match="hidden states of step 7"):
        ranks.poll_results(0.0)


def test_d6_reports_of_time_are_put_aside_and_old_spans_forgotten(fixture: Fixture) -> None:
    def times(stage: int, num_steps: int) -> StageTimes:
        return StageTimes(
            stage=stage, num_steps=num_steps, wall_ns=1, busy_ns=1, phase_ns=[0] * len(Phase), busy_ratio=0.5
        )

    def spans(stage: int, second: int) -> StageSpans:
        return StageSpans(
            stage=stage, began_ns=second * 10**9, phases=b"", durations_ns=[], steps=[(0, second, 1)]
        )

    assert fixture.core.reports.stage_times() == []
    for second in range(TRACE_S + 5):
        fixture.ranks[1].send(encode(times(1, second)))
        fixture.ranks[1].send(encode(spans(1, second)))
    fixture.ranks[0].send(encode(spans(0, 2)))
    fixture.ranks[0].send(encode(times(0, 9)))
    fixture.ranks[2].send(encode(StepResult(step_id=4)))
    assert fixture.core.poll_results(LONG) == [StepResult(step_id=4)]
    assert fixture.core.reports.stage_times() == [times(0, 9), times(1, TRACE_S + 4)]
    kept = [spans(1, second) for second in range(4, TRACE_S + 5)]
    assert fixture.core.reports.spans() == [spans(0, 2), *kept]


def test_who_looks_on_gets_of_each_rank_what_came_behind_the_report_that_was_seen() -> None:
    def spans(stage: int, rank: int, second: int) -> StageSpans:
        return StageSpans(
            stage=stage, began_ns=second * 10**9, phases=b"", durations_ns=[], steps=[], tp_rank=rank
        )

    reports = RankReports(num_ranks=3)
    kept = [spans(stage, rank, second) for stage, rank in ((0, 0), (0, 1), (1, 0)) for second in range(3)]
    for report in kept:
        reports.keep(report)
    assert reports.rank_spans([]) == kept
    assert reports.spans() == kept[:3] + kept[6:], "others of a stage do not teach the core what steps cost"
    seen = [spans(0, 0, 1).key, spans(0, 1, 2).key, spans(1, 0, 99).key]
    assert reports.rank_spans(seen) == [kept[2], *kept[6:]]


def test_g1_a_call_about_a_hosts_store_goes_to_one_rank_and_its_answer_ends_the_wait(
    fixture: Fixture,
) -> None:
    call = EntryCall(number=7, what="count", names=[b"name"], share=b"share")
    assert fixture.core.call_store(1, call)
    frame = fixture.ranks[1].recv(0)
    assert frame is not None
    assert decode_to_rank(frame) == call
    assert fixture.ranks[0].recv(0) is fixture.ranks[2].recv(0) is None
    answers = EntryAnswers(counts={7: 1})
    fixture.ranks[1].send(encode(answers))
    assert fixture.core.poll_results(LONG) == []
    assert fixture.now < LONG
    assert fixture.core.reports.entry_answers() == [answers]


def test_g1_a_call_to_a_rank_that_has_gone_is_not_sent(fixture: Fixture) -> None:
    fixture.ranks[1].close()
    assert not fixture.core.call_store(1, EntryCall(number=7, what="empty"))
