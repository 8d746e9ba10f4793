"""The input buffers of a stage: filled in CPU memory, and copied to a fixed place on the device [C7] [E9].

`runner.forward_batch` writes a step's inputs into them; the tensors of a `ForwardBatch` are views of the
first n elements. `BufferPool` holds as many sets as plans may be in flight, so that no set is written over
while its copy to a device is under way. The buffers do not know what the numbers mean.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu import abi
from penstock.kernels.views import KeptViews, words_of


class InputBuffer:
    """An array of int64 in host memory and its copy on the device; on a CPU both are the same memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.empty(size, dtype=torch.int64, pin_memory=not on_host)
        self._device = self._host if on_host else torch.empty(size, dtype=torch.int64, device=device)
        self._words = words_of(self._host.numpy())
        self._views: KeptViews[tuple[int, ...], Tensor] = KeptViews(self._view)

    @property
    def host_address(self) -> int:
        """The memory address of the values on the host, the same at every step."""
        return self._host.data_ptr()

    def publish(self, values: Sequence[int]) -> Tensor:
        """Write `values` to the buffer and start their copy to the device; return a view, [len(values)]."""
        return self.publish_parts([values], len(values))

    def publish_parts(self, parts: Iterable[Sequence[int]], *shape: int) -> Tensor:
        """Write values that come in parts, one behind the other, and start their copy to the device.

        The copy to a GPU is not waited for.

        Args:
            shape: the shape of the result; all parts together have as many values.

        Returns:
            A view on the device, int64.
        """
        at, size = 0, math.prod(shape)
        assert size <= len(self._words), "the plan is larger than the buffers of the rank"
        for part in parts:
            end = at + len(part)
            self._words[at:end] = part if isinstance(part, memoryview) else array("q", part)
            at = end
        assert at == size, f"{at} values do not have the shape {shape}"
        if self._device is not self._host:
            # Not waited for: the next step that uses this set of buffers (`BufferPool`) comes only when this
            # step is no longer in flight.
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        return self._views.of(shape)

    def _view(self, shape: tuple[int, ...]) -> Tensor:
        return self._device[: math.prod(shape)].view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBuffers:
    """A set of buffers on host and device for all inputs of one step of a stage."""

    input_ids: InputBuffer  # [max_num_tokens]
    positions: InputBuffer  # [max_num_tokens]
    slot_mapping: InputBuffer  # [max_num_tokens]
    block_tables: InputBuffer  # [max_num_rows * max_blocks_per_row], used as [num_rows, longest]
    sample_indices: InputBuffer  # [max_num_samples]
    query_starts: InputBuffer  # [max_num_rows + 1]
    seq_lens: InputBuffer  # [max_num_rows]
    kernel_step: abi.Step  # the struct that kernels read; it has the host addresses of these buffers


class BufferPool:
    """The sets of input buffers of a rank, as many as plans may be in flight, used in turn.

    Args:
        depth: most plans in flight.
        max_num_tokens, max_num_rows, max_num_samples: most tokens, rows and samples of one step.
        max_blocks_per_row: blocks of a request of full length.
    """

    def __init__(
        self,
        depth: int,
        *,
        max_num_tokens: int,
        max_num_rows: int,
        max_num_samples: int,
        max_blocks_per_row: int,
        device: torch.device,
    ) -> None:
        host = torch.device("cpu")
        sizes = {
            "input_ids": (max_num_tokens, device),
            "positions": (max_num_tokens, device),
            "slot_mapping": (max_num_tokens, device),
            "block_tables": (max_num_rows * max_blocks_per_row, device),
            "sample_indices": (max_num_samples, device),
            "query_starts": (max_num_rows + 1, host),
            "seq_lens": (max_num_rows, host),
        }
        self._sets = [
            _with_step({name: InputBuffer(*size) for name, size in sizes.items()}) for _ in range(depth)
        ]

    def for_step(self, step_id: int) -> InputBuffers:
        """Return the buffers for a step; the step that comes `depth` steps later gets the same."""
        return self._sets[step_id % len(self._sets)]


def _with_step(buffers: dict[str, InputBuffer]) -> InputBuffers:
    pointers = {name: buffer.host_address for name, buffer in buffers.items() if name != "sample_indices"}
    return InputBuffers(kernel_step=abi.Step(**pointers), **buffers)
