"""Input buffers of a stage: filled on the host, at a fixed address on the device (rows C7, E9).

`runner.forward_batch` writes a step's inputs into them; the tensors of a `ForwardBatch` are views of the
first n elements. `BufferPool` holds as many sets as plans may be in flight, so that a copy still under way to
a device is never written over. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class InputBuffer:
    """A host array of int64 and its twin on the device; on a CPU they are one and the same."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.empty(size, dtype=torch.int64, pin_memory=not on_host)
        self._device = self._host if on_host else torch.empty(size, dtype=torch.int64, device=device)
        self.values: NDArray[np.int64] = self._host.numpy()  # [size], written by the host

    def publish(self, count: int) -> Tensor:
        """The first `count` elements on the device, as written so far. [count]"""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBuffers:
    """One set: all inputs of one step."""

    input_ids: InputBuffer  # [max_num_tokens]
    positions: InputBuffer  # [max_num_tokens]
    slot_mapping: InputBuffer  # [max_num_tokens]
    block_tables: InputBuffer  # [max_num_rows * max_blocks_per_row], used as [num_rows, longest]
    sample_indices: InputBuffer  # [max_num_rows]


class BufferPool:
    """As many sets of buffers as plans in flight, used in turn.

    Args:
        depth: plans in flight at most.
        max_num_tokens, max_num_rows: of one step.
        max_blocks_per_row: blocks of a row of full length.
    """

    def __init__(
        self,
        depth: int,
        *,
        max_num_tokens: int,
        max_num_rows: int,
        max_blocks_per_row: int,
        device: torch.device,
    ) -> None:
        self._sets = [
            InputBuffers(
                input_ids=InputBuffer(max_num_tokens, device),
                positions=InputBuffer(max_num_tokens, device),
                slot_mapping=InputBuffer(max_num_tokens, device),
                block_tables=InputBuffer(max_num_rows * max_blocks_per_row, device),
                sample_indices=InputBuffer(max_num_rows, device),
            )
            for _ in range(depth)
        ]

    def for_step(self, step_id: int) -> InputBuffers:
        """The set of a step: the same one again `depth` steps later."""
        return self._sets[step_id % len(self._sets)]
