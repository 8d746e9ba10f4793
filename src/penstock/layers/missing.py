"""The stand-ins for parts of the model that live on another stage [A5]. They hold no parameters.

`MissingLayer` serves models of our own, which know what is not there; the other two serve models that run all
their layers, wherever those are (`models.transformers_backend`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.layers.compute import Compute


class MissingLayer(nn.Module):
    """A stand-in that returns its first argument.

    Args:
        return_tuple: return it as `(x,)`, for callers that unpack the result.
    """

    def __init__(self, *, return_tuple: bool = False) -> None:
        super().__init__()
        self.return_tuple = return_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else next(iter(kwargs.values()))
        return (value,) if self.return_tuple else value


class RunningPass(Protocol):
    """The holder of the forward pass that runs."""

    @property
    def running(self) -> Any:
        """The pass that runs.

        It has the input of the first own layer (`received`), the output of the last one (`given`), and
        `num_tokens`.
        """


class OtherLayer(nn.Module):
    """A stand-in for a layer of another stage, with the attributes of the real layer for the model's loop."""

    def __init__(self, layer: nn.Module, track: RunningPass, *, is_earlier: bool, gives_tuples: bool) -> None:
        super().__init__()
        self._layer, self._track = (layer,), track  # in a tuple, so that torch does not register the layer
        self._is_earlier, self._gives_tuples = is_earlier, gives_tuples

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = self._track.running
        if self._is_earlier:
            hidden_states = running.received
        else:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            if running.given is None:  # zeros go on: later modules may write over their input
                running.given, hidden_states = hidden_states, torch.zeros_like(hidden_states)
        return (hidden_states,) if self._gives_tuples else hidden_states


class NotHere(nn.Module):
    """A stand-in for a module of another stage that the model calls anyway: it returns zeros, never read."""

    def __init__(self, width: int, track: RunningPass, compute: Compute) -> None:
        super().__init__()
        self._width, self._track = width, track
        self._zero = torch.zeros((), dtype=compute.dtype, device=compute.device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros, [1, num_tokens, width] in one number's memory, whatever the arguments."""
        return self._zero.expand(1, self._track.running.num_tokens, self._width)
