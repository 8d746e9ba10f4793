"""The multiplication of hidden states by a constant of the model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.layers.compute import Compute


class Scale:
    """A product x * factor, rounded once. It holds no weights."""

    def __init__(self, factor: float, *, compute: Compute) -> None:
        self._factor = factor
        self._kernels = compute.kernels_for("norm")

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, size] times the factor; our kernel writes over `x`."""
        if self._kernels is None:
            return x * self._factor
        self._kernels.scale(x, self._factor)
        return x


def unchanged(x: Tensor) -> Tensor:
    """Return x as it is, of any shape."""
    return x


def scale_by(factor: float, compute: Compute) -> Callable[[Tensor], Tensor]:
    """Return `Scale`, or `unchanged` for a factor of 1: [num_tokens, size] -> the same."""
    return unchanged if factor == 1.0 else Scale(factor, compute=compute)
