"""Multiplication of hidden states by a constant of the model."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.layers.compute import Compute


class Scale(nn.Module):
    """x * factor, rounded once."""

    def __init__(self, factor: float, *, compute: Compute) -> None:
        super().__init__()
        self.factor = factor
        self._kernels = compute.kernels_for("norm")

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same; our kernel writes over `x`."""
        if self._kernels is None:
            return x * self.factor
        self._kernels.scale(x, self.factor)
        return x


class NoScale(nn.Module):
    """x as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def scale_by(factor: float, compute: Compute) -> nn.Module:
    """`Scale`, or nothing at all for a factor of 1."""
    return NoScale() if factor == 1.0 else Scale(factor, compute=compute)
