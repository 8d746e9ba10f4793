"""The ways in which a rank computes: dtype, device, kernels, and the form in which each weight is held.

Every model of a rank has one `Compute`, which it gives to all its layers. The forms of weights:

    our kernels, float32 or bfloat16     packed panels
    quantised                            integer panels; rounded floats without our kernels
    quantised in blocks of GGUF          panels of blocks; rounded floats without our kernels
    no kernels, bfloat16 on a CPU        prepacked by oneDNN
    anything else, and any GPU           a plain parameter
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import nn

from penstock.distributed.group import SOLO, TensorGroup
from penstock.errors import NotEnoughMemoryError
from penstock.families.kinds import Activation
from penstock.kernels.cpu.ops import DTYPES, CpuKernels
from penstock.layers.block_matrix import BlockForms, BlockMatrix, RoundedBlocks
from penstock.layers.matrix import (
    Matrix,
    OnednnMatrix,
    PackedMatrix,
    QuantizedFormat,
    QuantizedMatrix,
    RoundedMatrix,
)


class _Gate(TypedDict):
    gated: bool
    activation: Activation


HeldForm = QuantizedFormat | BlockForms
FormatOf = Callable[[Mapping[str, int], int], HeldForm | None]


def never_quantized(parts: Mapping[str, int], in_size: int) -> None:
    """Return None for any projections, as `format_of` of a model that is not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The settings by which the layers of a rank compute.

    Attributes:
        kernels: our kernels for the CPU; None: torch computes everything.
        format_of: returns the form in which a matrix is quantised, or None if it is not. Its arguments are
            the projections of the matrix (name in the checkpoint -> outputs), and the number of inputs.
        group: the ranks that share the weights.
        expert_parallel: each rank has some experts whole; else each has a part of the width of every expert.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: CpuKernels | None = None
    format_of: FormatOf = never_quantized
    group: TensorGroup = SOLO
    expert_parallel: bool = False

    def kernels_for(self, name: str) -> CpuKernels | None:
        """Return our kernels if the one of this name is enabled and takes the rank's dtype; else None."""
        usable = self.kernels is not None and self.kernels.has(name) and self.dtype in DTYPES
        return self.kernels if usable else None

    def weight(
        self,
        parts: Mapping[str, int],
        out_size: int,
        in_size: int,
        *,
        gated: bool = False,
        activation: Activation = "silu",
        whole_in_size: int | None = None,
    ) -> nn.Parameter | Matrix:
        """Return an empty weight [out_size, in_size] in the fastest form that the settings allow.

        Args:
            parts: the checkpoint's projections that it consists of: name without ".weight" -> outputs on all
                ranks.
            gated: its outputs are those of a gate, then those of an up projection.
            activation: activation of the gate.
            whole_in_size: inputs of the checkpoint's projections, if this rank has only `in_size` of them.
        """
        quantized = self.format_of(parts, whole_in_size or in_size)
        kernels = self.kernels_for("linear")
        gate = _Gate(gated=gated, activation=activation)
        if isinstance(quantized, BlockForms):
            if quantized.may_share(parts, self.group.size, gated=gated):
                return self._blocks(out_size, in_size, quantized, gate)
            quantized = None
        if quantized is not None and kernels is not None:
            return QuantizedMatrix(out_size, in_size, self.dtype, quantized, kernels, **gate)
        if quantized is not None:
            return RoundedMatrix(out_size, in_size, self.dtype, quantized, **gate)
        if kernels is not None:
            return PackedMatrix(out_size, in_size, self.dtype, kernels, **gate)
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and _has_onednn():
            return OnednnMatrix(out_size, in_size, self.dtype, **gate)
        return self.parameter(out_size, in_size)

    def _blocks(self, out_size: int, in_size: int, forms: BlockForms, gate: _Gate) -> Matrix:
        kernels = self.kernels_for("linear")
        if kernels is None:
            return RoundedBlocks(out_size, in_size, self.dtype, forms, **gate)
        return BlockMatrix(out_size, in_size, self.dtype, forms, kernels, **gate)

    def table(
        self, parts: Mapping[str, int], num_ids: int, size: int, *, multiplied: bool
    ) -> nn.Parameter | Matrix:
        """Return an empty embedding [num_ids, size].

        It is a plain parameter if it is not quantised and its rows are only looked up.

        Args:
            parts: as for `weight`.
            multiplied: it is the output head as well.
        """
        is_quantized = self.format_of(parts, size) is not None
        if is_quantized or (multiplied and self.kernels_for("linear") is not None):
            return self.weight(parts, num_ids, size)
        return self.parameter(num_ids, size)

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return a weight whose memory is not touched before it is loaded.

        Raises:
            NotEnoughMemoryError: the device refuses, as it does for sizes that no machine has.
        """
        try:
            memory = torch.empty(shape, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            gib = math.prod(shape) * self.dtype.itemsize / 2**30
            raise NotEnoughMemoryError(
                f"{gib:.1f} GiB on {self.device} for a weight of {list(shape)}: not available.",
                remedy="Use more stages or a smaller dtype, and check the sizes in config.json.",
            ) from error
        return nn.Parameter(memory, requires_grad=False)


def _has_onednn() -> bool:
    """Return whether oneDNN takes bfloat16 here; it needs a CPU with AVX-512 or the like."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported
