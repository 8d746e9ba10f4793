"""The weight of a projection in the form in which it is multiplied: held once, in that form only.

A plain weight is a parameter of the module that uses it. The matrices here are weights in other forms: packed
for our kernels, quantised, or prepacked for oneDNN where there are no kernels. `layers.compute` chooses the
form; the loader puts the checkpoint's rows into it piece by piece.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.distributed.share import Share
from penstock.families.kinds import Activation
from penstock.kernels.candidates import STRAIGHT, HeadOutput, HeadRequest, LogitCurve, head_output_of
from penstock.kernels.cpu import abi
from penstock.kernels.cpu.head import Head, dense_product
from penstock.kernels.cpu.ops import DTYPES, PANEL, CpuKernels
from penstock.kernels.pages import shared_pages, zero_pages
from penstock.kernels.quantized_rows import (
    QuantizedRows,
    dequantize,
    quantize_rows,
    round_activations,
)
from penstock.layers.activation import gate_and_multiply

# How rows lie among the packed columns (csrc/epilogue.h): gate and up projections share panels.
PLAIN, GATE, UP = 0, 1, 2

_GATES: dict[Activation, int] = {"silu": abi.SILU, "gelu_tanh": abi.GELU_TANH}
_SCALE_DTYPES = DTYPES | {torch.float16: abi.FLOAT16}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """A format of quantised matrices: so many bits, and a scale for every `group_size` inputs of an output.

    If `group_size` is the number of inputs or more, each output has one scale.
    """

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    has_zeros: bool


class Matrix(nn.Module, ABC):
    """A weight W of [out_size, in_size] that is not a parameter.

    Attributes:
        dtype: dtype of inputs and outputs.
        gated: the first half of its outputs is a gate, the second half an up projection.
        activation: activation of the gate, if gated.
    """

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        self.out_size, self.in_size, self.dtype, self.gated = out_size, in_size, dtype, gated
        self.activation: Activation = activation
        self._gate = _GATES[activation] if gated else 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of memory that the matrix takes."""

    @abstractmethod
    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        """Put rows [first_row, first_row + n) of the part `role` (plain, gate or up): [n, in_size]."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias for [num_tokens, in_size]; gated: activation(gate) * up, half as wide."""

    @abstractmethod
    def gather(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` of W: [num_tokens, in_size]. The matrix must not be gated."""

    def finish(self) -> None:
        """Finish the matrix: all rows were put. A form that needs no more than the rows does nothing."""

    def head(self, x: Tensor, request: HeadRequest, curve: LogitCurve = STRAIGHT) -> HeadOutput:
        """Return what `request` asks for of the logits of x, [num_rows, in_size]; W has a row for each id."""
        return head_output_of(curve.of(self.multiply(x, None)), request)

    def _through_gate(self, y: Tensor) -> Tensor:
        """Apply the gate: [..., 2 n] of gate and up -> [..., n]; all of it where there is no gate."""
        if not self.gated:
            return y
        gate, up = y.chunk(2, dim=-1)
        return gate_and_multiply(gate, up, self.activation)


class PackedMatrix(Matrix):
    """The panels of float32 or bfloat16 for our kernels (csrc/panels.h)."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        kernels: CpuKernels,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__(out_size, in_size, dtype, gated=gated, activation=activation)
        self._kernels, self._head = kernels, Head(kernels.library)
        columns = padded_columns(out_size, gated)
        padded_in = in_size + in_size % 2 if dtype == torch.bfloat16 else in_size
        self._panels = _pages(columns * padded_in * dtype.itemsize, out_size, in_size)
        self._panels = self._panels.view(dtype)
        self._head_product = self.product()

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        rows = rows.contiguous()
        assert rows.dtype == self.dtype
        assert rows.shape[1] == self.in_size
        self._kernels.library.penstock_pack(
            rows.data_ptr(),
            self._panels.data_ptr(),
            first_row,
            len(rows),
            self.in_size,
            role,
            DTYPES[self.dtype],
        )

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernels.linear(x, self._panels, bias, out_size=self.out_size, gated=self._gate)

    def gather(self, ids: Tensor) -> Tensor:
        return self._kernels.gather(ids, self._panels, in_size=self.in_size, out_size=self.out_size)

    def head(self, x: Tensor, request: HeadRequest, curve: LogitCurve = STRAIGHT) -> HeadOutput:
        if not self._kernels.has("head"):
            return super().head(x, request, curve)
        return self._head.answer(x, self._head_product, request, curve)

    def product(self) -> abi.LinearArgs:
        """Return this weight as arguments of a kernel, which fills in the input and the output itself."""
        return dense_product(self._panels.data_ptr(), self.in_size, self.out_size, self.dtype)


class RoundingMatrix(Matrix):
    """A matrix of our kernels that is multiplied with activations rounded to 8 bits.

    Args:
        token_bytes: bytes of scratch memory for the rounded activations of one token.
    """

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        kernels: CpuKernels,
        token_bytes: int,
        *,
        gated: bool,
        activation: Activation,
    ) -> None:
        super().__init__(out_size, in_size, dtype, gated=gated, activation=activation)
        self._kernels, self._head, self._token_bytes = kernels, Head(kernels.library), token_bytes

    @abstractmethod
    def product(self, bias: Tensor | None = None) -> abi.QuantizedLinearArgs:
        """Return this weight as arguments of a kernel, which fills in the input and the output itself.

        Args:
            bias: [out_size], which the caller must keep alive; None: there is none.
        """

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernels.quantized_linear(x, self.product(bias), self._token_bytes)

    def head(self, x: Tensor, request: HeadRequest, curve: LogitCurve = STRAIGHT) -> HeadOutput:
        if not self._kernels.has("head"):
            return super().head(x, request, curve)
        scratch = torch.empty(len(x), self._token_bytes, dtype=torch.uint8)
        product = self.product()
        product.dtype, product.scratch = DTYPES[x.dtype], scratch.data_ptr()
        return self._head.answer(x, product, request, curve)


class QuantizedMatrix(RoundingMatrix):
    """The panels of 8- or 4-bit weights for our kernels (csrc/quantized.h)."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        quantized: QuantizedFormat,
        kernels: CpuKernels,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        scale_type = _SCALE_DTYPES[quantized.scale_dtype]
        sizes = abi.QuantizedSizes()
        kernels.library.penstock_quantized_sizes(
            out_size,
            in_size,
            quantized.group_size,
            quantized.bits,
            gated,
            scale_type,
            ctypes.addressof(sizes),
        )
        super().__init__(
            out_size, in_size, dtype, kernels, sizes.token_bytes, gated=gated, activation=activation
        )
        self._format, self._scale_type = quantized, scale_type
        self._panels = _pages(sizes.weight_bytes, out_size, in_size)
        self._scales = _pages(sizes.scale_bytes, out_size, in_size)
        self._zeros = _pages(sizes.zero_bytes, out_size, in_size) if quantized.has_zeros else None

    @property
    def nbytes(self) -> int:
        zeros = 0 if self._zeros is None else self._zeros.nbytes
        return self._panels.nbytes + self._scales.nbytes + zeros

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        self.put_quantized(first_row, quantize_rows(rows, self._format.bits, self._format.group_size), role)

    def put_columns(self, first_row: int, rows: Tensor, columns: Share, role: int) -> None:
        """Put some columns of rows that are quantised as a whole.

        Args:
            rows: [n, columns.whole], not quantised.
            columns: those of this matrix, in_size in number.
        """
        quantized = quantize_rows(rows, self._format.bits, self._format.group_size)
        self.put_quantized(first_row, quantized.cut(slice(None), columns), role)

    def put_quantized(self, first_row: int, rows: QuantizedRows, role: int) -> None:
        """Put rows that are quantised already, in this matrix' format."""
        scales = rows.scales.to(self._format.scale_dtype).contiguous()
        zeros = None if rows.zeros is None else rows.zeros.contiguous()
        assert (zeros is None) == (self._zeros is None), "zeros for all rows or for none"
        q = rows.q.contiguous()
        args = abi.QuantizedPackArgs(
            q=q.data_ptr(),
            scales=scales.data_ptr(),
            zeros=None if zeros is None else zeros.data_ptr(),
            weight=self._panels.data_ptr(),
            packed_scales=self._scales.data_ptr(),
            packed_zeros=None if self._zeros is None else self._zeros.data_ptr(),
            first_row=first_row,
            num_rows=len(q),
            in_size=self.in_size,
            group_size=self._format.group_size,
            bits=self._format.bits,
            role=role,
            scale_dtype=self._scale_type,
        )
        self._kernels.library.penstock_pack_quantized(ctypes.addressof(args))

    def gather(self, ids: Tensor) -> Tensor:
        args = abi.QuantizedGatherArgs(
            weight=self._panels.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=None if self._zeros is None else self._zeros.data_ptr(),
            in_size=self.in_size,
            group_size=self._format.group_size,
            bits=self._format.bits,
            scale_dtype=self._scale_type,
            out_size=self.out_size,
        )
        return self._kernels.gather_quantized(ids, args, self.dtype)

    def product(self, bias: Tensor | None = None) -> abi.QuantizedLinearArgs:
        return abi.QuantizedLinearArgs(
            weight=self._panels.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=None if self._zeros is None else self._zeros.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            in_size=self.in_size,
            out_size=self.out_size,
            group_size=self._format.group_size,
            bits=self._format.bits,
            gated=self._gate,
            scale_dtype=self._scale_type,
        )


class OnednnMatrix(Matrix):
    """A matrix in bfloat16 without our kernels: prepacked once, which `F.linear` would do at every call."""

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__(out_size, in_size, dtype, gated=gated, activation=activation)
        # The rows have pages of their own, which go back to the system once they are prepacked.
        pages = zero_pages(out_size * in_size * dtype.itemsize, *_said(out_size, in_size))
        self._rows: Tensor | None = pages.view(dtype).view(out_size, in_size)
        self._prepacked: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.out_size * self.in_size * self.dtype.itemsize

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        assert self._rows is not None, "the matrix is finished"
        start = first_row + (self.out_size // 2 if role == UP else 0)
        self._rows[start : start + len(rows)] = rows

    def finish(self) -> None:
        """Prepack the rows and drop the plain ones, so that memory holds one copy."""
        assert self._rows is not None, "the matrix is finished"
        self._prepacked = torch.ops.mkldnn._reorder_linear_weight(self._rows)
        self._rows = None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._prepacked, bias, "none", [], "")
        return self._through_gate(y)

    def gather(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("a prepacked matrix cannot be read; embeddings stay plain")


class RoundedMatrix(Matrix):
    """A quantised matrix without our kernels: the same numbers, held and multiplied as floats.

    Activations are rounded as the kernel rounds them, so results agree up to the order of sums.
    """

    def __init__(
        self,
        out_size: int,
        in_size: int,
        dtype: torch.dtype,
        quantized: QuantizedFormat,
        *,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__(out_size, in_size, dtype, gated=gated, activation=activation)
        self._format = quantized
        pages = _pages(out_size * in_size * 4, out_size, in_size)
        self._rows = pages.view(torch.float32).view(out_size, in_size)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        self.put_quantized(first_row, quantize_rows(rows, self._format.bits, self._format.group_size), role)

    def put_columns(self, first_row: int, rows: Tensor, columns: Share, role: int) -> None:
        """Put some columns of rows that are quantised as a whole.

        Args:
            rows: [n, columns.whole], not quantised.
            columns: those of this matrix, in_size in number.
        """
        quantized = quantize_rows(rows, self._format.bits, self._format.group_size)
        self.put_quantized(first_row, quantized.cut(slice(None), columns), role)

    def put_quantized(self, first_row: int, rows: QuantizedRows, role: int) -> None:
        """Put rows that are quantised already."""
        start = first_row + (self.out_size // 2 if role == UP else 0)
        self._rows[start : start + len(rows.q)] = dequantize(rows, torch.float32)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rounded = round_activations(x, self._format.group_size)
        y = F.linear(rounded, self._rows, None if bias is None else bias.float())
        return self._through_gate(y).to(self.dtype)

    def gather(self, ids: Tensor) -> Tensor:
        return self._rows[ids].to(self.dtype)

    def head(self, x: Tensor, request: HeadRequest, curve: LogitCurve = STRAIGHT) -> HeadOutput:
        rounded = round_activations(x, self._format.group_size)
        return head_output_of(curve.of(F.linear(rounded, self._rows)), request)


def padded_columns(out_size: int, gated: bool) -> int:
    """Return the columns of all panels: outputs are padded to whole panels, gate and up each to half ones."""
    width = out_size // 2 if gated else out_size
    part = PANEL // 2 if gated else PANEL
    return -(-width // part) * PANEL


def _pages(num_bytes: int, out_size: int, in_size: int) -> Tensor:
    return shared_pages(num_bytes, *_said(out_size, in_size))


def _said(out_size: int, in_size: int) -> tuple[str, str]:
    """Return purpose and remedy for the error that is raised if the system gives no memory."""
    return f"a weight of {[out_size, in_size]}", "Use more stages, a smaller dtype, or --quantization."
