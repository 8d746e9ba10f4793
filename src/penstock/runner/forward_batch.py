"""Turns a plan and the row table into the inputs of the model.

`runner.model_runner` builds one `ForwardBatch` per step. Everything is worked out row by row, as ranges and
slices, and written into persistent buffers.

A batch is built in two parts, so that a stage can do most of it while it still waits for samples of earlier
steps. `begin_batch` needs none of these samples. Once they are there, `complete_batch` corrects positions if
some were wrong. Inputs that only one stage reads are not part of a batch: the first stage gathers `input_ids`
by itself, and the last one publishes `sample_indices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata
from penstock.batch import ScheduledBatch
from penstock.runner.buffers import InputBuffers
from penstock.runner.request_rows import RequestRows, RowSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The inputs of one step on this rank: positions, attention metadata, and what is sampled.

    Tensors are views of buffers that later steps write over. `addressed` has all rows of the plan, `sampled`
    those that are sampled, and `samples` the positions in them.
    """

    plan: ScheduledBatch
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    addressed: RowSnapshot  # [num_rows]
    sampled: RowSnapshot  # [num_sampled]
    samples: Samples
    starts: list[int]  # [num_rows] position of the first token of each row
    is_void: bool = False  # the step rests on a wrong guess: results of it mean nothing

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The positions that a step samples.

    A sampled row has one, behind its last token. A row with drafts (guessed tokens) is also sampled in the
    place of each draft, to be compared with it (`sample.windows`).
    """

    indices: list[int]  # [num_samples] of the tokens behind which is sampled, among the step's tokens
    rows: NDArray[np.int64]  # [num_samples] the row of each; a row with drafts is there several times
    output_index: list[int]  # [num_samples] tokens that the row has generated before, drafts counted in
    drafts: list[list[int]]  # [num_sampled] of each sampled row: the drafts to be compared with samples


def begin_batch(plan: ScheduledBatch, rows: RequestRows, buffers: InputBuffers) -> ForwardBatch:
    """Build the inputs of a plan as far as they do not depend on samples that are still to come.

    The plan's freed and new rows must have been applied to the row table. The plan's blocks are appended
    there, and its tokens count as scheduled.

    Raises:
        ProtocolError: the plan does not fit the row table.
    """
    rows.append_blocks(plan)
    starts, ends = rows.span_of(plan)
    rows.advance(plan, ends)
    return _batch_at(rows.fitted(plan, starts), plan, rows, buffers)


def complete_batch(batch: ForwardBatch, rows: RequestRows, buffers: InputBuffers) -> ForwardBatch:
    """Return the final inputs of a step, once the samples that it consumes are in the row table.

    Positions are corrected where drafts (guessed tokens) were rejected meanwhile. The batch is marked as void
    if the whole plan rests on a wrong guess.

    Raises:
        ProtocolError: a sample that the plan names has not come, or a row lacks KV blocks.
    """
    plan = batch.plan
    rows.check_sources(plan)
    starts, ends = rows.accepted_span_of(plan)
    rows.run(plan, starts, ends)
    if rows.is_void(plan, starts):
        return replace(batch, is_void=True)
    for index, draft_ids in plan.drafts.items():
        rows.put_drafts(plan.rows[index], ends[index], draft_ids)
    rows.check_room(plan, ends)
    if starts != batch.starts:  # drafts were rejected meanwhile
        batch = _batch_at(starts, plan, rows, buffers)
    return batch


def input_ids(batch: ForwardBatch, rows: RequestRows, buffers: InputBuffers) -> Tensor:
    """Return the token ids that a step computes, [num_tokens] int64 on the device; for stages that embed.

    They are slices of the row table [D7], which has known tokens at their positions, and drafts behind them.
    """
    ends = batch.metadata.seq_lens
    spans = zip(batch.addressed.places, batch.starts, ends, strict=True)
    return buffers.input_ids.publish_parts([rows.known_ids(*span) for span in spans], batch.num_tokens)


def _batch_at(
    starts: list[int],
    plan: ScheduledBatch,
    rows: RequestRows,
    buffers: InputBuffers,
) -> ForwardBatch:
    addressed, num_tokens = rows.snapshot(plan.rows), plan.total_tokens
    ends = [start + count for start, count in zip(starts, plan.num_tokens, strict=True)]
    query_starts = list(accumulate(plan.num_tokens, initial=0))
    positions = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    chosen = [index for index, is_sampled in enumerate(plan.need_sampled) if is_sampled]
    sampled = addressed if len(chosen) == len(addressed) else addressed.select(chosen)
    return ForwardBatch(
        plan=plan,
        positions=buffers.positions.publish_parts(positions, num_tokens),
        metadata=_metadata(plan, rows, buffers, starts, ends, query_starts),
        addressed=addressed,
        sampled=sampled,
        samples=_samples(plan, chosen, sampled, ends, query_starts),
        starts=starts,
    )


def _samples(
    plan: ScheduledBatch,
    chosen: list[int],
    sampled: RowSnapshot,
    ends: list[int],
    query_starts: list[int],
) -> Samples:
    """Return the positions that are sampled.

    Args:
        chosen: indices of the sampled rows in the plan.
        sampled: these rows.
        ends: position behind the last token of each row of the plan.
        query_starts: index of each row's first token among the step's tokens, and the number of all.
    """
    if not plan.drafts:
        return Samples(
            indices=[query_starts[index + 1] - 1 for index in chosen],
            rows=sampled.rows,
            output_index=[ends[index] - sampled.prompt_len[at] for at, index in enumerate(chosen)],
            drafts=[[]] * len(chosen),
        )
    drafts = [plan.compared_drafts(index) for index in chosen]
    indices: list[int] = []
    output_index: list[int] = []
    for at, index in enumerate(chosen):
        num_drafts, last = len(drafts[at]), query_starts[index + 1]
        num_outputs = ends[index] - sampled.prompt_len[at]
        indices.extend(range(last - 1 - num_drafts, last))
        output_index.extend(range(num_outputs - num_drafts, num_outputs + 1))
    widths = [1 + len(draft_ids) for draft_ids in drafts]
    return Samples(
        indices=indices, rows=np.repeat(sampled.rows, widths), output_index=output_index, drafts=drafts
    )


def _metadata(
    plan: ScheduledBatch,
    rows: RequestRows,
    buffers: InputBuffers,
    starts: Sequence[int],
    ends: list[int],
    query_starts: list[int],
) -> AttentionMetadata:
    num_tokens, num_rows = query_starts[-1], len(ends)
    longest = -(-max(ends, default=1) // rows.tables.block_size)
    tables = [rows.tables.first(row, longest) for row in plan.rows]  # cut to the longest context
    slots = chain.from_iterable(map(rows.tables.slots, plan.rows, starts, ends))
    buffers.query_starts.publish_parts([query_starts], num_rows + 1)
    buffers.seq_lens.publish_parts([ends], num_rows)
    step = buffers.kernel_step
    step.num_tokens, step.num_rows, step.block_table_stride = num_tokens, num_rows, longest
    return AttentionMetadata(
        query_starts=query_starts,
        seq_lens=ends,
        block_tables=buffers.block_tables.publish_parts(tables, num_rows, longest),
        slot_mapping=buffers.slot_mapping.publish_parts(slots, num_tokens),
        num_decodes=_leading_ones(plan.num_tokens),
        block_size=rows.tables.block_size,
        kernel_step=step,
    )


def _leading_ones(num_tokens: list[int]) -> int:
    for index, count in enumerate(num_tokens):
        if count != 1:
            return index
    return len(num_tokens)
