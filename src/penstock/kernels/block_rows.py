"""The rows of a matrix in a block format as values, scales and offsets, which are then packed into panels.

`weights.gguf_blocks` makes them, `layers.block_matrix` packs them, and `dequantize` says what numbers they
stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.distributed.share import Share
from penstock.kernels.block_formats import CODEBOOK, BlockFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRows:
    """The rows of a matrix in one block format (`kernels.block_formats` says what the parts mean).

    Attributes:
        q: uint8 [n, in_size].
        d: float16 [n, records].
        m: float16 [n, records], in formats with offsets.
        scales: uint8 [n, groups], in records of 256 inputs.
        offsets: uint8 [n, groups], in records of 256 inputs and formats with offsets.
    """

    format: BlockFormat
    q: Tensor
    d: Tensor
    m: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None

    def __len__(self) -> int:
        return len(self.q)

    def cut(self, rows: slice | Tensor, columns: Share | None) -> BlockRows:
        """Return some rows, and some or all of their columns, which must be whole records.

        Args:
            rows: a slice, or [num_rows] int64 indices.
            columns: inputs, not records; None: all.
        """
        inputs, group = self.format.inputs, self.format.group
        if columns is not None:
            assert columns.start % inputs == columns.end % inputs == 0, (columns, self.format.name)

        def part(values: Tensor | None, width: int) -> Tensor | None:
            if values is None:
                return None
            own = slice(None) if columns is None else slice(columns.start // width, columns.end // width)
            return values[rows][:, own]

        q, d = part(self.q, 1), part(self.d, inputs)
        assert q is not None
        assert d is not None
        return BlockRows(
            format=self.format,
            q=q,
            d=d,
            m=part(self.m, inputs),
            scales=part(self.scales, group),
            offsets=part(self.offsets, group),
        )


def dequantize(rows: BlockRows) -> Tensor:
    """Return the numbers that rows stand for: float32 [n, in_size], each rounded once."""
    form = rows.format
    n, in_size = rows.q.shape
    if form.has_codebook:
        values = torch.tensor(CODEBOOK, dtype=torch.float32)[rows.q.long()]
    else:
        values = rows.q.float() - form.zero
    scales, offsets = rows.d.float(), None if rows.m is None else rows.m.float()
    if rows.scales is not None:
        scales = scales.repeat_interleave(form.groups, -1) * (rows.scales.float() - form.scale_zero)
    if rows.offsets is not None:
        assert offsets is not None
        offsets = -(offsets.repeat_interleave(form.groups, -1) * rows.offsets.float())
    grouped = values.view(n, in_size // form.group, form.group) * scales.unsqueeze(-1)  # exact
    if offsets is not None:
        grouped = grouped + offsets.unsqueeze(-1)
    return grouped.view(n, in_size)
