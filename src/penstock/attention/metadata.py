"""The facts of a step that attention needs beside its tensors.

`AttentionMetadata` is made once per step by `runner.forward_batch` and read by every layer's attention.
Keys and values live in *slots*: token position p of a row is in slot `block_table[p // block_size] *
block_size + p % block_size`. Decode rows (one token each) come first in a step, then the rows that prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cpu import abi

# The most slots that a decode group of several rows gathers; contexts count as long as the longest. This
# bounds the temporary memory of a step with long contexts.
MAX_GROUP_SLOTS = 1 << 17
# Contexts of a decode group are padded to a multiple of this: shapes recur from step to step, so that oneDNN,
# which compiles a kernel for every new shape of a bfloat16 product, finds one that it has.
CONTEXT_STEP = 32


class KernelStep:
    """A step's `kernels.cpu.abi.Step`, with the memory to which its pointers point."""

    def __init__(self, metadata: AttentionMetadata, positions: Tensor | None = None) -> None:
        self._kept = (positions, metadata.slot_mapping, metadata.block_tables)
        self._query_starts = np.array(metadata.query_starts, dtype=np.int64)
        self._seq_lens = np.array(metadata.seq_lens, dtype=np.int64)
        tables = metadata.block_tables
        assert tables.stride(-1) == 1 or tables.shape[-1] <= 1, "a row of block tables must be contiguous"
        self.struct = abi.Step(
            num_tokens=metadata.query_starts[-1],
            positions=None if positions is None else positions.data_ptr(),
            slot_mapping=metadata.slot_mapping.data_ptr(),
            block_tables=tables.data_ptr(),
            block_table_stride=tables.stride(0),
            query_starts=self._query_starts.ctypes.data,
            seq_lens=self._seq_lens.ctypes.data,
            num_rows=len(metadata.seq_lens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """The keys and values of one layer for all blocks."""

    key: Tensor  # [num_slots, num_kv_heads, head_dim]
    value: Tensor  # [num_slots, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKV:
    """The keys and values for our kernels, which decide how a block is laid out (csrc/attention.h)."""

    blocks: Tensor  # uint8 [num_blocks * block_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKV:
    """The storage of one layer of latent attention for all blocks: keys, of which the front is the value."""

    latent: Tensor  # [num_slots, rank + rotary_dim]


AnyKV = LayerKV | BlockKV | LatentKV


def kv_tensors(kv: AnyKV) -> list[Tensor]:
    """Return the tensors of one layer's storage; each tensor has all blocks, one behind the other.

    The tensors have the shapes of `LayerKV`, `BlockKV` or `LatentKV`: [num_slots, ...], or uint8
    [num_blocks * block_bytes].
    """
    return [getattr(kv, field.name) for field in fields(kv)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """A group of consecutive decode rows whose contexts are read together, padded to the longest."""

    start: int  # first row, and its token's index in the step: each decode row has one token
    end: int  # row behind the last
    slots: Tensor  # [num_rows, max_context] int64; padding repeats the first slot that the row sees
    padding: Tensor  # [num_rows, 1, 1, max_context] bool, True where there is no token


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """A row with several tokens, or with one that is not counted among the decodes."""

    start: int  # index of the row's first token in the step
    end: int  # index behind its last token
    slots: Tensor  # [context] int64, from the first that a token sees to the last of the step's own tokens
    visible: Tensor | None  # [end - start, context] bool; None: the step has the row's whole context

    def sight(self) -> Tensor:
        """Return `visible`, or where it is None, the causal mask of the whole context: [context, context]."""
        if self.visible is not None:
            return self.visible
        size = len(self.slots)
        return torch.ones(size, size, dtype=torch.bool, device=self.slots.device).tril()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The slots that a step's queries read in layers with the same window."""

    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]


@dataclass(
    frozen=True, kw_only=True
)  # without slots=True, so that the properties below are worked out once per step, not per layer
class AttentionMetadata:
    """The rows of a step, the same for all layers. Tensors are on the device of the KV storage."""

    query_starts: list[int]  # [num_rows + 1] row r owns tokens [query_starts[r], query_starts[r + 1])
    seq_lens: list[int]  # [num_rows] context length after this step
    block_tables: Tensor  # [num_rows, max_blocks] int64; entries past a row's context are never used
    slot_mapping: Tensor  # [num_tokens] int64, where the step's keys and values go
    num_decodes: int  # leading rows with exactly one token
    block_size: int
    kernel_step: abi.Step | None = None  # the same for our kernels, and the positions; None: use `step`

    @cached_property
    def step(self) -> KernelStep:
        """The rows of the step in the form of our kernels, without positions."""
        return KernelStep(self)

    @cached_property
    def _reads(self) -> dict[int, Reads]:
        return {}

    def reads(self, window: int) -> Reads:
        """Return the reads of layers whose tokens see themselves and `window` - 1 before them; 0: all."""
        if window not in self._reads:
            rows = range(self.num_decodes, len(self.seq_lens))
            self._reads[window] = Reads(
                decode_groups=[self._decode_group(*ends, window) for ends in self._decode_ranges(window)],
                prefill_rows=[self._prefill_row(row, window) for row in rows],
            )
        return self._reads[window]

    def _num_seen(self, window: int) -> list[int]:
        """Return how many tokens of its context the last token of each row sees."""
        return [min(seq_len, window) if window else seq_len for seq_len in self.seq_lens]

    def _decode_ranges(self, window: int) -> list[tuple[int, int]]:
        ranges, start, longest = [], 0, 0
        for row, num_seen in enumerate(self._num_seen(window)[: self.num_decodes]):
            longest = max(longest, num_seen)
            if row > start and (row + 1 - start) * longest > MAX_GROUP_SLOTS:
                ranges.append((start, row))
                start, longest = row, num_seen
        if start < self.num_decodes:
            ranges.append((start, self.num_decodes))
        return ranges

    def _decode_group(self, start: int, end: int, window: int) -> DecodeGroup:
        device = self.block_tables.device
        num_seen = self._num_seen(window)[start:end]
        counts = torch.tensor(num_seen, device=device)[:, None]
        first = torch.tensor(self.seq_lens[start:end], device=device)[:, None] - counts
        context = -(-max(num_seen) // CONTEXT_STEP) * CONTEXT_STEP
        offsets = torch.arange(context, device=device)[None, :]
        padding = offsets >= counts
        # Padding repeats a slot of the row itself. Another request's slot could hold NaN, and 0 x NaN is NaN.
        slots = self._slots(slice(start, end), first + offsets.masked_fill(padding, 0))
        return DecodeGroup(start=start, end=end, slots=slots, padding=padding[:, None, None, :])

    def _prefill_row(self, row: int, window: int) -> PrefillRow:
        start, end, context = self.query_starts[row], self.query_starts[row + 1], self.seq_lens[row]
        num_before = context - (end - start)
        first = max(0, num_before - window + 1) if window else 0
        position = torch.arange(first, context, device=self.block_tables.device)
        slots = self._slots(slice(row, row + 1), position[None, :])[0]
        visible, query = None, position[num_before - first :, None]
        if num_before:
            visible = position <= query
        if window and context > window:
            visible = (position <= query) & (position > query - window)
        return PrefillRow(start=start, end=end, slots=slots, visible=visible)

    def _slots(self, rows: slice, position: Tensor) -> Tensor:
        """Return the slots of `position` ([rows or 1, n]) in the given rows: [rows, n]."""
        tables = self.block_tables[rows]
        position = position.expand(len(tables), -1)
        blocks = tables.gather(1, position // self.block_size)
        return blocks * self.block_size + position % self.block_size
