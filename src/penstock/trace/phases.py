"""The phases of a stage's time: every instant belongs to one, so that they add up to the wall time.

A rank has one `PhaseClock`; `pipeline.stage`, the ports and the links tell it which phase begins. A
`StageReporter` sends the counted times to the core, about once a second while steps end (`batch.StageTimes`,
`batch.StageSpans`). This module depends on no plans, tensors or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from penstock.batch import StageSpans, StageTimes

REPORT_INTERVAL_NS = 1_000_000_000


class Phase(IntEnum):
    """The phases of a stage: it computes, moves data or waits."""

    NO_WORK = 0  # the pipe had room, but no request could run
    WAIT_PLAN = 1  # for the core
    TAKE = 2  # rows, inputs and embedding
    WAIT_TOKEN = 3  # for the samples of an earlier step
    WAIT_PREV = 4  # for the hidden states of the stage before
    COMM = 5  # copying into a link or out of it
    FORWARD = 6
    SAMPLE = 7
    PUT = 8  # results and token returns on their way
    WAIT_NEXT = 9  # for room: in the link to the next stage, or in a pipe that later stages keep full


BUSY = (Phase.FORWARD, Phase.SAMPLE)
BUBBLES = (Phase.NO_WORK, Phase.WAIT_PLAN, Phase.WAIT_TOKEN, Phase.WAIT_PREV, Phase.COMM, Phase.WAIT_NEXT)


def bubble_seconds(phase_ns: Sequence[int]) -> dict[str, float]:
    """Return the seconds of each bubble by the name of its cause.

    Args:
        phase_ns: [phases] nanoseconds, as in `batch.StageTimes`.
    """
    return {phase.name.lower(): phase_ns[phase] / 1e9 for phase in BUBBLES}


class PhaseClock:
    """A clock that counts the time of one thread by phase.

    Busy time is the thread's own CPU time in the phases that compute: while another process has its CPU core,
    the thread is not busy, though the wall clock runs. With a GPU, CPU time would count only launches. A rank
    on a GPU therefore has a `trace.device_clock.DeviceClock`.

    Args:
        wall, cpu: return the nanoseconds of the wall clock and of the thread's CPU time.
        keeps_spans: whether each span is kept until `take_spans`, besides the totals.
    """

    def __init__(
        self,
        wall: Callable[[], int] = time.monotonic_ns,
        cpu: Callable[[], int] = time.thread_time_ns,
        *,
        keeps_spans: bool = False,
    ) -> None:
        self._wall, self._cpu, self.keeps_spans = wall, cpu, keeps_spans
        self._span_phases, self._span_ns = bytearray(), list[int]()
        self._phase = Phase.NO_WORK
        self._started = self._since = wall()
        self._busy_since = 0
        self._busy_ns = 0
        self._totals = [0] * len(Phase)

    def begin(self, phase: Phase, was: Phase | None = None) -> Phase:
        """End the phase that runs, and begin another.

        Args:
            was: the phase to which the time since the last call is counted, if not to the phase that ran. A
                caller may learn only afterwards why it waited.

        Returns:
            The phase that has ended. The caller of a nested phase begins it again afterwards.
        """
        now = self._wall()
        before = self._phase
        ended, spent = before if was is None else was, now - self._since
        self._totals[ended] += spent
        if self.keeps_spans:
            self._span_phases.append(ended)
            self._span_ns.append(spent)
        if (before in BUSY) != (phase in BUSY):
            if before in BUSY:
                self._end_busy()
            else:
                self._begin_busy()
        self._phase, self._since = phase, now
        return before

    def await_device(self) -> None:
        """Wait for work that was launched on a device and is not finished; this time counts as `FORWARD`.

        Callers would wait for the work anyway, but in a phase that is not busy. On a CPU there is nothing to
        wait for: calls that compute return when the result is there.
        """

    @property
    def num_spans(self) -> int:
        """The number of spans that are kept now, which is the index of the span that runs."""
        return len(self._span_ns)

    def take_spans(self) -> tuple[int, bytes, list[int]]:
        """Return when the first kept span began, and the phase and nanoseconds of each span; forget them."""
        phases, durations = bytes(self._span_phases), self._span_ns
        self._span_phases, self._span_ns = bytearray(), []
        return self._since - sum(durations), phases, durations

    @property
    def last_change_ns(self) -> int:
        """The time at which the phase that runs began, by the wall clock."""
        return self._since

    def totals(self) -> tuple[int, int, list[int]]:
        """Return wall time since the start, busy time, and time by phase, in nanoseconds, up to now.

        Call it outside the busy phases, since busy time is added when such a phase ends.
        """
        self.begin(self._phase)
        return self._since - self._started, self._counted_busy_ns(), list(self._totals)

    def _begin_busy(self) -> None:
        self._busy_since = self._cpu()

    def _end_busy(self) -> None:
        self._busy_ns += self._cpu() - self._busy_since

    def _counted_busy_ns(self) -> int:
        return self._busy_ns


class _NobodysClock(PhaseClock):
    """A clock that counts nothing, for callers without a clock."""

    def begin(self, phase: Phase, was: Phase | None = None) -> Phase:
        return phase


NOBODYS = _NobodysClock()


class StageReporter:
    """Sends what a rank's clock has counted, about once a second while steps end.

    Args:
        stage: number of the stage.
        clock: the rank's clock.
        send: sends a report; must not block.
        exchanged: returns the nanoseconds so far of sums and gathers with the other ranks of the stage, and
            how many of these were spent waiting for them.
        tp_rank: number of the rank in its stage.
    """

    def __init__(
        self,
        stage: int,
        clock: PhaseClock,
        send: Callable[[StageTimes | StageSpans], None] = lambda report: None,
        exchanged: Callable[[], tuple[int, int]] = lambda: (0, 0),
        tp_rank: int = 0,
    ) -> None:
        self._stage, self.clock, self._send, self._exchanged = stage, clock, send, exchanged
        self._tp_rank = tp_rank
        self._steps: list[tuple[int, int, int]] = []
        self._prompt_tokens: dict[int, int] = {}
        self._num_steps = 0
        self._sent_wall_ns = self._sent_busy_ns = 0
        self._due_ns = clock.last_change_ns + REPORT_INTERVAL_NS

    def step_begun(self, step_id: int, num_tokens: int, prompt_tokens: int = 0) -> None:
        """Note that the phase that runs is the first of a step."""
        if self.clock.keeps_spans:
            self._steps.append((self.clock.num_spans, step_id, num_tokens))
            if prompt_tokens:
                self._prompt_tokens[step_id] = prompt_tokens
        self._num_steps += num_tokens > 0  # an empty plan is a probe

    def step_done(self, report_now: bool = False) -> None:
        """Note that a step has left the stage; to be called outside the busy phases."""
        if report_now or self.clock.last_change_ns >= self._due_ns:
            self._report()

    def _report(self) -> None:
        wall_ns, busy_ns, phase_ns = self.clock.totals()
        since = max(wall_ns - self._sent_wall_ns, 1)
        exchange_ns, exchange_wait_ns = self._exchanged()
        self._send(
            StageTimes(
                stage=self._stage,
                num_steps=self._num_steps,
                wall_ns=wall_ns,
                busy_ns=busy_ns,
                phase_ns=phase_ns,
                busy_ratio=(busy_ns - self._sent_busy_ns) / since,
                exchange_ns=exchange_ns,
                exchange_wait_ns=exchange_wait_ns,
            )
        )
        began_ns, phases, durations_ns = self.clock.take_spans()
        self._send(
            StageSpans(
                stage=self._stage,
                began_ns=began_ns,
                phases=phases,
                durations_ns=durations_ns,
                steps=self._steps,
                prompt_tokens=self._prompt_tokens,
                tp_rank=self._tp_rank,
            )
        )
        self._steps, self._prompt_tokens = [], {}
        self._sent_wall_ns, self._sent_busy_ns = wall_ns, busy_ns
        self._due_ns = self.clock.last_change_ns + REPORT_INTERVAL_NS
