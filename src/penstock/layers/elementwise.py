"""Computes functions such as a sigmoid by torch so that the bits of a row do not depend on other rows.

torch computes such a function for many numbers at once by vector instructions, and one by one for the numbers
left over at the end. It also cuts long tensors into parts for threads, each with an end of its own. The two
ways of computing may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTOR = 64  # numbers that torch computes at once, or a multiple of them
_UNCUT = 32_768  # numbers of a tensor that torch does not cut among threads (at::internal::GRAIN_SIZE)


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the function of each number of x, [num_rows, width], with bits that other rows do not change.

    That holds on a CPU for rows of at most 32,768 numbers: longer ones may be cut among threads. On a GPU
    each number has a thread of its own, so that the function is simply called.
    """
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[1]
    whole = F.pad(x, (0, -width % _VECTOR))
    pieces = torch.split(whole, max(1, _UNCUT // max(1, whole.shape[1])))
    return torch.cat([function(piece) for piece in pieces])[:, :width]
