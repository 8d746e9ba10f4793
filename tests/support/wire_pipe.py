"""Stages with wires between them, simulated in fake time, behind an executor that a whole core drives.

Each stage takes the time of its cost for a plan, one plan after the other; each wire holds any number. The
ranks are those of `fakes.FakeExecutor`, so that every plan is checked and every token is the oracle's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

from fakes import CoreRig, FakeClock, FakeExecutor
from penstock.batch import KNOWN, ScheduledBatch, SpansKey, StageSpans, StageTimes, StepResult
from penstock.config.engine import SchedulerConfig
from penstock.scheduler.cost_model import StageCost, StepShape
from penstock.trace.phases import Phase

REPORT_S = 1.0
PROBE_S = 0.0002  # of a stage for a plan without tokens


class WirePipe(FakeExecutor):
    """An executor whose results come when the clock says so.

    Args:
        clock: moves on while somebody polls and nothing has come.
        stages: their costs.
        others: of a `FakeExecutor`.

    Attributes:
        hop_s, return_s: of a wire from a stage to the next, and from the last to the first and the core.
        token_s: that is added to `hop_s` for each token.
        is_silent: no result comes any more.
    """

    def __init__(self, clock: FakeClock, stages: Sequence[StageCost], **others: Any) -> None:
        super().__init__(**(others | {"latency": None, "min_lag": 1}))
        self.hop_s = self.return_s = self.token_s = 0.0
        self.is_silent = False
        self.most_in_flight = 0  # plans with rows
        self._probe_step = -1
        self._clock = clock
        self._stages = stages
        self._free_at = [0.0] * len(stages)
        self._link_free_at = [0.0] * (len(stages) - 1)
        self._back_at: dict[int, float] = {}  # by step: when its tokens are at the first stage
        self._shows_at: deque[float] = deque()
        self._steps: list[list[tuple[int, int, float]]] = [[] for _ in stages]  # not reported
        self._busy_s = [0.0] * len(stages)
        self._num_steps = 0
        self._spans: list[StageSpans] = []
        self._reported_at = clock.now

    def submit_plan(self, plan: ScheduledBatch) -> int:
        digest = super().submit_plan(plan)
        if plan.rows:
            probes = self._probe_step > self._returned_step
            self.most_in_flight = max(self.most_in_flight, self.num_inflight - probes)
        else:
            self._probe_step = plan.step_id
        shape = StepShape.of(plan)
        sources = [self._back_at[step] for step in plan.token_from if step != KNOWN]
        ready = max([self._clock.now, *sources])
        for stage, cost in enumerate(self._stages):
            took_s = cost.seconds(shape) if shape.tokens else PROBE_S
            ready = self._free_at[stage] = max(ready, self._free_at[stage]) + took_s
            self._steps[stage].append((plan.step_id, shape.tokens, took_s))
            self._busy_s[stage] += took_s
            if stage < len(self._link_free_at):
                sent = max(ready, self._link_free_at[stage]) + self.token_s * shape.tokens
                self._link_free_at[stage] = sent
                ready = sent + self.hop_s
        self._num_steps += shape.tokens > 0
        self._back_at[plan.step_id] = max(ready + self.return_s, *self._shows_at, 0.0)
        self._shows_at.append(self._back_at[plan.step_id])
        return digest

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        if self.is_silent:
            self._clock.advance(timeout_s)
            return super().poll_results(0.0)
        if timeout_s > 0 and self._shows_at:
            self._clock.now = max(self._clock.now, min(self._shows_at[0], self._clock.now + timeout_s))
        while self._shows_at and self._shows_at[0] <= self._clock.now:
            self._shows_at.popleft()
            self.release(1)
        self._report()
        return super().poll_results(0.0)

    def spans(self) -> list[StageSpans]:
        return self._spans

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        return self._spans

    def stage_times(self) -> list[StageTimes]:
        return [
            StageTimes(
                stage=stage,
                num_steps=self._num_steps,
                wall_ns=0,
                busy_ns=round(busy_s * 1e9),
                phase_ns=[],
                busy_ratio=0.0,
            )
            for stage, busy_s in enumerate(self._busy_s)
        ]

    def _report(self) -> None:
        if self._clock.now - self._reported_at < REPORT_S:
            return
        self._reported_at = self._clock.now
        for stage, steps in enumerate(self._steps):
            if not steps:
                continue
            spans = StageSpans(
                stage=stage,
                began_ns=round(self._clock.now * 1e9),
                phases=bytes([Phase.FORWARD] * len(steps)),
                durations_ns=[round(took_s * 1e9) for _, _, took_s in steps],
                steps=[(index, step, tokens) for index, (step, tokens, _) in enumerate(steps)],
            )
            self._spans = [*self._spans[-20:], spans]
            steps.clear()


class WireRig(CoreRig):
    """A core over a `WirePipe`; a request of any length that nothing but its length ends.

    Args:
        stages: costs of the stages.
        knows_costs: plans are sized by them.
        others: of a `CoreRig`.
    """

    def __init__(
        self,
        *stages: StageCost,
        wire_s: float = 0.0,
        knows_costs: bool = True,
        max_num_seqs: int = 64,
        **others: Any,
    ) -> None:
        clock = FakeClock()
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=512, inter_token_target_ms=1e9
        )
        defaults: dict[str, Any] = {
            "num_stages": len(stages),
            "costs": (stages[0], stages[0]) if knows_costs else None,
            "scheduler": scheduler,
            "block_size": 64,
            "num_blocks": 768,
            "max_model_len": 1 << 14,
            "eos_token_ids": (),
            "clock": clock,
            "executor_class": lambda **arguments: self._pipe(clock, stages, wire_s, **arguments),
        }
        super().__init__(**(defaults | others))

    @staticmethod
    def _pipe(clock: FakeClock, stages: Sequence[StageCost], wire_s: float, **arguments: Any) -> WirePipe:
        pipe = WirePipe(clock, stages, **arguments)
        pipe.hop_s = pipe.return_s = wire_s
        return pipe

    @property
    def pipe(self) -> WirePipe:
        assert isinstance(self.executor, WirePipe)
        return self.executor

    def lay_wire(self, wire_s: float) -> None:
        """From now on a hop takes so long, and the way back."""
        self.pipe.hop_s = self.pipe.return_s = wire_s

    def add_streams(self, count: int, prompt_len: int = 4, max_tokens: int = 1 << 13) -> None:
        for number in range(count):
            self.add(f"r{len(self.requests)}-{number}", prompt_len, max_tokens=max_tokens, ignore_eos=True)

    def run(self, seconds: float) -> int:
        """Let so much time pass; how many tokens have come meanwhile."""
        count, until = 0, self.clock.now + seconds
        while self.clock.now < until:
            before = self.clock.now
            updates = self.core.step(timeout_s=1.0)
            count += sum(len(update.token_ids) for update in updates)
            for update in updates:
                self.updates[update.request_id].append(update)
            if self.clock.now == before and not updates and not self.core.num_inflight:
                self.clock.advance(0.05)
        self.core.check_invariants()
        return count

    def rate(self, seconds: float) -> float:
        """Tokens a second from now on."""
        began = self.clock.now
        return self.run(seconds) / (self.clock.now - began)
