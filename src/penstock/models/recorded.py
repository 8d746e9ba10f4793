"""A stage's forward pass as a list of kernel calls: recorded once, replayed for every step.

`models.decoder` records its own layers with all kernels on; what a step then costs outside the kernels is two
small copies and one call. Without all kernels the layers run as they stand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, AttentionMetadata, KernelStep
from penstock.kernels.cpu.ops import CpuKernels
from penstock.kernels.cpu.tape import Tape, step_memory


class RecordedForward:
    """The layers of a stage on a tape.

    Args:
        run_layers: the layers' forward pass; tells the start of each layer to its last argument.
        angles: of positions.
    """

    NEEDED: ClassVar[frozenset[str]] = frozenset({"linear", "norm", "attention"})

    def __init__(
        self,
        run_layers: Callable[..., tuple[Tensor, Tensor]],
        angles: Callable[[Tensor], Any],
        kernels: CpuKernels,
    ) -> None:
        self._run_layers, self._angles, self._kernels = run_layers, angles, kernels
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def record(self, kv: Sequence[AnyKV], max_num_tokens: int, width: int, dtype: torch.dtype) -> None:
        """Take down the calls for this KV storage and steps of so many tokens at most."""
        self._hidden_states, self._residual = (step_memory(max_num_tokens, width, dtype) for _ in range(2))
        positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        angles_tape, tape = Tape(max_num_tokens), Tape(max_num_tokens)
        with self._kernels.recording(angles_tape):
            angles = self._angles(positions)
        with self._kernels.recording(tape):
            self._output, residual = self._run_layers(
                self._hidden_states, self._residual, angles, kv, _any_step(max_num_tokens), tape.start_layer
            )
        assert residual is self._residual, "the residual stream is added to in place"
        angles_tape.finish([])
        tape.finish([angles, kv])
        self._tapes = (angles_tape, tape)

    def replay(
        self, hidden_states: Tensor, residual: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """What the layers make of [num_tokens, hidden] twice: memory that the next call writes again."""
        num_tokens = len(hidden_states)
        assert num_tokens <= len(self._hidden_states), "the plan is larger than what was recorded"
        _copy(hidden_states, self._hidden_states)
        _copy(residual, self._residual)
        step = KernelStep(metadata, positions)
        for tape in self._tapes:
            tape.replay(self._kernels.library, step.struct)
        return self._results(num_tokens)

    def _results(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the outputs' first rows, kept: with a cold cache, making them is not cheap."""
        found = self._views.get(num_tokens)
        if found is None:
            found = self._views[num_tokens] = (self._output[:num_tokens], self._residual[:num_tokens])
        return found


def _copy(rows: Tensor, memory: Tensor) -> None:
    """Rows into the first rows of memory, past torch's dispatch."""
    assert rows.is_contiguous(), "activations are contiguous"
    assert rows.dtype == memory.dtype
    ctypes.memmove(memory.data_ptr(), rows.data_ptr(), rows.nbytes)


def _any_step(num_tokens: int) -> AttentionMetadata:
    """Stands for the step while calls are taken down; a call's own step comes with its replay."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return AttentionMetadata(
        query_starts=[0, num_tokens],
        seq_lens=[num_tokens],
        block_tables=nothing[None],
        slot_mapping=nothing,
        num_decodes=0,
        block_size=1,
    )
