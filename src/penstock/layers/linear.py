"""Projections. `Linear` is one checkpoint tensor; `FusedLinear` is several that are multiplied at once.

The weights start empty, in the form that `layers.compute` chose: `weights.loader` fills them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layers.activation import silu_and_multiply
from penstock.layers.compute import Compute
from penstock.layers.matrix import GATE, PLAIN, UP, Matrix


class Linear(nn.Module):
    """y = x W^T + b with W of [out_size, in_size], as checkpoints store it.

    Args:
        parts: the checkpoint's name of the projection, or of several, and their outputs; decides how it is
            quantised.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        compute: Compute,
        parts: Mapping[str, int] | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.weight = compute.weight(parts or {}, out_size, in_size, gated=gated)
        self.bias = compute.parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Matrix):
            return self.weight.multiply(x, self.bias)
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Projections of the same input, stacked by output rows (row A13).

    Attributes:
        parts: checkpoint name of each projection -> its rows `[start, end)` of weight and bias.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: Mapping[str, int],
        *,
        bias: bool,
        compute: Compute,
        parent: str = "",
        gated: bool = False,
    ) -> None:
        parts = {f"{parent}.{name}": size for name, size in out_sizes.items()}
        total = sum(out_sizes.values())
        super().__init__(in_size, total, bias=bias, compute=compute, parts=parts, gated=gated)
        self.out_sizes = list(out_sizes.values())
        self.parts: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in out_sizes.items():
            self.parts[name] = (start, start + size)
            start += size

    def role(self, part: str) -> int:
        """How the rows of a part lie in a packed weight."""
        return PLAIN

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """Views of the parts of what `forward` gave."""
        return torch.split(output, self.out_sizes, dim=-1)


class GatedLinear(FusedLinear):
    """silu(gate(x)) * up(x), both projections in one matrix."""

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, compute: Compute, parent: str = ""
    ) -> None:
        out_sizes = {"gate_proj": out_size, "up_proj": out_size}
        super().__init__(in_size, out_sizes, bias=bias, compute=compute, parent=parent, gated=True)

    def role(self, part: str) -> int:
        return GATE if part == "gate_proj" else UP

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if isinstance(self.weight, Matrix) else silu_and_multiply(*self.split(output))
