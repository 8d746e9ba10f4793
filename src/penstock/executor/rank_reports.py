"""What ranks tell beside results: where their time went, and what became of orders. Kept for whoever asks."""

from __future__ import annotations

from collections import deque

from penstock.batch import NO_STORE_USE, OrdersDone, Outcome, StageSpans, StageTimes, StoreUse

TRACE_S = 10


class RankReports:
    """Args:
    num_ranks: that answer each order.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._times: dict[int, StageTimes] = {}
        self._spans: dict[int, deque[StageSpans]] = {}
        self._use = NO_STORE_USE  # that has not been taken
        self._answers: dict[int, list[bool | None]] = {}  # by order

    @property
    def has_answers(self) -> bool:
        """Whether an order has been answered by any rank, and not been taken."""
        return bool(self._answers)

    def keep(self, report: StageTimes | StageSpans | OrdersDone) -> None:
        """The newest times of a stage, its spans of the last seconds, every answer."""
        if isinstance(report, StageTimes):
            self._times[report.stage] = report
        elif isinstance(report, StageSpans):
            self._keep_spans(report)
        else:
            self._use = self._use.plus(report.use)
            for order in report.done:
                self._answers.setdefault(order, []).append(True)
            for order in report.failed:
                self._answers.setdefault(order, []).append(False)
            for order in report.late:
                self._answers.setdefault(order, []).append(None)

    def _keep_spans(self, spans: StageSpans) -> None:
        kept = self._spans.setdefault(spans.stage, deque())
        kept.append(spans)
        while kept[0].began_ns < spans.began_ns - TRACE_S * 10**9:
            kept.popleft()

    def stage_times(self) -> list[StageTimes]:
        """See `Executor.stage_times`."""
        return [self._times[stage] for stage in sorted(self._times)]

    def spans(self) -> list[StageSpans]:
        """See `Executor.spans`."""
        return [spans for stage in sorted(self._spans) for spans in self._spans[stage]]

    def store_use(self) -> StoreUse:
        """See `Executor.store_use`."""
        use, self._use = self._use, NO_STORE_USE
        return use

    def finished_orders(self) -> list[Outcome]:
        """See `Executor.finished_orders`."""
        finished = [
            (order, False if False in told else None if None in told else True)
            for order, told in self._answers.items()
            if len(told) == self._num_ranks
        ]
        for order, _ in finished:
            del self._answers[order]
        return finished
