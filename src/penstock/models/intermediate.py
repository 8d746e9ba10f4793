"""The tensors that travel from one stage to the next, between two layers.

Between two stages the branch (the last layer's output) is added to the residual stream, as the first norm of
the next stage would add it. The sum alone travels, as `hidden_states`, and the stream starts anew in the next
stage (`StreamStart`).
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from typing import overload

import torch
from torch import Tensor

from penstock.errors import PlanMemoryError


class IntermediateTensors:
    """The named tensors over the same tokens [A8]: `hidden_states`, `residual`: [num_tokens, hidden].

    A string selects a tensor, a slice selects tokens of all of them. A subclass may make `tensors` lazy.

    Attributes:
        failure: why the tensors were not computed, so that they mean nothing; None: they were computed.
    """

    failure: PlanMemoryError | None = None

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self, key: slice) -> IntermediateTensors: ...
    def __getitem__(self, key: str | slice) -> Tensor | IntermediateTensors:
        if isinstance(key, str):
            return self.tensors[key]
        return IntermediateTensors({name: tensor[key] for name, tensor in self.tensors.items()})

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.tensors[key] = value

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"IntermediateTensors({shapes})"

    def items(self) -> ItemsView[str, Tensor]:
        """Return the names, each with its tensor, [num_tokens, hidden]."""
        return self.tensors.items()

    def empty_like(self) -> IntermediateTensors:
        """Return new tensors of the same names, shapes ([num_tokens, hidden]), dtypes and devices.

        Their contents are not initialised.
        """
        return IntermediateTensors({name: torch.empty_like(t) for name, t in self.tensors.items()})


class StreamStart:
    """The residual stream at the beginning of a stage: minus zeros, which must never be written to.

    Adding minus zero changes no bit of a number; adding plus zero would turn a minus zero into a plus zero.
    """

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._zeros = torch.empty((0, width), dtype=dtype, device=device)

    def of(self, num_tokens: int) -> Tensor:
        """Return [num_tokens, width]: the same memory for all steps, unless one is larger than any before."""
        if num_tokens > len(self._zeros):
            self._zeros = self._zeros.new_full((num_tokens, self._zeros.shape[1]), -0.0)
        return self._zeros[:num_tokens]


def make_empty_intermediate_tensors_factory(
    hidden_size: int, *, dtype: torch.dtype, device: torch.device
) -> Callable[[int], IntermediateTensors]:
    """Return a function from a number of tokens to zeroed tensors such as a stage receives [A9].

    Each of them is [num_tokens, hidden_size].
    """

    def make_empty(num_tokens: int) -> IntermediateTensors:
        shape = (num_tokens, hidden_size)
        names = ("hidden_states", "residual")
        return IntermediateTensors({n: torch.zeros(shape, dtype=dtype, device=device) for n in names})

    return make_empty
