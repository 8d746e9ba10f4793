"""The gate of an MLP: the activation of one projection, multiplied by another projection."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.families.kinds import Activation


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (SwiGLU, arXiv 2002.05202): two [num_tokens, size] -> [num_tokens, size]."""
    return F.silu(gate).mul_(up)


def gate_and_multiply(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up: two [..., size] -> [..., size].

    Gelu is approximated with tanh (arXiv 1606.08415).
    """
    if activation == "silu":
        return silu_and_multiply(gate, up)
    return F.gelu(gate, approximate="tanh").mul_(up)
