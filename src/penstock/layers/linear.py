"""Projections. `Linear` is one checkpoint tensor; `FusedLinear` is several that are multiplied at once.

The weights start uninitialised: `weights.loader` reads the checkpoint straight into their memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.errors import NotEnoughMemoryError


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A weight whose memory is not touched before it is loaded.

    Raises:
        NotEnoughMemoryError: the device refuses; also for sizes that no machine has.
    """
    try:
        memory = torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        gib = math.prod(shape) * dtype.itemsize / 2**30
        raise NotEnoughMemoryError(
            f"{gib:.1f} GiB on {device} for a weight of {list(shape)}: not available.",
            remedy="Use more stages or a smaller dtype, and check the sizes in config.json.",
        ) from error
    return nn.Parameter(memory, requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b with W of [out_size, in_size], as checkpoints store it."""

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size, dtype=dtype, device=device)
        self.bias = empty_parameter(out_size, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_size, sum(out_sizes.values()), bias=bias, dtype=dtype, device=device)
        self.out_sizes = list(out_sizes.values())
        self.parts: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in out_sizes.items():
            self.parts[name] = (start, start + size)
            start += size

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """Views of the parts of what `forward` gave."""
        return torch.split(output, self.out_sizes, dim=-1)
