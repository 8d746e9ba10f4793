"""An executor whose answers are noted while the core is in a call; the executor behind it does the work."""

from __future__ import annotations

from collections.abc import Callable, Container

from penstock.batch import (
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
from penstock.decisions.core_call import CoreCall, Unsent
from penstock.errors import PenstockError
from penstock.executor.base import Executor, KVPlan

CurrentCall = Callable[[], CoreCall | None]


class RecordedReports:
    """The reports of an executor, which are noted.

    Args:
        executor: the executor whose reports they are.
        current: returns the call that the core is in.
    """

    def __init__(self, executor: Executor, current: CurrentCall) -> None:
        self._executor, self._current = executor, current

    def built_grammars(self) -> list[BuiltGrammar]:
        """See `Reports.built_grammars`."""
        grammars = self._executor.reports.built_grammars()
        if (call := self._current()) is not None:
            if grammars:
                call.grammars[call.num_looks] = grammars
            call.num_looks += 1
        return grammars

    def spans(self) -> list[StageSpans]:
        """See `Reports.spans`."""
        spans = self._executor.reports.spans()
        if (call := self._current()) is not None:
            call.spans.append(spans)
        return spans

    def stage_times(self) -> list[StageTimes]:
        """See `Reports.stage_times`."""
        times = self._executor.reports.stage_times()
        if (call := self._current()) is not None:
            call.stage_times.append(times)
        return times

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """See `Reports.rank_spans`; they decide nothing, and are not noted."""
        return self._executor.reports.rank_spans(seen)

    def finished_orders(self) -> list[OrderResult]:
        """See `Reports.finished_orders`; without a store there are none."""
        return self._executor.reports.finished_orders()

    def store_use(self) -> StoreUse:
        """See `Reports.store_use`; it decides nothing, and is not noted."""
        return self._executor.reports.store_use()

    def entry_answers(self) -> list[EntryAnswers]:
        """See `Reports.entry_answers`; without a store there are none."""
        return self._executor.reports.entry_answers()


class RecordedExecutor:
    """An executor whose answers are noted.

    Args:
        executor: the executor that does the work.
        current: returns the call that the core is in.
    """

    def __init__(self, executor: Executor, current: CurrentCall) -> None:
        self._executor, self._current = executor, current
        self.reports = RecordedReports(executor, current)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """See `Executor.submit_plan`."""
        call = self._current()
        if call is not None:
            call.steps.append(plan)
        try:
            return self._executor.submit_plan(plan)
        except PenstockError as error:
            if call is not None:
                call.steps.append(Unsent(error.info()))
            raise

    def poll_results(self, timeout_s: float) -> list[StepResult]:
        """See `Executor.poll_results`."""
        call = self._current()
        try:
            results = self._executor.poll_results(timeout_s)
        except PenstockError as error:
            if call is not None:
                call.steps.append(error.info())
            raise
        if call is not None:
            call.steps.append(results)
        return results

    def start(self) -> KVPlan:
        """See `Executor.start`."""
        return self._executor.start()

    def poll_start(self) -> KVPlan | None:
        """See `Executor.poll_start`."""
        return self._executor.poll_start()

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """See `Executor.call_store`."""
        return self._executor.call_store(rank, call)

    def exchange_link(self, order: LinkOrder) -> None:
        """See `Executor.exchange_link`."""
        self._executor.exchange_link(order)

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        self._executor.shutdown()

    def abandon(self) -> None:
        """See `Executor.abandon`."""
        self._executor.abandon()

    def wait_sources(self) -> list[int]:
        """See `Executor.wait_sources`."""
        return self._executor.wait_sources()
