"""Guesses the next tokens of rows with the MTP layer of the checkpoint, once a step has been sampled.

The plan names rows, and how many tokens to guess for each (`ScheduledBatch.mtp`). For each token of these
rows that the step has computed, the layer reads the token's final state, and the token that follows. Its
output for the last one gives the first guess. For each further guess the layer runs once more, over its own
output and the guess before:

    step         t5 t6 | sampled t7
    layer reads  (h5, t6) (h6, t7)    guess 8
                 (its state, guess 8) guess 9       written behind t6, and written over by the next step

Guesses are drawn as the row's tokens are, with the same temperature, truncation and random numbers, but
without what depends on the text: penalties, bad words, grammars. `runner.model_runner` calls this module on
ranks of the last stage; if several share it, all make the same guesses. A failure of the layer must not cost
a stage: the layer is then switched off until the engine starts again, with one line in the log. Ranks that
share a stage are an exception. They compute the layer together, and the others would wait for the one that
failed: there the stage is lost, as by any other error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, AttentionMetadata, kv_tensors
from penstock.batch import ScheduledBatch, StepResult
from penstock.kernels.candidates import HeadOutput, HeadRequest
from penstock.models.interfaces import SupportsPP
from penstock.models.intermediate import IntermediateTensors
from penstock.runner.forward_batch import ForwardBatch
from penstock.runner.mtp_context import MTPContext
from penstock.runner.request_rows import RequestRows
from penstock.sample.sampler import NO_TOKEN, Sampler
from penstock.sample.sampling_rows import SamplingRows


class GuessingModel(SupportsPP, Protocol):
    """A model with an MTP layer, which guesses the token behind the next one (`models.decoder.Decoder`)."""

    def candidates(self, states: Tensor, request: HeadRequest) -> HeadOutput:
        """Return what `request` asks for of the logits of these states (likely ids, or whole logits).

        Args:
            states: [num_rows, hidden], behind the final norm.
        """
        ...

    def guess(
        self, states: Tensor, next_ids: Tensor, positions: Tensor, kv: AnyKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Run the MTP layer, and return states from which the head guesses the token behind the next one.

        Args:
            states: [num_tokens, hidden], behind the final norm, or a result of this method; overwritten.
            next_ids: [num_tokens] int64, the token that follows each of these tokens.
            positions: [num_tokens] int64.
            kv: the layer's own KV cache, to which it writes.

        Returns:
            [num_tokens, hidden].
        """
        ...


class NoGuesser:
    """A guesser that guesses nothing, for ranks without an MTP layer; also the interface of guessers."""

    def reset(self) -> None:
        """Do nothing; other guessers forget all rows."""

    def admit(self, plan: ScheduledBatch) -> None:
        """Do nothing; other guessers take note of a plan's new rows, and of blocks loaded from the store."""

    def begin(self, batch: ForwardBatch) -> None:
        """Do nothing; other guessers note which tokens of a step the MTP layer will not read."""

    def prepare(self, plan: ScheduledBatch, tensors: IntermediateTensors) -> None:
        """Do nothing; other guessers add the final states of all tokens, [num_tokens, hidden], to `tensors`.

        It is called once the layers have run, and before their output is read. `states_of` returns the states
        that were added.
        """

    def candidates(self, states: Tensor, request: HeadRequest) -> HeadOutput:
        """Raise an error; other guessers return what `request` asks of the logits of states.

        Args:
            states: [num_rows, hidden], some of the states that `prepare` has added.
        """
        raise AssertionError("nothing was prepared")

    def guesses(
        self, tensors: IntermediateTensors, batch: ForwardBatch, result: StepResult
    ) -> dict[int, list[int]]:
        """Return the guessed tokens of rows that the plan names, by sampled row as in `StepResult.guesses`.

        In this class there are none.

        Args:
            tensors: the tensors of the step, [num_tokens, hidden], as `prepare` has left them.
            result: the samples of the step.
        """
        return {}


_logger = logging.getLogger(__name__)

NO_GUESSER = NoGuesser()
NORMED = "normed"


def states_of(tensors: IntermediateTensors) -> Tensor | None:
    """Return the final states that a guesser has added to a step's tensors, [num_tokens, hidden]; else None.

    They are behind the final norm.
    """
    return tensors.tensors.get(NORMED)


