"""Runs the model of one rank: plan in, tensors through, samples out.

`pipeline.stage` calls `begin` and `complete`, `pipeline.ports` and the stage call `embed`, `forward` and
`sample`. Owns nothing but its collaborators; knows neither neighbours nor messages, and keeps no state
between two calls except the row table's.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.attention.metadata import AnyKV
from penstock.batch import ScheduledBatch, StepResult
from penstock.models.interfaces import BeforeLayer, SupportsPP
from penstock.models.intermediate import IntermediateTensors
from penstock.runner.buffers import BufferPool
from penstock.runner.forward_batch import ForwardBatch, begin_batch, complete_batch
from penstock.runner.request_rows import RequestRows
from penstock.sample.logit_changes import TokenHistory
from penstock.sample.sampler import Sampler
from penstock.sample.sampling_rows import SamplingRows


class ModelRunner:
    """The model of one rank with its rows, buffers and KV storage.

    Args:
        model: the rank's layers.
        kv: storage of those layers, in order.
        rows: the row table; the owner of the token returns writes to it too.
        buffers: input buffers, as deep as the pipe.
        vocab_size: of the model.
    """

    def __init__(
        self, model: SupportsPP, kv: Sequence[AnyKV], rows: RequestRows, buffers: BufferPool, vocab_size: int
    ) -> None:
        self.rows = rows
        self._model = model
        self._kv = kv
        self._buffers = buffers
        history = TokenHistory(token_ids=rows.token_ids, prompt_len=rows.prompt_len)
        self._sampling = SamplingRows(history, vocab_size)
        self._sampler = Sampler()

    def reset(self) -> None:
        """Forget all requests; what the KV storage holds is nobody's then."""
        self.rows.reset()

    def admit(self, plan: ScheduledBatch) -> None:
        """Apply the plan's freed and new rows."""
        self.rows.apply(plan)
        for new_row in plan.new_rows:
            self._sampling.add(new_row.row, new_row.sampling)

    def begin(self, plan: ScheduledBatch) -> ForwardBatch:
        """Inputs of a plan that was admitted; the samples that it consumes may be to come."""
        return begin_batch(plan, self.rows, self._buffers.for_step(plan.step_id))

    def complete(self, batch: ForwardBatch) -> ForwardBatch:
        """The same, once the samples have come."""
        return complete_batch(batch, self.rows, self._buffers.for_step(batch.plan.step_id))

    def embed(self, batch: ForwardBatch) -> IntermediateTensors:
        """What the first layer takes. First stage only."""
        return self._model.embed(batch.input_ids)

    def forward(
        self, tensors: IntermediateTensors, batch: ForwardBatch, before_layer: BeforeLayer | None = None
    ) -> IntermediateTensors:
        """Run the own layers over the step's tokens and store their keys and values."""
        return self._model.forward(tensors, batch.positions, self._kv, batch.metadata, before_layer)

    def sample(self, tensors: IntermediateTensors, batch: ForwardBatch) -> StepResult:
        """Sample the plan's need-sampled rows and write the ids to the row table. Last stage only."""
        plan = batch.plan
        if not len(batch.sampled):
            return StepResult(step_id=plan.step_id, epoch=plan.epoch, digest=plan.digest)
        params = self._sampling.batch(batch.sampled.rows, batch.output_index)
        found = self._model.compute_candidates(tensors, batch.sample_indices, params.head)
        drawn = self._sampler.sample(found, params, batch.output_index)
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            digest=plan.digest,
            token_ids=[[token_id] for token_id in drawn.token_ids],
            num_rejected=[0] * len(drawn.token_ids),
            logprobs=[None if entry is None else [entry] for entry in drawn.logprobs],
            failed=drawn.failed,
        )
        self.rows.post_update(plan.step_id, batch.sampled, result.token_ids, result.num_rejected)
        return result
