"""D6: time by phase, with clocks of our own."""

from __future__ import annotations

import random

import pytest

from penstock.batch import StageSpans, StageTimes
from penstock.trace.phases import BUSY, REPORT_INTERVAL_NS, Phase, PhaseClock, StageReporter


class Clocks:
    """Wall and CPU time that pass only when told to."""

    def __init__(self) -> None:
        self.wall_ns, self.cpu_ns = 1000, 50
        self.phases = PhaseClock(lambda: self.wall_ns, lambda: self.cpu_ns)

    def pass_time(self, wall_ns: int, cpu_ns: int = 0) -> None:
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns

    def seconds_of(self, phase: Phase) -> int:
        return self.phases.totals()[2][phase]


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_d6_phases_add_up_to_the_wall_time(clocks: Clocks) -> None:
    numbers, expected = random.Random(1), [0] * len(Phase)
    current = Phase.NO_WORK
    for _ in range(200):
        spent = numbers.randrange(100)
        clocks.pass_time(spent)
        expected[current] += spent
        current = numbers.choice(list(Phase))
        clocks.phases.begin(current)
    wall_ns, _, phase_ns = clocks.phases.totals()
    assert phase_ns == expected
    assert wall_ns == sum(phase_ns) == clocks.wall_ns - 1000


def test_d6_busy_is_cpu_time_of_forward_and_sampling_only(clocks: Clocks) -> None:
    for phase in Phase:
        clocks.phases.begin(phase)
        clocks.pass_time(100, cpu_ns=10 + phase)  # pushed aside for most of the time
    clocks.phases.begin(Phase.NO_WORK)
    assert clocks.phases.totals()[1] == sum(10 + phase for phase in BUSY)


def test_a_nested_phase_gives_way_to_the_one_around_it(clocks: Clocks) -> None:
    clocks.phases.begin(Phase.FORWARD)
    clocks.pass_time(3, cpu_ns=3)
    before = clocks.phases.begin(Phase.WAIT_PREV)
    clocks.pass_time(40, cpu_ns=1)  # spinning is not computing
    clocks.phases.begin(before)
    clocks.pass_time(5, cpu_ns=5)
    clocks.phases.begin(Phase.PUT)
    assert clocks.seconds_of(Phase.FORWARD) == 8
    assert clocks.seconds_of(Phase.WAIT_PREV) == 40
    assert clocks.phases.totals()[1] == 8


def test_waiting_can_turn_out_to_have_been_something_else(clocks: Clocks) -> None:
    clocks.phases.begin(Phase.WAIT_PLAN)
    clocks.pass_time(7)
    clocks.phases.begin(Phase.TAKE, was=Phase.NO_WORK)
    clocks.pass_time(2)
    assert clocks.seconds_of(Phase.WAIT_PLAN) == 0
    assert clocks.seconds_of(Phase.NO_WORK) == 7
    assert clocks.seconds_of(Phase.TAKE) == 2


def test_reports_come_once_a_second_and_tell_the_last_ones_share(clocks: Clocks) -> None:
    told: list[StageTimes | StageSpans] = []
    reporter = StageReporter(3, clocks.phases, told.append)
    for step in range(40):
        reporter.step_begun(step, num_tokens=step % 2)  # every other is a probe
        clocks.phases.begin(Phase.FORWARD)
        busy = REPORT_INTERVAL_NS // 20 if step < 20 else 0
        clocks.pass_time(REPORT_INTERVAL_NS // 20, cpu_ns=busy)
        clocks.phases.begin(Phase.PUT)
        clocks.pass_time(REPORT_INTERVAL_NS // 20)
        clocks.phases.begin(Phase.WAIT_PLAN)
        reporter.step_done()
    sent = [times for times in told if isinstance(times, StageTimes)]
    assert [times.num_steps for times in sent] == [5, 10, 15, 20]
    assert [times.busy_ratio for times in sent] == [0.5, 0.5, 0.0, 0.0]
    assert all(sum(times.phase_ns) == times.wall_ns and times.stage == 3 for times in sent)
    assert sent[-1].busy_ns == REPORT_INTERVAL_NS


def test_spans_are_kept_until_they_are_reported_with_their_steps(clocks: Clocks) -> None:
    sent: list[StageTimes | StageSpans] = []
    phases = PhaseClock(lambda: clocks.wall_ns, lambda: clocks.cpu_ns, keeps_spans=True)
    reporter = StageReporter(2, phases, sent.append)
    for step in range(4):
        phases.begin(Phase.TAKE, was=Phase.NO_WORK)
        reporter.step_begun(step, 10 + step)
        clocks.pass_time(3)
        phases.begin(Phase.FORWARD)
        clocks.pass_time(REPORT_INTERVAL_NS // 2)
        phases.begin(Phase.PUT)
        reporter.step_done()
        clocks.pass_time(5)
    spans = [told for told in sent if isinstance(told, StageSpans)]
    assert [told.began_ns for told in spans] == [1000, 1000 + REPORT_INTERVAL_NS + 11]
    named = [[Phase(phase).name for phase in told.phases] for told in spans]
    assert named[0] == ["NO_WORK", "TAKE", "FORWARD", "NO_WORK", "TAKE", "FORWARD", "PUT"]
    assert [told.steps for told in spans] == [[(1, 0, 10), (4, 1, 11)], [(1, 2, 12), (4, 3, 13)]]
    assert sum(map(sum, (told.durations_ns for told in spans))) == phases.last_change_ns - 1000
    assert phases.num_spans == 0


def test_reports_say_which_rank_has_sent_them_and_which_steps_had_prompts(clocks: Clocks) -> None:
    sent: list[StageTimes | StageSpans] = []
    phases = PhaseClock(lambda: clocks.wall_ns, lambda: clocks.cpu_ns, keeps_spans=True)
    reporter = StageReporter(2, phases, sent.append, tp_rank=3)
    for step, prompt_tokens in enumerate([0, 40, 0, 0]):
        phases.begin(Phase.TAKE)
        reporter.step_begun(step, 64, prompt_tokens)
        clocks.pass_time(REPORT_INTERVAL_NS // 2)
        phases.begin(Phase.PUT)
        reporter.step_done()
    spans = [told for told in sent if isinstance(told, StageSpans)]
    assert [told.prompt_tokens for told in spans] == [{1: 40}, {}]
    assert {told.tp_rank for told in spans} == {3}


def test_a_clock_that_keeps_no_spans_does_not_grow(clocks: Clocks) -> None:
    for _ in range(100):
        clocks.phases.begin(Phase.TAKE)
    assert clocks.phases.num_spans == 0


def test_an_idle_stage_reports_at_the_end_of_its_next_step(clocks: Clocks) -> None:
    told: list[StageTimes | StageSpans] = []
    reporter = StageReporter(0, clocks.phases, told.append)
    clocks.pass_time(5 * REPORT_INTERVAL_NS)
    clocks.phases.begin(Phase.PUT)
    reporter.step_done()
    assert [t.phase_ns[Phase.NO_WORK] for t in told if isinstance(t, StageTimes)] == [5 * REPORT_INTERVAL_NS]
