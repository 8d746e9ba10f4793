"""From a plan and the row table to the inputs of the model.

`runner.model_runner` builds one `ForwardBatch` per step. Everything is worked out for all rows at once with
numpy and written into persistent buffers. Input ids, those of a prompt chunk, of a decode and of drafts alike
(row D7), are one gather from the row table: known tokens lie at their positions, and drafts behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.attention.metadata import AttentionMetadata
from penstock.batch import ScheduledBatch
from penstock.runner.buffers import InputBuffer, InputBuffers
from penstock.runner.request_rows import RequestRows, RowSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs on this rank. Tensors are views of buffers that later steps use again."""

    plan: ScheduledBatch
    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    sample_indices: Tensor  # [num_sampled] int64, the last token of each sampled row
    addressed: RowSnapshot  # [num_rows]
    sampled: RowSnapshot  # [num_sampled]
    output_index: NDArray[np.int64]  # [num_sampled] how many tokens the row has generated before this one

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def build_batch(plan: ScheduledBatch, rows: RequestRows, buffers: InputBuffers) -> ForwardBatch:
    """Build the inputs of a plan whose rows and token returns have been applied.

    Raises `ProtocolError` if the plan does not fit the row table.
    """
    rows.append_blocks(plan)
    starts = rows.start_of(plan)
    rows.advance(plan, starts)
    row_index = np.array(plan.rows, dtype=np.int64)
    num_tokens = np.array(plan.num_tokens, dtype=np.int64)
    ends = starts + num_tokens
    query_ends = np.cumsum(num_tokens)

    row_of_token = np.repeat(row_index, num_tokens)
    positions = np.arange(plan.total_tokens) + np.repeat(ends - query_ends, num_tokens)
    metadata = AttentionMetadata(
        query_starts=[0, *query_ends.tolist()],
        seq_lens=ends.tolist(),
        block_tables=_block_tables(rows, row_index, ends, buffers.block_tables),
        slot_mapping=_publish(buffers.slot_mapping, _slots(rows, row_of_token, positions)),
        num_decodes=_leading_ones(plan.num_tokens),
        block_size=rows.block_size,
    )
    sampled = np.flatnonzero(np.array(plan.need_sampled, dtype=bool))
    addressed = rows.snapshot(row_index)
    return ForwardBatch(
        plan=plan,
        input_ids=_publish(buffers.input_ids, rows.token_ids[row_of_token, positions]),
        positions=_publish(buffers.positions, positions),
        metadata=metadata,
        sample_indices=_publish(buffers.sample_indices, query_ends[sampled] - 1),
        addressed=addressed,
        sampled=addressed.select(sampled),
        output_index=ends[sampled] - rows.prompt_len[row_index[sampled]],
    )


def _slots(
    rows: RequestRows, row_of_token: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    blocks = rows.block_tables[row_of_token, positions // rows.block_size]
    return blocks * rows.block_size + positions % rows.block_size


def _block_tables(
    rows: RequestRows, row_index: NDArray[np.int64], ends: NDArray[np.int64], buffer: InputBuffer
) -> Tensor:
    """The tables of the step's rows, cut to the longest context: [num_rows, longest]."""
    longest = -(-int(ends.max(initial=1)) // rows.block_size)
    tables = rows.block_tables[row_index, :longest]
    return _publish(buffer, tables.reshape(-1)).view(tables.shape)


def _publish(buffer: InputBuffer, values: NDArray[np.int64]) -> Tensor:
    assert len(values) <= len(buffer.values), "the plan is larger than the buffers of the rank"
    buffer.values[: len(values)] = values
    return buffer.publish(len(values))


def _leading_ones(num_tokens: list[int]) -> int:
    for index, count in enumerate(num_tokens):
        if count != 1:
            return index
    return len(num_tokens)
