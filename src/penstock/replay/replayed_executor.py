"""An executor without ranks: it gives a replayed core the answers that were recorded."""

from __future__ import annotations

from collections.abc import Container

from penstock.batch import (
    NO_STORE_USE,
    BuiltGrammar,
    EntryAnswers,
    EntryCall,
    LinkOrder,
    OrderResult,
    ScheduledBatch,
    SpansKey,
    StageSpans,
    StageTimes,
    StepResult,
    StoreUse,
)
from penstock.executor.base import KVPlan
from penstock.executor.rank_reports import RankReports
from penstock.replay.recorded_answers import RecordedAnswers


class ReplayedReports:
    """The recorded reports of one epoch.

    Reports of timed work are returned for as long as with real ranks: a record has each of them only once.

    Args:
        answers: the answers of the record that is being replayed.
    """

    def __init__(self, answers: RecordedAnswers) -> None:
        self._answers = answers
        self._kept = RankReports(0)

    def spans(self) -> list[StageSpans]:
        """Return the recorded work of each stage's first rank in the last seconds (`Reports.spans`)."""
        for report in self._answers.spans():
            self._kept.keep(report)
        return self._kept.spans()

    def stage_times(self) -> list[StageTimes]:
        """Return each stage's recorded use of time."""
        return self._answers.stage_times()

    def built_grammars(self) -> list[BuiltGrammar]:
        """Return the recorded outcomes of grammars."""
        return self._answers.grammars()

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """Return nothing: only clients read the work of all ranks, and a replay has none."""
        return []

    def finished_orders(self) -> list[OrderResult]:
        """Return nothing: a recorded engine has no KV store."""
        return []

    def store_use(self) -> StoreUse:
        """Return `NO_STORE_USE`: a recorded engine has no KV store."""
        return NO_STORE_USE

    def entry_answers(self) -> list[EntryAnswers]:
        """Return nothing: a recorded engine has no KV store."""
        return []


class ReplayedExecutor:
    """The executor of a core that is replayed.

    Args:
        answers: the answers of the record that is being replayed.
    """

    def __init__(self, answers: RecordedAnswers) -> None:
        self._answers = answers
        self.reports = ReplayedReports(answers)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Compare the plan with the recorded one, and return 0 as its digest: recorded plans have none."""
        self._answers.submit(plan)
        return 0

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """Return the recorded results, or raise the recorded error, at once: a replay never waits."""
        return self._answers.poll()

    def start(self) -> KVPlan:
        raise AssertionError("ranks that are replayed are there from the beginning")

    def poll_start(self) -> KVPlan | None:
        raise AssertionError("ranks that are replayed are there from the beginning")

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Refuse the call: a recorded engine has no KV store."""
        return False

    def exchange_link(self, order: LinkOrder) -> None:
        """Do nothing: a replay has no links."""

    def shutdown(self) -> None:
        """Do nothing: a replay has no ranks."""

    def abandon(self) -> None:
        """Do nothing: a replay has no ranks."""

    def wait_sources(self) -> list[int]:
        return []
