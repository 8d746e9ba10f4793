"""An engine core whose calls are recorded, so that its decisions can be replayed (`decisions.recorder`).

`engine.core.core_assembly` makes it in place of an `EngineCore` if recording was requested. It decides
nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.batch import RankLoaded
from penstock.decisions.core_call import (
    Abortion,
    Addition,
    Asked,
    Entrance,
    GivenUp,
    Loss,
    Order,
    Turn,
)
from penstock.decisions.recorder import DecisionRecorder
from penstock.engine.core.core import EngineCore
from penstock.engine.core.operations_in_force import Ticket
from penstock.errors import ErrorInfo
from penstock.executor.base import Executor
from penstock.operations import Operation
from penstock.process.control import EndedRequests
from penstock.process.endpoints import NO_RESTARTS, Restarts
from penstock.request import GenerationRequest, RequestUpdate

Result = TypeVar("Result")


class RecordedCore(EngineCore):
    """An `EngineCore` that reports each call, and the updates that the call returns, to a recorder.

    Args:
        recorder: takes the calls; the core's clock and executor report to it too. The caller has begun a
            record of the making of this core, which the constructor ends.
        parts, settings: arguments of `EngineCore`.
    """

    def __init__(self, recorder: DecisionRecorder, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._recorder = recorder
        recorder.end()

    def add_request(
        self, request: GenerationRequest, output_ids: Sequence[int] | None = None, num_scores: int = 0
    ) -> None:
        self._recorded(
            Addition(request, output_ids, num_scores),
            lambda: super(RecordedCore, self).add_request(request, output_ids, num_scores),
        )

    def abort(self, request_id: str) -> bool:
        return self._recorded(Abortion(request_id), lambda: super(RecordedCore, self).abort(request_id))

    def step(self, timeout_s: float = 0.0) -> list[RequestUpdate]:
        return self._recorded(Turn(timeout_s), lambda: super(RecordedCore, self).step(timeout_s))

    def operate(self, ticket: Ticket, operation: Operation) -> list[RequestUpdate]:
        return self._recorded(Order(operation), lambda: super(RecordedCore, self).operate(ticket, operation))

    def lose_epoch(self, error: ErrorInfo, *, ends: EndedRequests = "none") -> list[RequestUpdate]:
        return self._recorded(
            Loss(error, ends), lambda: super(RecordedCore, self).lose_epoch(error, ends=ends)
        )

    def enter_epoch(
        self,
        epoch: int,
        executor: Executor,
        restarts: Restarts = NO_RESTARTS,
        ranks: Sequence[RankLoaded] = (),
    ) -> None:
        recorded = self._recorder.executor(executor)
        self._recorded(
            Entrance(epoch, ranks),
            lambda: super(RecordedCore, self).enter_epoch(epoch, recorded, restarts, ranks),
        )

    def fail(self, error: ErrorInfo) -> list[RequestUpdate]:
        return self._recorded(GivenUp(error), lambda: super(RecordedCore, self).fail(error))

    def close(self) -> None:
        super().close()
        self._recorder.close()

    def _recorded(self, asked: Asked, call: Callable[[], Result]) -> Result:
        if not self._recorder.begin(asked):
            return call()
        try:
            result = call()
        except BaseException:
            self._recorder.end(is_refused=True)
            raise
        self._recorder.end(result if isinstance(result, list) else ())
        return result
