"""A weight in the block formats of GGUF files: held as the file quantised it, in panels of our kernels.

A panel is some output columns of a weight, stored together. Parts of one matrix may have different formats (a
file often stores values in more bits than queries and keys), but each panel has only one. `layers.compute`
chooses these matrices; the loader fills them with `put_blocks`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ModelError
from penstock.families.kinds import Activation
from penstock.kernels.block_formats import BlockFormat
from penstock.kernels.block_rows import BlockRows, dequantize
from penstock.kernels.candidates import STRAIGHT, HeadOutput, HeadRequest, LogitCurve, head_output_of
from penstock.kernels.cpu import abi
from penstock.kernels.cpu.ops import PANEL, CpuKernels
from penstock.kernels.pages import shared_pages
from penstock.kernels.quantized_rows import round_activations
from penstock.layers.matrix import PLAIN, UP, Matrix, RoundingMatrix, padded_columns


@dataclass(frozen=True, slots=True)
class BlockForms:
    """The formats that the parts of a matrix have, each named once."""

    formats: tuple[BlockFormat, ...]

    @property
    def activation_group(self) -> int:
        """The number of inputs whose activations are rounded together: the smallest of all formats."""
        return min(block_format.group for block_format in self.formats)

    def may_share(self, parts: Mapping[str, int], num_ranks: int, *, gated: bool) -> bool:
        """Return whether the parts may be one matrix: parts of different formats must fill whole panels.

        Args:
            parts: name of each part -> number of its outputs on all ranks.
            num_ranks: number of ranks that have equal shares of the outputs.
            gated: the parts are gate and up, which share panels.
        """
        if len(self.formats) == 1:
            return True
        return not gated and all(outputs % (PANEL * num_ranks) == 0 for outputs in parts.values())


class BlockMatrix(RoundingMatrix):
    """The panels of block formats for our kernels (csrc/blocks.h)."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        forms: BlockForms,
        kernels: CpuKernels,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        token_bytes = kernels.library.penstock_block_token_bytes(in_size, forms.activation_group)
        super().__init__(out_size, in_size, dtype, kernels, token_bytes, gated=gated, activation=activation)
        self._forms = forms
        self._table = (abi.BlockPanel * (padded_columns(out_size, gated) // PANEL))()
        self._memory: list[Tensor] = []  # of the panels; more is added as their rows come

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        raise AssertionError("a matrix in block formats takes blocks")

    def put_blocks(self, first_row: int, rows: BlockRows, role: int) -> None:
        """Pack rows into the plain, gate or up part (`role`), from its row `first_row` on.

        Raises:
            ModelError: rows of two formats would share a panel.
        """
        width = PANEL if role == PLAIN else PANEL // 2
        self._make_room(first_row // width, -(-(first_row + len(rows)) // width), rows.format)
        parts = (rows.q, rows.d, rows.m, rows.scales, rows.offsets)
        held = [None if part is None else part.contiguous() for part in parts]
        q, d, m, scales, offsets = (None if part is None else part.data_ptr() for part in held)
        args = abi.BlockPackArgs(
            q=q,
            d=d,
            m=m,
            scales=scales,
            offsets=offsets,
            panels=ctypes.addressof(self._table),
            first_row=first_row,
            num_rows=len(rows),
            in_size=self.in_size,
            role=role,
        )
        self._kernels.library.penstock_pack_blocks(ctypes.addressof(args))

    def gather(self, ids: Tensor) -> Tensor:
        args = abi.QuantizedGatherArgs(
            weight=ctypes.addressof(self._table),
            in_size=self.in_size,
            bits=abi.BLOCKS,
            out_size=self.out_size,
        )
        return self._kernels.gather_blocks(ids, args, self.dtype)

    def product(self, bias: Tensor | None = None) -> abi.QuantizedLinearArgs:
        return abi.QuantizedLinearArgs(
            weight=ctypes.addressof(self._table),
            bias=None if bias is None else bias.data_ptr(),
            in_size=self.in_size,
            out_size=self.out_size,
            group_size=self._forms.activation_group,
            bits=abi.BLOCKS,
            gated=self._gate,
        )

    def _make_room(self, first_panel: int, end_panel: int, block_format: BlockFormat) -> None:
        """Give memory to those of these panels that have none yet; refuse a panel of another format."""
        empty = []
        for index in range(first_panel, end_panel):
            if self._table[index].records is None:
                empty.append(index)
            elif self._table[index].type != block_format.number:
                raise ModelError(
                    f"outputs {index * PANEL} to {(index + 1) * PANEL} of a weight of "
                    f"{[self.out_size, self.in_size]} are stored as {block_format.name} and in other "
                    "formats.",
                    remedy="Use fewer ranks for a stage, or a file with one format for these tensors.",
                )
        if not empty:
            return
        assert block_format in self._forms.formats, block_format.name
        panel_bytes = self._kernels.library.penstock_block_panel_bytes(block_format.number, self.in_size)
        said = f"a weight of {[self.out_size, self.in_size]}", "Use more stages or a smaller file."
        memory = shared_pages(len(empty) * panel_bytes, *said)
        self._memory.append(memory)
        for number, index in enumerate(empty):
            panel = self._table[index]
            panel.records, panel.type = memory.data_ptr() + number * panel_bytes, block_format.number


class RoundedBlocks(Matrix):
    """A matrix in block formats without our kernels: the same numbers, held and multiplied as floats.

    Activations are rounded as the kernel rounds them, so results agree up to the order of sums.
    """

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        forms: BlockForms,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__(out_size, in_size, dtype, gated=gated, activation=activation)
        self._group = min(forms.activation_group, in_size // 2)
        said = f"a weight of {[out_size, in_size]}", "Use more stages, or a CPU that our kernels support."
        self._rows = shared_pages(out_size * in_size * 4, *said).view(torch.float32).view(out_size, in_size)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        raise AssertionError("a matrix in block formats takes blocks")

    def put_blocks(self, first_row: int, rows: BlockRows, role: int) -> None:
        """Keep rows, dequantised, in the plain, gate or up part (`role`), from its row `first_row` on."""
        start = first_row + (self.out_size // 2 if role == UP else 0)
        self._rows[start : start + len(rows)] = dequantize(rows)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(self._rounded(x), self._rows, None if bias is None else bias.float())
        return self._through_gate(y).to(self.dtype)

    def gather(self, ids: Tensor) -> Tensor:
        return self._rows[ids].to(self.dtype)

    def head(self, x: Tensor, request: HeadRequest, curve: LogitCurve = STRAIGHT) -> HeadOutput:
        return head_output_of(curve.of(F.linear(self._rounded(x), self._rows)), request)

    def _rounded(self, x: Tensor) -> Tensor:
        return round_activations(x, self._group)
