"""Drives a model cut into stages, without engine or processes: the plainest correct use of a `Decoder`.

Blocks are handed out in a scattered order, so that a wrong block table cannot pass unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.distributed.group import SOLO, TensorGroup
from penstock.families.registry import load_spec
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.compute import FormatOf, never_quantized
from penstock.models.decoder import Decoder
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights


def is_recorded(stage: Decoder) -> bool:
    """Return whether the calls of a stage are replayed (`Decoder.record`)."""
    return stage._recorded is not None


class StageDriver:
    """All stages of a model in one thread, one row per sequence."""

    def __init__(
        self,
        directory: Path,
        cuts: Sequence[int] = (),
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_size: int = 4,
        num_rows: int = 8,
        max_len: int = 256,
        kernels: CpuKernels | None = None,
        group: TensorGroup = SOLO,
        expert_parallel: bool = False,
        format_of: FormatOf = never_quantized,
        stages: Sequence[Decoder] = (),
    ) -> None:
        self.spec = load_spec(directory)
        self.block_size = block_size
        bounds = [0, *cuts, self.spec.num_layers]
        self.stages = list(stages) or [
            load_stage(
                directory,
                start,
                end,
                dtype=dtype,
                device=device,
                kernels=kernels,
                block_size=block_size,
                group=group,
                expert_parallel=expert_parallel,
                format_of=format_of,
            )
            for start, end in pairwise(bounds)
        ]
        blocks_per_row = -(-max_len // block_size)
        num_blocks = num_rows * blocks_per_row
        self.memory: list[Tensor] = []  # of each layer's keys and values, as bytes
        self.kv = [[self._layer_kv(num_blocks, stage) for _ in stage_layers(stage)] for stage in self.stages]
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self.block_tables = order.view(num_rows, blocks_per_row)  # [num_rows, blocks_per_row]
        self.lengths = [0] * num_rows

    def _layer_kv(self, num_blocks: int, stage: Decoder) -> AnyKV:
        # Storage that was never written holds NaN: reading it would show at once.
        num_bytes = num_blocks * stage.attention.block_bytes(self.block_size)
        device = next(stage.parameters()).device
        self.memory.append(torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device))
        return stage.attention.layer_kv(self.memory[-1])

    def metadata(self, rows: Sequence[int], counts: Sequence[int]) -> tuple[AttentionMetadata, Tensor]:
        """Metadata and positions ([num_tokens]) of a step that gives `counts` tokens to `rows`."""
        starts = [0]
        positions = []
        slots = []
        for row, count in zip(rows, counts, strict=True):
            position = torch.arange(self.lengths[row], self.lengths[row] + count)
            blocks = self.block_tables[row][position // self.block_size]
            slots.append(blocks * self.block_size + position % self.block_size)
            positions.append(position)
            starts.append(starts[-1] + count)
        num_decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        device = next(self.stages[0].parameters()).device
        nothing = torch.empty(0, dtype=torch.int64)
        metadata = AttentionMetadata(
            query_starts=starts,
            seq_lens=[self.lengths[row] + count for row, count in zip(rows, counts, strict=True)],
            block_tables=self.block_tables[list(rows)].to(device),
            slot_mapping=torch.cat([nothing, *slots]).to(device),
            num_decodes=num_decodes,
            block_size=self.block_size,
        )
        return metadata, torch.cat([nothing, *positions]).to(device)

    def step(self, tokens: dict[int, list[int]]) -> Tensor:
        """Run `{row: ids}` through all stages, decodes first: logits of every token, [num_tokens, vocab]."""
        rows, counts = list(tokens), [len(ids) for ids in tokens.values()]
        metadata, positions = self.metadata(rows, counts)
        input_ids = torch.tensor([i for ids in tokens.values() for i in ids], dtype=torch.int64)
        tensors = self.stages[0].embed(input_ids.to(positions.device))
        for stage, kv in zip(self.stages, self.kv, strict=True):
            tensors = stage(tensors, positions, kv, metadata)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        every = torch.arange(len(positions), device=positions.device)
        return self.stages[-1].compute_logits(tensors, every)

    def prefill(self, row: int, ids: Sequence[int], chunk: int) -> Tensor:
        """Logits of all prompt tokens, fed `chunk` at a time: [len(ids), vocab]."""
        parts = [self.step({row: list(ids[i : i + chunk])}) for i in range(0, len(ids), chunk)]
        return torch.cat(parts)

    def greedy(self, row: int, prompt: Sequence[int], count: int, *, chunk: int = 512) -> list[int]:
        """`count` likeliest ids after the prompt."""
        ids = [int(self.prefill(row, prompt, chunk)[-1].argmax())]
        while len(ids) < count:
            ids.append(int(self.step({row: [ids[-1]]})[-1].argmax()))
        return ids


def load_stage(
    directory: Path,
    start: int,
    end: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kernels: CpuKernels | None = None,
    block_size: int = 4,
    group: TensorGroup = SOLO,
    expert_parallel: bool = False,
    format_of: FormatOf = never_quantized,
) -> Decoder:
    """The layers `[start, end)` of a checkpoint, weights loaded."""
    spec = load_spec(directory)
    stage = Decoder(
        spec,
        (start, end),
        dtype=dtype,
        device=device,
        kernels=kernels,
        block_size=block_size,
        group=group,
        expert_parallel=expert_parallel,
        format_of=format_of,
    )
    load_weights(stage, Checkpoint(directory), lambda done, total: None)
    return stage


def stage_layers(stage: Decoder) -> range:
    return range(stage.start_layer, stage.end_layer)
