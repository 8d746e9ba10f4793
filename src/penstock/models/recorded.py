"""The recording of a stage's share of a step as lists of kernel calls, which are replayed for every step.

`models.decoder` records its own layers if our kernels compute all of them, and with these the embedding and
the final norm where it has them. Outside the kernels a step then costs a few calls of Python. That is worth
the trouble because every step streams all weights through the CPU's caches: Python's own code and data are
not in them any more, so that it runs several times as long as one would expect. If a kernel is missing, the
layers run without a recording.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, AttentionMetadata, KernelStep
from penstock.kernels.cpu import abi
from penstock.kernels.cpu.ops import CpuKernels
from penstock.kernels.cpu.tape import Tape, step_memory
from penstock.kernels.views import KeptViews


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """The parts of a stage that are recorded.

    Attributes:
        embed: token ids -> vectors; None: this stage has no embedding, or no kernel computes it.
        angles: positions -> angles.
        run_layers: the layers' forward pass; its last argument is called before each layer.
        final_norm: hidden states, residual stream and indices of tokens -> the norm of these tokens; None:
            this stage has no final norm.
    """

    embed: Callable[[Tensor], Tensor] | None
    angles: Callable[[Tensor], Any]
    run_layers: Callable[..., tuple[Tensor, Tensor]]
    final_norm: Callable[[Tensor, Tensor, Tensor], Tensor] | None


class RecordedForward:
    """The parts of a stage on tapes, lists of kernel calls; a result is written over by the same call's next.

    Args:
        kv: storage of the layers.
        max_num_tokens: most tokens of any step.
        width, dtype: those of the hidden states.
    """

    NEEDED: ClassVar[frozenset[str]] = frozenset({"linear", "norm", "attention"})

    def __init__(
        self,
        parts: StageParts,
        kernels: CpuKernels,
        kv: Sequence[AnyKV],
        *,
        max_num_tokens: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._kernels = kernels
        self._embed_step, self._norm_step = abi.Step(), abi.Step()
        anything = torch.zeros(max_num_tokens, dtype=torch.int64)  # in place of ids, positions and indices
        self._embed: Tape | None = None
        if parts.embed is not None:
            with self._recording(max_num_tokens) as self._embed:
                self._input = StepMemory(parts.embed(anything), kernels.zeros(anything, width, dtype))
        else:
            self._input = StepMemory(*(step_memory(max_num_tokens, width, dtype) for _ in range(2)))
        hidden_states, residual = self._input.whole
        with self._recording(max_num_tokens) as self._angles:
            angles = parts.angles(anything)
        with self._recording(max_num_tokens, angles, kv) as self._layers:
            step, tape = _any_step(max_num_tokens), self._layers
            output, summed = parts.run_layers(
                hidden_states, residual, angles, kv, step, lambda layer: tape.start_layer()
            )
        assert summed is residual, "the residual stream is added to in place"
        self._output = StepMemory(output, residual)
        self._newest: Tensor | None = None  # the hidden states that `forward` returned last
        self._indices: KeptViews[Tensor, tuple[int, int]] = KeptViews(_indices)
        self._final_norm: Tape | None = None
        if parts.final_norm is not None:
            with self._recording(max_num_tokens) as self._final_norm:
                self._normed = StepMemory(parts.final_norm(output, residual, anything))

    @property
    def has_embedding(self) -> bool:
        return self._embed is not None

    def embed(self, input_ids: Tensor) -> list[Tensor]:
        """Return hidden states and a residual stream of zeros, in memory from which `forward` need not copy.

        Args:
            input_ids: [num_tokens] int64.
        """
        assert self._embed is not None, "the embedding is not recorded"
        step = self._embed_step
        num_tokens, step.input_ids = self._indices.of(input_ids)
        step.num_tokens = num_tokens
        self._embed.replay(step)
        return self._input.of(num_tokens)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        before_layer: Callable[[int], None] | None = None,
    ) -> list[Tensor]:
        """Return the output of the layers: hidden states and residual stream, [num_tokens, hidden] each.

        Args:
            hidden_states, residual: [num_tokens, hidden] each. If they are the results of `embed`, they are
                written over.
            positions: [num_tokens] int64; not read if `metadata.kernel_step` has them.
            before_layer: called before each layer.
        """
        kept = None if metadata.kernel_step is not None else KernelStep(metadata, positions)
        step = metadata.kernel_step if kept is None else kept.struct
        assert step is not None
        num_tokens = step.num_tokens
        for rows, own in zip((hidden_states, residual), self._input.of(num_tokens), strict=True):
            if rows is not own:
                assert len(rows) == num_tokens, "the step is another one"
                _copy(rows, own)
        self._angles.replay(step)
        if before_layer is None:
            self._layers.replay(step)
        else:
            self._layers.replay_layers(step, before_layer)
        output = self._output.of(num_tokens)
        self._newest = output[0]
        return output

    def is_newest(self, hidden_states: Tensor) -> bool:
        """Return whether these are the hidden states, [num_tokens, hidden], that `forward` returned last."""
        return hidden_states is self._newest

    def normed(self, indices: Tensor) -> Tensor:
        """Apply the final norm to some tokens ([num_selected] int64) of the last output of `forward`."""
        assert self._final_norm is not None, "this stage has no final norm"
        step = self._norm_step
        num_selected, step.selected = self._indices.of(indices)
        step.num_tokens = num_selected
        self._final_norm.replay(step)
        return self._normed.of(num_selected)[0]

    @contextmanager
    def _recording(self, num_tokens: int, *kept: object) -> Iterator[Tape]:
        """Yield a tape, which records the kernel calls inside the block; `kept` as for `Tape.finish`."""
        tape = Tape(num_tokens)
        with self._kernels.recording(tape):
            yield tape
        tape.finish(self._kernels.library, kept)


class StepMemory:
    """The memory of tensors; a step uses as many of their first rows as it has tokens."""

    def __init__(self, *whole: Tensor) -> None:
        self.whole = whole
        self._views: KeptViews[int, list[Tensor]] = KeptViews(self._first)

    def of(self, num_rows: int) -> list[Tensor]:
        """Return the first `num_rows` rows of each: [num_rows, ...], the same views for the same number."""
        return self._views.of(num_rows)

    def _first(self, num_rows: int) -> list[Tensor]:
        assert num_rows <= len(self.whole[0]), "the plan is larger than what was recorded"
        return [tensor[:num_rows] for tensor in self.whole]


def _indices(values: Tensor) -> tuple[int, int]:
    """Return how many ids or indices there are, and their address in memory."""
    assert values.dtype == torch.int64
    assert values.is_contiguous()
    return len(values), values.data_ptr()


def _copy(rows: Tensor, memory: Tensor) -> None:
    """Copy rows by `memmove`, which costs less than a call of torch."""
    assert rows.is_contiguous(), "activations are contiguous"
    assert rows.dtype == memory.dtype
    ctypes.memmove(memory.data_ptr(), rows.data_ptr(), rows.nbytes)


def _any_step(num_tokens: int) -> AttentionMetadata:
    """Return a stand-in for a step's metadata while calls are recorded; each replay brings its own."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return AttentionMetadata(
        query_starts=[0, num_tokens],
        seq_lens=[num_tokens],
        block_tables=nothing[None],
        slot_mapping=nothing,
        num_decodes=0,
        block_size=1,
    )
