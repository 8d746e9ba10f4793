"""Keeps what ranks report besides results: times, outcomes of orders, and built grammars.

Answers to calls about the KV stores of hosts are kept, too. Held by `executor.base`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator

from penstock.batch import (
    NO_STORE_USE,
    BuiltGrammar,
    EntryAnswers,
    GrammarsBuilt,
    OrderResult,
    OrdersDone,
    OrderStatus,
    SpansKey,
    StageSpans,
    StageTimes,
    StoreUse,
)

TRACE_S = 10
_SEVERITY: tuple[OrderStatus, ...] = ("done", "late", "failed")


class RankReports:
    """The reports of all ranks in one epoch, kept until the core takes them.

    Implements `executor.base.Reports`.

    Args:
        num_ranks: number of ranks, each of which answers every order.
        num_last: number of ranks on the last stage, which build grammars.
    """

    def __init__(self, num_ranks: int, num_last: int = 1) -> None:
        self._num_ranks, self._num_last = num_ranks, num_last
        self._times: dict[int, StageTimes] = {}
        self._spans: dict[tuple[int, int], deque[StageSpans]] = {}  # by stage and rank of it
        self._use = NO_STORE_USE  # the sum since the last `store_use`
        self._answers: dict[int, list[OrderStatus]] = {}  # by order: of each rank that has answered
        self._entries: list[EntryAnswers] = []
        self._grammars: dict[int, list[BuiltGrammar]] = {}  # by number: of each rank that has reported

    @property
    def has_answers(self) -> bool:
        """Whether the core has something to take: an answer of a rank, or the outcome of a grammar.

        A grammar has an outcome once all ranks of the last stage have reported on it. A single rank's answer
        to an order counts already.
        """
        return bool(self._answers or self._entries) or any(map(self._is_told, self._grammars.values()))

    def keep(self, report: StageTimes | StageSpans | OrdersDone | EntryAnswers | GrammarsBuilt) -> None:
        """Keep a report: answers until they are taken, the newest times, timed work for `TRACE_S` seconds."""
        if isinstance(report, StageTimes):
            self._times[report.stage] = report
        elif isinstance(report, StageSpans):
            self._keep_spans(report)
        elif isinstance(report, EntryAnswers):
            self._entries.append(report)
        elif isinstance(report, GrammarsBuilt):
            for grammar in _each(report):
                self._grammars.setdefault(grammar.number, []).append(grammar)
        else:
            self._use = self._use.plus(report.use)
            for order in report.done:
                self._answers.setdefault(order, []).append("done")
            for order in report.failed:
                self._answers.setdefault(order, []).append("failed")
            for order in report.late:
                self._answers.setdefault(order, []).append("late")

    def _is_told(self, reports: list[BuiltGrammar]) -> bool:
        return len(reports) == self._num_last

    def _keep_spans(self, spans: StageSpans) -> None:
        kept = self._spans.setdefault((spans.stage, spans.tp_rank), deque())
        kept.append(spans)
        while kept[0].began_ns < spans.began_ns - TRACE_S * 10**9:
            kept.popleft()

    def stage_times(self) -> list[StageTimes]:
        """Return each stage's newest report of its use of time. Implements `Reports.stage_times`."""
        return [self._times[stage] for stage in sorted(self._times)]

    def spans(self) -> list[StageSpans]:
        """Return the timed work of each stage's first rank in the last `TRACE_S` seconds.

        Implements `Reports.spans`.
        """
        return [spans for rank in sorted(self._spans) if rank[1] == 0 for spans in self._spans[rank]]

    def rank_spans(self, seen: Container[SpansKey]) -> list[StageSpans]:
        """Return the timed work of every rank that is newer than that rank's reports in `seen`.

        Implements `Reports.rank_spans`.
        """
        return [spans for rank in sorted(self._spans) for spans in _behind(self._spans[rank], seen)]

    def store_use(self) -> StoreUse:
        """Return the ranks' summed use of the KV store since the last call.

        Implements `Reports.store_use`.
        """
        use, self._use = self._use, NO_STORE_USE
        return use

    def finished_orders(self) -> list[OrderResult]:
        """Return and forget the results of orders that all ranks have answered.

        Implements `Reports.finished_orders`.
        """
        finished = [
            OrderResult(order, max(answers, key=_SEVERITY.index))
            for order, answers in self._answers.items()
            if len(answers) == self._num_ranks
        ]
        for result in finished:
            del self._answers[result.order]
        return finished

    def entry_answers(self) -> list[EntryAnswers]:
        """Return and forget the ranks' answers to store calls. Implements `Reports.entry_answers`."""
        answers, self._entries = self._entries, []
        return answers

    def built_grammars(self) -> list[BuiltGrammar]:
        """Return and forget the outcomes of grammars on which all ranks of the last stage have reported.

        Implements `Reports.built_grammars`.
        """
        built = [
            max(reports, key=_gravity)
            for _, reports in sorted(self._grammars.items())
            if self._is_told(reports)
        ]
        for grammar in built:
            del self._grammars[grammar.number]
        return built


def _behind(reports: Iterable[StageSpans], seen: Container[SpansKey]) -> list[StageSpans]:
    """Return the reports of one rank that are newer than its newest one in `seen`; all if none is there."""
    news: list[StageSpans] = []
    for spans in reports:
        if spans.key in seen:
            news.clear()
        else:
            news.append(spans)
    return news


def _each(report: GrammarsBuilt) -> Iterator[BuiltGrammar]:
    """Yield the outcome of each grammar in the report of one rank."""
    for number in report.built:
        yield BuiltGrammar(number)
    for number, why in report.failed.items():
        yield BuiltGrammar(number, why)
    for number, why in report.unable.items():
        yield BuiltGrammar(number, why, may_be_good=True)


def _gravity(report: BuiltGrammar) -> tuple[bool, bool]:
    """Return the weight of a report, the gravest highest.

    A fault of the grammar itself outweighs a fault of a rank, and a fault of a rank outweighs a success.
    """
    return bool(report.why), not report.may_be_good
