"""From a plan and the row table to the inputs of the model.

`runner.model_runner` builds one `ForwardBatch` per step. Everything is worked out for all rows at once with
numpy and written into persistent buffers.

A batch is built in two parts, so that a stage can do most of it while it still waits for samples:
`begin_batch` needs none, `complete_batch` corrects the positions once they are there. What only one stage
reads is no part of a batch: the first stage gathers its `input_ids`, the last one publishes its
`sample_indices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata
from penstock.batch import ScheduledBatch
from penstock.kernels.views import MOST_VIEWS
from penstock.runner.buffers import InputBuffers
from penstock.runner.request_rows import RequestRows, RowSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs on this rank. Tensors are views of buffers that later steps use again."""

    plan: ScheduledBatch
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    sample_indices: NDArray[np.int64]  # [num_sampled] the last token of each sampled row
    addressed: RowSnapshot  # [num_rows]
    sampled: RowSnapshot  # [num_sampled]
    output_index: NDArray[np.int64]  # [num_sampled] how many tokens the row has generated before this one
    row_of_token: NDArray[np.int64]  # [num_tokens]
    position_of_token: NDArray[np.int64]  # [num_tokens]
    num_rejections: int  # that the row table had seen when the batch was begun

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def build_batch(plan: ScheduledBatch, rows: RequestRows, buffers: InputBuffers) -> ForwardBatch:
    """Build the inputs of a plan whose rows and token returns have been applied.

    Raises `ProtocolError` if the plan does not fit the row table.
    """
    return complete_batch(begin_batch(plan, rows, buffers), rows, buffers)


def begin_batch(plan: ScheduledBatch, rows: RequestRows, buffers: InputBuffers) -> ForwardBatch:
    """Return the batch of a plan whose rows have been applied; samples that it consumes may be to come.

    Raises `ProtocolError` if the plan does not fit the row table.
    """
    rows.append_blocks(plan)
    starts, ends = rows.span_of(plan)
    rows.advance(plan, ends)
    return _batch_at(starts, ends, plan, rows, buffers)


def complete_batch(batch: ForwardBatch, rows: RequestRows, buffers: InputBuffers) -> ForwardBatch:
    """Return the batch as it is run, once the samples that it consumes are in the row table.

    Raises `ProtocolError` if they are not.
    """
    rows.check_sources(batch.plan)
    if rows.num_rejections != batch.num_rejections:  # so positions are others than the plan had hoped
        batch = _batch_at(*rows.accepted_span_of(batch.plan), batch.plan, rows, buffers)
    return batch


def input_ids(batch: ForwardBatch, rows: RequestRows, buffers: InputBuffers) -> Tensor:
    """Return the ids of a complete batch, [num_tokens] int64, on a stage that embeds.

    Those of a prompt chunk, of a decode and of drafts alike (row D7) are one gather from the row table: known
    tokens lie at their positions, and drafts behind them.
    """
    return buffers.input_ids.publish(rows.token_ids[batch.row_of_token, batch.position_of_token])


def _batch_at(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    plan: ScheduledBatch,
    rows: RequestRows,
    buffers: InputBuffers,
) -> ForwardBatch:
    addressed = rows.snapshot(plan.rows)
    row_of_token, positions, query_starts = addressed.rows, starts, _places(len(starts) + 1)
    if plan.total_tokens != len(starts):  # not all rows decode
        num_tokens = ends - starts
        query_starts = np.zeros(len(starts) + 1, dtype=np.int64)
        num_tokens.cumsum(out=query_starts[1:])
        row_of_token = np.repeat(addressed.rows, num_tokens)
        positions = np.arange(plan.total_tokens) + np.repeat(starts - query_starts[:-1], num_tokens)
    sampled, sampled_ends, sample_indices = addressed, ends, query_starts[1:] - 1
    if not all(plan.need_sampled):
        chosen = np.flatnonzero(plan.need_sampled)
        sampled, sampled_ends, sample_indices = addressed.select(chosen), ends[chosen], sample_indices[chosen]
    return ForwardBatch(
        plan=plan,
        positions=buffers.positions.publish(positions),
        metadata=_metadata(plan, rows, buffers, row_of_token, positions, query_starts, ends),
        sample_indices=sample_indices,
        addressed=addressed,
        sampled=sampled,
        output_index=sampled_ends - sampled.prompt_len,
        row_of_token=row_of_token,
        position_of_token=positions,
        num_rejections=rows.num_rejections,
    )


@lru_cache(maxsize=MOST_VIEWS)
def _places(num: int) -> NDArray[np.int64]:
    """0, 1, ... [num]; not to be changed."""
    return np.arange(num)


def _metadata(
    plan: ScheduledBatch,
    rows: RequestRows,
    buffers: InputBuffers,
    row_of_token: NDArray[np.int64],
    positions: NDArray[np.int64],
    query_starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> AttentionMetadata:
    seq_lens = ends.tolist()
    longest = -(-max(seq_lens, default=1) // rows.block_size)
    tables = rows.block_tables[rows.snapshot(plan.rows).rows, :longest]  # cut to the longest context
    block_of_token, offsets = np.divmod(positions, rows.block_size)
    slots = rows.block_tables[row_of_token, block_of_token] * rows.block_size + offsets
    buffers.query_starts.publish(query_starts)
    buffers.seq_lens.publish(ends)
    step = buffers.kernel_step
    step.num_tokens, step.num_rows, step.block_table_stride = len(positions), len(seq_lens), longest
    return AttentionMetadata(
        query_starts=query_starts.tolist(),
        seq_lens=seq_lens,
        block_tables=buffers.block_tables.publish(tables),
        slot_mapping=buffers.slot_mapping.publish(slots),
        num_decodes=_leading_ones(plan.num_tokens),
        block_size=rows.block_size,
        kernel_step=step,
    )


def _leading_ones(num_tokens: list[int]) -> int:
    for index, count in enumerate(num_tokens):
        if count != 1:
            return index
    return len(num_tokens)
