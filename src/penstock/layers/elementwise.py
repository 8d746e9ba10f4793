"""The functions of each number by torch whose bits do not depend on how many numbers there are.

torch computes a function such as a sigmoid for many numbers at once by vectors, and for those that are left
over one by one; and it cuts long tensors among threads, wherever that may be. Both ways differ in the last
bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTOR = 64  # numbers that torch computes at once, or a multiple of them
_UNCUT = 32_768  # numbers that it leaves to one thread (at::internal::GRAIN_SIZE)


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the function of each number of x, [num_rows, width], whatever other rows there are.

    Rows of more than 32,768 numbers may be cut all the same. On a GPU a number has a thread of its own.
    """
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[1]
    whole = F.pad(x, (0, -width % _VECTOR))
    pieces = torch.split(whole, max(1, _UNCUT // max(1, whole.shape[1])))
    return torch.cat([function(piece) for piece in pieces])[:, :width]
