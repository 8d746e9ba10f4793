"""An executor that passes calls on to another one, and notes its answers for a recording."""

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
    """The reports of an executor; those that the core's decisions depend on are noted.

    Args:
        executor: the executor whose reports they are.
        current: returns the call that the core is in; None: it is in none.
    """

    def __init__(self, executor: Executor, current: CurrentCall) -> None:
        self._executor, self._current = executor, current

    def built_grammars(self) -> list[BuiltGrammar]:
        """Return the outcomes of grammars as `Reports.built_grammars` does, and note them."""
        grammars = self._executor.reports.built_grammars()
        if (call := self._current()) is not None:
            if grammars:
                call.grammars[call.num_looks] = grammars
            call.num_looks += 1
        return grammars

    def spans(self) -> list[StageSpans]:
        """Return the timed work of each stage's first rank as `Reports.spans` does, and note it."""
        spans = self._executor.reports.spans()
        if (call := self._current()) is not None:
            call.spans.append(spans)
        return spans

    def stage_times(self) -> list[StageTimes]:
        """Return each stage's use of time as `Reports.stage_times` does, and note it."""
        times = self._executor.reports.stage_times()
        if (call := self._current()) is not None:
            call.stage_times.append(times)
        return times

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """Return the timed work of every rank without noting it, since no decision depends on it."""
        return self._executor.reports.rank_spans(seen)

    def finished_orders(self) -> list[OrderResult]:
        """Return the results of orders to copy KV blocks: none, as an engine with a store is not recorded."""
        return self._executor.reports.finished_orders()

    def store_use(self) -> StoreUse:
        """Return the ranks' use of the KV store without noting it, since no decision depends on it."""
        return self._executor.reports.store_use()

    def entry_answers(self) -> list[EntryAnswers]:
        """Return the ranks' answers about the KV store: none, as an engine with a store is not recorded."""
        return self._executor.reports.entry_answers()


class RecordedExecutor:
    """An executor that passes calls on to another one, and notes its plans, results and errors.

    Args:
        executor: the executor that does the work.
        current: returns the call that the core is in; None: it is in none.
    """

    def __init__(self, executor: Executor, current: CurrentCall) -> None:
        self._executor, self._current = executor, current
        self.reports = RecordedReports(executor, current)

    def submit_plan(self, plan: ScheduledBatch) -> int:
        """Submit a plan to the executor, and note it, with the error if it could not be sent."""
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
        """Return the results that the executor has received, and note them, or the error that it raises."""
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
        """Start the executor that does the work, and wait until its ranks are ready."""
        return self._executor.start()

    def poll_start(self) -> KVPlan | None:
        """Continue the start of the executor that does the work; return None until its ranks are ready."""
        return self._executor.poll_start()

    def call_store(self, rank: int, call: EntryCall) -> bool:
        """Pass a call to the KV store on to the executor; return whether it was sent."""
        return self._executor.call_store(rank, call)

    def exchange_link(self, order: LinkOrder) -> None:
        """Pass the order to replace a link between stages on to the executor."""
        self._executor.exchange_link(order)

    def shutdown(self) -> None:
        """Shut down the executor that does the work."""
        self._executor.shutdown()

    def abandon(self) -> None:
        """Close the connections of the executor that does the work, without a message."""
        self._executor.abandon()

    def wait_sources(self) -> list[int]:
        """Return the file descriptors that become readable when `poll_results` may have something."""
        return self._executor.wait_sources()
