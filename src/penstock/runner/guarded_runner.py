"""Turns a lack of device memory into the failure of one plan, so that the stage goes on.

    stage 0    embed ▶ forward: no memory ──▶ a frame that says so
    stage 1    forward is left out        ──▶ a frame that says so
    last       no sample                  ──▶ a result with the error; failed samples to the earlier stages

Rows, block tables and token returns move on as they do in a step that is computed, so that all stages agree
about later steps. The scheduler ends the requests of the plan (`scheduler.request_endings`), since not all of
their keys and values are there. A stage of several ranks is an exception, because its ranks wait for each
other within a step. If one of them has no memory, the error ends the epoch; weights and processes stay
(`rank.rank`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from penstock.batch import StepResult
from penstock.errors import MEMORY_REMEDY, PlanMemoryError
from penstock.models.interfaces import BeforeLayer
from penstock.models.intermediate import IntermediateTensors
from penstock.runner.forward_batch import ForwardBatch
from penstock.runner.model_runner import ModelRunner

_NO_MEMORY = (torch.OutOfMemoryError, MemoryError)

_logger = logging.getLogger(__name__)


class FailedTensors(IntermediateTensors):
    """A stand-in for the hidden states of a step that was not computed, with the reason.

    It has the same shape, but all its elements are one number in memory: that of the failed stage.

    Args:
        num_tokens, width, dtype: those of the hidden states that were not computed.
        failure: the reason.
    """

    def __init__(self, num_tokens: int, width: int, dtype: torch.dtype, failure: PlanMemoryError) -> None:
        number = torch.full((1, 1), float(failure.stage or 0), dtype=dtype).expand(num_tokens, width)
        super().__init__({"hidden_states": number, "residual": number})
        self.failure = failure


class GuardedRunner(ModelRunner):
    """A `ModelRunner` that turns an allocation which fails into the failure of its plan alone.

    Args:
        runner: the arguments of `ModelRunner`.
        stage: the number of the stage.
        width, dtype: size and type of hidden states, [num_tokens, width].
        is_alone: no other rank shares the stage's layers. If one does, the failure is raised instead.
    """

    def __init__(self, *runner: Any, stage: int, width: int, dtype: torch.dtype, is_alone: bool) -> None:
        super().__init__(*runner)
        self._stage = stage
        self._width, self._dtype = width, dtype
        self._is_alone = is_alone

    def embed(self, batch: ForwardBatch) -> IntermediateTensors:
        return self._guarded(batch, partial(super().embed, batch))

    def forward(
        self, tensors: IntermediateTensors, batch: ForwardBatch, before_layer: BeforeLayer | None = None
    ) -> IntermediateTensors:
        if tensors.failure is not None:
            return tensors
        output = self._guarded(batch, partial(super().forward, tensors, batch, before_layer))
        if output.failure is not None:
            with contextlib.suppress(PlanMemoryError):
                # Receive the step's frame, if that is still to come: else the next step would receive it.
                tensors["hidden_states"]
        return output

    def skip(self, tensors: IntermediateTensors, batch: ForwardBatch) -> IntermediateTensors:
        return self._guarded(batch, partial(super().skip, tensors, batch))

    def sample(self, tensors: IntermediateTensors, batch: ForwardBatch) -> StepResult:
        if tensors.failure is not None:
            return self._failed_result(batch, tensors.failure)
        try:
            return super().sample(tensors, batch)
        except _NO_MEMORY as error:
            return self._failed_result(batch, self._failure(batch.plan.step_id, error))

    def with_scores(
        self, result: StepResult, tensors: IntermediateTensors, batch: ForwardBatch
    ) -> StepResult:
        return self._extended(result, batch, partial(super().with_scores, result, tensors, batch))

    def with_guesses(
        self, result: StepResult, tensors: IntermediateTensors, batch: ForwardBatch
    ) -> StepResult:
        return self._extended(result, batch, partial(super().with_guesses, result, tensors, batch))

    def _guarded(
        self, batch: ForwardBatch, compute: Callable[[], IntermediateTensors]
    ) -> IntermediateTensors:
        try:
            return compute()
        except PlanMemoryError as error:  # a stage before has failed, as its frame says
            failure = error.with_traceback(None)
        except _NO_MEMORY as error:
            failure = self._failure(batch.plan.step_id, error)
        return FailedTensors(batch.num_tokens, self._width, self._dtype, failure)

    def _extended(
        self, result: StepResult, batch: ForwardBatch, extend: Callable[[], StepResult]
    ) -> StepResult:
        """Return the result that `extend` makes of `result`; if it lacks memory, `result` with the error.

        The samples of the result are on their way to other stages already, and so stay as they are.
        """
        if result.error is not None:
            return result
        try:
            return extend()
        except _NO_MEMORY as error:
            scores: list[Any] = [[] for _ in batch.plan.scored]
            failure = self._failure(batch.plan.step_id, error).info()
            return msgspec.structs.replace(result, scores=scores, guesses={}, error=failure)

    def _failure(self, step_id: int, error: BaseException) -> PlanMemoryError:
        """Return the error of a step in which an allocation failed, after freeing cached memory.

        If other ranks share the stage, the error is raised.
        """
        _logger.warning("stage %d had no memory left in step %d: %s", self._stage, step_id, error)
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        failure = PlanMemoryError(
            f"stage {self._stage} had no memory left for step {step_id}.",
            remedy=MEMORY_REMEDY,
            stage=self._stage,
        )
        if not self._is_alone:
            raise failure from error
        return failure

    def _failed_result(self, batch: ForwardBatch, failure: PlanMemoryError) -> StepResult:
        """Return the result of a step that was not computed, and note it in the row table."""
        plan = batch.plan
        if batch.is_void:
            return self._void(batch)
        sizes = plan.window_sizes
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            digest=plan.digest,
            token_ids=[[-1] for _ in sizes],
            num_rejected=[size - 1 for size in sizes],
            logprobs=[None for _ in sizes],
            failed=list(range(len(sizes))),
            scores=[[] for _ in plan.scored],
            pooled=[b"" for _ in plan.pooled],
            error=failure.info(),
        )
        self.rows.post_update(plan.step_id, batch.sampled, result.token_ids, result.num_rejected)
        return result
