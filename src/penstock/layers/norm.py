"""RMSNorm with the residual addition in front of it (row A11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.layers.compute import Compute


class AddRMSNorm(nn.Module):
    """Adds the branch to the residual stream and normalises the sum.

    The mean square is taken in float32 whatever the dtype of the stream (arXiv 1910.07467; the order of casts
    is that of transformers, so that bfloat16 agrees as well).
    """

    def __init__(self, size: int, eps: float, *, compute: Compute) -> None:
        super().__init__()
        self.weight = compute.parameter(size)
        self.eps = eps
        self._kernels = compute.kernels_for("norm")

    def forward(
        self, hidden_states: Tensor, residual: Tensor, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Two [num_tokens, hidden] -> (normalised sum, sum); our kernel writes the sum over `residual`.

        Args:
            selected: [num_selected] int64, the only tokens that are wanted, rising; the normalised sum has as
                many rows, and the sum is of no use.
        """
        if self._kernels is not None:
            normed = self._kernels.add_rms_norm(hidden_states, residual, self.weight, self.eps, selected)
            return normed, residual
        if selected is not None and len(selected) != len(hidden_states):
            hidden_states, residual = hidden_states[selected], residual[selected]
        residual = hidden_states + residual
        wide = residual.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(residual.dtype), residual
