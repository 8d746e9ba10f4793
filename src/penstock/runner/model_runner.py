"""Runs the model of one rank: plan in, tensors through, samples and vectors out.

`pipeline.stage` calls `admit`, `begin`, `complete` and `forward` or `skip`; `pipeline.ports` calls `embed`,
`sample`, `with_scores` and `with_guesses`. The runner knows neither neighbours nor messages. What it keeps
from step to step is in its collaborators, above all the row table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.attention.metadata import AnyKV
from penstock.batch import ScheduledBatch, ScoredTokens, StepResult
from penstock.kernels.candidates import HeadOutput, HeadRequest
from penstock.models.interfaces import BeforeLayer, SupportsPP
from penstock.models.intermediate import IntermediateTensors
from penstock.runner.buffers import BufferPool
from penstock.runner.forward_batch import ForwardBatch, begin_batch, complete_batch, input_ids
from penstock.runner.mtp_guesser import NO_GUESSER, NoGuesser, states_of
from penstock.runner.request_rows import RequestRows
from penstock.sample.grammar_rows import NoGrammars
from penstock.sample.logit_changes import TokenHistory
from penstock.sample.pooling import PoolingRows
from penstock.sample.prompt_scores import ScoredRows, score
from penstock.sample.sampler import Sampler
from penstock.sample.sampling_rows import SamplingRows
from penstock.sample.windows import accept_drafts


class ModelRunner:
    """The model of one rank with its row table, input buffers and KV storage: it computes the steps of plans.

    Attributes:
        rows: the row table.
        guesser: guesses tokens with the MTP layer (a layer that predicts further tokens), where there is one.
        sampling: how each row is sampled.
        grammars: as given, or a stand-in.

    Args:
        model: the rank's layers.
        kv: storage of the keys and values of those layers, in order.
        rows: the row table; on earlier stages `pipeline.token_return` writes sampled tokens to it.
        buffers: input buffers, one set for each plan that may be in flight.
        vocab_size: size of the model's vocabulary.
        grammars: limits samples to what grammars allow, where this rank samples; None: nothing does.
    """

    def __init__(
        self,
        model: SupportsPP,
        kv: Sequence[AnyKV],
        rows: RequestRows,
        buffers: BufferPool,
        vocab_size: int,
        grammars: NoGrammars | None = None,
    ) -> None:
        self.rows = rows
        self._model = model
        self._kv = kv
        self._buffers = buffers
        history = TokenHistory(token_ids=rows.token_ids, prompt_len=rows.prompt_len)
        self.sampling = SamplingRows(history, vocab_size)
        self.guesser: NoGuesser = NO_GUESSER
        self._sampler = Sampler()
        self.grammars = grammars or NoGrammars()
        self._pooling = PoolingRows()

    def reset(self) -> None:
        """Forget all requests, since the epoch is over; the contents of the KV storage are void then."""
        self.rows.reset()
        self.guesser.reset()
        self.grammars.reset()
        self._pooling.reset()

    def close(self) -> None:
        """Close what builds and holds grammars, since the rank ends."""
        self.grammars.close()

    def admit(self, plan: ScheduledBatch) -> None:
        """Apply the plan's freed and new rows (requests that leave and enter) to the tables of this rank."""
        self.rows.apply(plan)
        self.grammars.drop(plan.dropped_grammars)
        # Rows are freed before new requests get them, as in `RequestRows.apply`.
        for row in plan.freed_rows:
            self.grammars.free(row)
        self._pooling.apply(plan)
        self.guesser.admit(plan)
        for new_row in plan.new_rows:
            self.sampling.add(new_row.row, new_row.sampling)
            self.grammars.add(new_row)
        if plan.drafts:
            self.grammars.expect({plan.rows[index]: plan.compared_drafts(index) for index in plan.drafts})

    def begin(self, plan: ScheduledBatch) -> ForwardBatch:
        """Return the inputs of a plan that was admitted, as far as they do not need samples still to come."""
        return begin_batch(plan, self.rows, self._buffers.for_step(plan.step_id))

    def complete(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the final inputs of a step, once the samples that it consumes are in the row table."""
        batch = complete_batch(batch, self.rows, self._buffers.for_step(batch.plan.step_id))
        self.guesser.begin(batch)
        return batch

    def embed(self, batch: ForwardBatch) -> IntermediateTensors:
        """Return the embeddings of the step's token ids, [num_tokens, hidden]. First stage only."""
        return self._model.embed(input_ids(batch, self.rows, self._buffers.for_step(batch.plan.step_id)))

    def forward(
        self, tensors: IntermediateTensors, batch: ForwardBatch, before_layer: BeforeLayer | None = None
    ) -> IntermediateTensors:
        """Run the rank's own layers over the step's tokens, and store their keys and values.

        Args:
            tensors: the named input tensors, [num_tokens, hidden] each.
            before_layer: called before each layer with its number on this rank; None: nothing is.

        Returns:
            The named output tensors, of the same shapes.
        """
        return self._model.forward(tensors, batch.positions, self._kv, batch.metadata, before_layer)

    def skip(self, tensors: IntermediateTensors, batch: ForwardBatch) -> IntermediateTensors:
        """Wait until the tensors have come, and return them as they are: the step need not be computed.

        Args:
            tensors: [num_tokens, hidden] each.
        """
        tensors["hidden_states"]  # reading it waits until it has come
        return tensors

    def sample(self, tensors: IntermediateTensors, batch: ForwardBatch) -> StepResult:
        """Sample the rows that the plan says, and write the ids to the row table. Last stage only.

        It also gathers the vectors of pooled prompts. A void step, which rests on a wrong guess, yields no
        ids.

        Args:
            tensors: the result of `forward` for this step, [num_tokens, hidden].

        Returns:
            The sampled ids and the vectors, for the core. `with_scores` and `with_guesses` add to it.
        """
        plan = batch.plan
        if batch.is_void:
            return self._void(batch)
        # First: the final norm may write over the states of tokens, so that it can be taken once only. If the
        # guesser keeps the final states here, pooling and sampling below read those.
        self.guesser.prepare(plan, tensors)
        pooled = self._pooling.step(plan, lambda indices: self._final_states(tensors, indices))
        if not len(batch.sampled):
            return StepResult(step_id=plan.step_id, epoch=plan.epoch, digest=plan.digest, pooled=pooled)
        samples, rows = batch.samples, batch.sampled.rows
        params = self.sampling.batch(samples.rows, samples.output_index)
        head = self.grammars.constrained(params.head, samples.rows)
        if head is not params.head:
            params = replace(params, head=head)
        indices = self._buffers.for_step(plan.step_id).sample_indices.publish(samples.indices)
        head_output = self._candidates(tensors, indices, head)
        drawn = self._sampler.sample(head_output, params, samples.output_index)
        # Before `accept`, which drops the masks of the drafts.
        reach = self.grammars.reach(rows, list(map(len, samples.drafts)))
        accepted = accept_drafts(drawn, samples.drafts, reach)
        self.grammars.accept(rows, accepted.token_ids)
        is_finite = head_output.candidates.is_finite
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            digest=plan.digest,
            token_ids=accepted.token_ids,
            num_rejected=accepted.num_rejected,
            logprobs=accepted.logprobs,
            failed=list(accepted.failed),
            unmet={
                index: self.grammars.reason(int(rows[index]))
                for index, sample in accepted.failed.items()
                if is_finite[sample]
            },
            pooled=pooled,
        )
        self.rows.post_update(plan.step_id, batch.sampled, result.token_ids, result.num_rejected)
        return result

    def _void(self, batch: ForwardBatch) -> StepResult:
        """Return the result of a window behind a wrong guess: no ids, and all its tokens taken back."""
        plan = batch.plan
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            digest=plan.digest,
            token_ids=[[]],
            num_rejected=plan.num_tokens,
            logprobs=[None],
        )
        self.rows.post_update(plan.step_id, batch.sampled, result.token_ids, result.num_rejected)
        return result

    def with_scores(
        self, result: StepResult, tensors: IntermediateTensors, batch: ForwardBatch
    ) -> StepResult:
        """Return the result with the log-probabilities of the plan's scored prompt tokens. Last stage only.

        No state of the step is needed both here and for sampling. A row is sampled behind the last token of
        its prompt, and no prompt token is behind that one to be scored.

        Args:
            tensors: the tensors that were given to `sample`, [num_tokens, hidden].
        """

        def head(indices: Tensor, request: HeadRequest) -> HeadOutput:
            return self._candidates(tensors, indices, request)

        parts = [self._scored_rows(scored, batch) for scored in batch.plan.scored]
        return msgspec.structs.replace(result, scores=score(parts, head, batch.positions.device))

    def with_guesses(
        self, result: StepResult, tensors: IntermediateTensors, batch: ForwardBatch
    ) -> StepResult:
        """Return the result with the tokens that the MTP layer guesses for the rows in `ScheduledBatch.mtp`.

        The result of a void step stays as it is. Last stage only.

        Args:
            tensors: the tensors that were given to `sample`, [num_tokens, hidden].
        """
        if batch.is_void:
            return result
        return msgspec.structs.replace(result, guesses=self.guesser.guesses(tensors, batch, result))

    def _scored_rows(self, scored: ScoredTokens, batch: ForwardBatch) -> ScoredRows:
        row, end = batch.plan.rows[scored.place], scored.first + scored.count
        first_token = batch.metadata.query_starts[scored.place]
        first_index = first_token + scored.first - 1 - batch.starts[scored.place]
        return ScoredRows(
            indices=np.arange(first_index, first_index + scored.count),
            token_ids=self.rows.token_ids[row, scored.first : end],
            num_top=self.sampling.num_prompt_logprobs(row),
        )

    def _final_states(self, tensors: IntermediateTensors, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the final states at these indices, [len(indices), hidden], on the host."""
        at, normed = torch.from_numpy(indices).to(tensors["hidden_states"].device), states_of(tensors)
        found = self._model.final_states(tensors, at) if normed is None else normed[at]
        states: NDArray[np.float32] = found.float().cpu().numpy()
        return states

    def _candidates(self, tensors: IntermediateTensors, indices: Tensor, request: HeadRequest) -> HeadOutput:
        """Return the candidates or logits that `request` asks for, behind the step's tokens `indices`."""
        normed = states_of(tensors)
        if normed is None:
            return self._model.compute_candidates(tensors, indices, request)
        return self.guesser.candidates(normed[indices], request)
