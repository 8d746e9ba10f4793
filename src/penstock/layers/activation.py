"""The gate of the MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202): two [num_tokens, size] -> [num_tokens, size]."""
    return F.silu(gate).mul_(up)