class _Reading(NamedTuple):
    """The tokens of a row that the layer reads.

    Attributes:
        start, end: the positions of these tokens, from start to before end.
        first_block: first block of the row's context for the layer, as in `mtp_context.Begin`.
        first_token: index of the first of these tokens among the step's tokens.
        sample: index of the row among the result's sampled rows; -1: the row is not sampled.
        wanted: number of guesses; 0 if the row is not sampled.
    """

    row: int
    start: int
    end: int
    first_block: int
    first_token: int
    sample: int
    wanted: int


class MTPGuesser(NoGuesser):
    """A guesser of the next tokens of rows, with the MTP layer of a model.

    Args:
        model: the model that has the layer.
        kv: the layer's own KV cache.
        num_blocks: blocks of that cache.
        rows: the row table of the rank, which must keep token ids.
        sampling: how each row is sampled.
        is_shared: other ranks of the stage compute the layer together with this one.
    """

    def __init__(
        self,
        model: GuessingModel,
        kv: AnyKV,
        num_blocks: int,
        rows: RequestRows,
        sampling: SamplingRows,
        *,
        is_shared: bool,
    ) -> None:
        self._model, self._kv, self._num_blocks = model, kv, num_blocks
        self._rows, self._sampling = rows, sampling
        self._device = kv_tensors(kv)[0].device
        self._context = MTPContext(num_blocks, rows.tables)
        self._sampler = Sampler()
        self._is_shared = is_shared
        self._has_failed = False

    def reset(self) -> None:
        self._context.reset()

    def admit(self, plan: ScheduledBatch) -> None:
        for order in plan.orders:
            if order.is_load:
                self._context.overwrite(order.block)
        for new_row in plan.new_rows:
            self._context.enter(new_row.row)

    def begin(self, batch: ForwardBatch) -> None:
        if batch.is_void:
            return
        ends = batch.metadata.seq_lens
        for index, row in enumerate(batch.plan.rows):
            if index not in batch.plan.mtp:
                self._context.leave_out(row, batch.starts[index], ends[index])

    def prepare(self, plan: ScheduledBatch, tensors: IntermediateTensors) -> None:
        if plan.mtp and not self._has_failed:
            hidden = tensors["hidden_states"]
            every = torch.arange(len(hidden), device=hidden.device)
            tensors[NORMED] = self._model.final_states(tensors, every)

    def candidates(self, states: Tensor, request: HeadRequest) -> HeadOutput:
        return self._model.candidates(states, request)

    def guesses(
        self, tensors: IntermediateTensors, batch: ForwardBatch, result: StepResult
    ) -> dict[int, list[int]]:
        states = states_of(tensors)
        if states is None:
            return {}
        try:
            return self._guessed(states, batch, result)
        except Exception as error:
            if self._is_shared:
                raise
            self._has_failed = True
            why = f"{type(error).__name__}: {error}"
            _logger.warning("the MTP layer is switched off until the engine restarts: %s.", why)
            return {}

    def _guessed(self, states: Tensor, batch: ForwardBatch, result: StepResult) -> dict[int, list[int]]:
        readings = self._readings(batch, result)
        if not readings:
            return {}
        indices = [
            index
            for reading in readings
            for index in range(reading.first_token, reading.first_token + reading.end - reading.start)
        ]
        read = self._run(states[self._tensor(indices)], readings, self._following(readings))
        lasts = np.cumsum([reading.end - reading.start for reading in readings]) - 1
        asked = [place for place, reading in enumerate(readings) if reading.wanted]
        guessed = self._guess_on([readings[place] for place in asked], read[self._tensor(lasts[asked])])
        return {readings[place].sample: ids for place, ids in zip(asked, guessed, strict=True) if ids}

    def _readings(self, batch: ForwardBatch, result: StepResult) -> list[_Reading]:
        """Return what the layer reads of each row that the plan names.

        Tokens behind a rejected draft are left out, and so is a row whose next token is not known.
        """
        plan, sampled = batch.plan, np.cumsum(batch.plan.need_sampled) - 1
        readings = []
        for index, wanted in sorted(plan.mtp.items()):
            row, start, end = plan.rows[index], batch.starts[index], batch.metadata.seq_lens[index]
            sample = int(sampled[index]) if plan.need_sampled[index] else -1
            if sample >= 0:
                end -= result.num_rejected[sample]
            if end >= self._rows.total_len[row]:
                self._context.leave_out(row, start, end)
                continue
            begin = self._context.read(row, start, end)
            if begin.cleared >= 0:
                self._clear(begin.cleared)
            readings.append(
                _Reading(
                    row=row,
                    start=start,
                    end=end,
                    first_block=begin.first_block,
                    first_token=batch.metadata.query_starts[index],
                    sample=sample,
                    wanted=wanted if sample >= 0 else 0,
                )
            )
        return readings

    def _clear(self, block: int) -> None:
        for memory in kv_tensors(self._kv):
            memory.view(self._num_blocks, -1)[block].zero_()

    def _following(self, readings: Sequence[_Reading]) -> list[int]:
        """Return the id of the token that follows each token that is read."""
        return [
            token_id
            for reading in readings
            for token_id in self._rows.known_ids(reading.row, reading.start + 1, reading.end + 1)
        ]

    def _guess_on(self, readings: Sequence[_Reading], states: Tensor) -> list[list[int]]:
        """Guess what follows each row's newest token, each guess from the one before.

        Args:
            states: [num_rows, hidden], the layer's output for the last token that was read of each row.
        """
        guessed: list[list[int]] = [[] for _ in readings]
        going = list(range(len(readings)))
        while going:
            drawn = self._drawn([readings[place] for place in going], states, len(guessed[going[0]]))
            kept = []
            for at, place in enumerate(going):
                if drawn[at] == NO_TOKEN:
                    continue
                guessed[place].append(drawn[at])
                if self._goes_on(readings[place], len(guessed[place])):
                    kept.append(at)
            if not kept:
                return guessed
            going = [going[at] for at in kept]
            next_tokens = [
                readings[place]._replace(start=end, end=end + 1)
                for place in going
                for end in (readings[place].end + len(guessed[place]) - 1,)
            ]
            newest = [guessed[place][-1] for place in going]
            states = self._run(states[self._tensor(kept)], next_tokens, newest)
        return guessed

    def _goes_on(self, reading: _Reading, num_guessed: int) -> bool:
        """Return whether more guesses are wanted, and the row has a block for the newest guess."""
        return num_guessed < reading.wanted and reading.end + num_guessed <= self._rows.tables.room(
            reading.row
        )

    def _drawn(self, readings: Sequence[_Reading], states: Tensor, num_guessed: int) -> list[int]:
        """Draw one guess for each row, behind `num_guessed` guesses that are taken as right."""
        rows = np.array([reading.row for reading in readings], dtype=np.int64)
        params = self._sampling.bare(rows)
        lengths = [reading.end + 1 - int(self._rows.prompt_len[reading.row]) for reading in readings]
        output_index = [length + num_guessed for length in lengths]
        output = self._model.candidates(states, params.head)
        return self._sampler.sample(output, params, output_index).token_ids

    def _run(self, states: Tensor, readings: Sequence[_Reading], next_ids: Sequence[int]) -> Tensor:
        """Run the layer (`GuessingModel.guess`): [num_tokens, hidden] -> the same shape."""
        positions = [position for reading in readings for position in range(reading.start, reading.end)]
        return self._model.guess(
            states, self._tensor(next_ids), self._tensor(positions), self._kv, self._metadata(readings)
        )

    def _metadata(self, readings: Sequence[_Reading]) -> AttentionMetadata:
        """Return the metadata for attention over contexts that begin with each row's `first_block`."""
        tables, size = self._rows.tables, self._rows.tables.block_size
        seq_lens = [reading.end - reading.first_block * size for reading in readings]
        blocks = np.zeros((len(readings), -(-max(seq_lens) // size)), dtype=np.int64)
        query_starts, slots = [0], list[int]()
        for place, (reading, seq_len) in enumerate(zip(readings, seq_lens, strict=True)):
            first, count = reading.first_block, -(-seq_len // size)
            blocks[place, :count] = tables.by_row[reading.row, first : first + count]
            for run in tables.slots(reading.row, reading.start, reading.end):
                slots.extend(run)
            query_starts.append(len(slots))
        num_new = [reading.end - reading.start for reading in readings]
        return AttentionMetadata(
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=self._tensor(blocks),
            slot_mapping=self._tensor(slots),
            num_decodes=next((at for at, count in enumerate(num_new) if count != 1), len(num_new)),
            block_size=size,
        )

    def _tensor(self, values: object) -> Tensor:
        """Return whole numbers as a tensor on the device."""
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)
