"""A tape is a recorded list of kernel calls, which is replayed for every step.

A forward pass of a stage is some eight kernel calls a layer, always with the same arguments: memory stays
where it is, and all that changes is in `Step`. So the layers run once while a `Tape` records their calls, and
from then on `replay` runs the list without Python in between. (CUDA graphs do the same for a GPU.)
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.cpu.abi import Call, Step
from penstock.kernels.pages import zero_pages


class Tape:
    """A list of calls and the memory of their outputs.

    The n-th output of a width and dtype takes the same memory in every layer. All layers ask for their
    outputs in the same order, so that what one layer leaves to the next is read before its memory is written
    again.

    Args:
        num_tokens: the most tokens that a step can have; all outputs are made for as many.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._calls: list[tuple[int, ctypes.Structure]] = []
        self._outputs: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._taken: Counter[tuple[int, torch.dtype]] = Counter()
        self._layer_starts: list[int] = []
        self._replay: Callable[[int], None] | None = None
        self._replay_layer: list[Callable[[int], None]] = []

    def start_layer(self) -> None:
        """Begin a layer: the outputs that follow take the memory of the layer before."""
        self._taken.clear()
        self._layer_starts.append(len(self._calls))

    def output(self, width: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of an output: [num_tokens, width], the same for every layer."""
        kind = (width, dtype)
        key = (*kind, self._taken[kind])
        self._taken[kind] += 1
        if key not in self._outputs:
            self._outputs[key] = step_memory(self.num_tokens, width, dtype)
        return self._outputs[key]

    def add(self, kernel: int, args: ctypes.Structure) -> None:
        """Record a call: the kernel's address and its arguments, which must never change."""
        self._calls.append((kernel, args))

    def finish(self, library: ctypes.CDLL, kept: Iterable[object] = ()) -> None:
        """Finish the tape: no more calls follow.

        Args:
            library: the library of the kernels.
            kept: further objects to which the calls' pointers point; the tape keeps them alive.
        """
        calls = [Call(kernel, ctypes.addressof(args)) for kernel, args in self._calls]
        array = (Call * len(calls))(*calls)
        self._kept = [array, *kept]
        run, begin = library.penstock_run, ctypes.addressof(array)
        self._replay = partial(run, begin, len(calls))
        self._replay_layer = [
            partial(run, begin + start * ctypes.sizeof(Call), end - start)
            for start, end in pairwise([*self._layer_starts, len(calls)])
        ]

    def replay(self, step: Step) -> None:
        """Run all calls, in order, for one step."""
        assert self._replay is not None, "the tape is still being recorded"
        self._replay(ctypes.addressof(step))

    def replay_layers(self, step: Step, before_layer: Callable[[int], None]) -> None:
        """Run all calls, and `before_layer` before each layer. Calls must not precede the first layer."""
        assert self._layer_starts[:1] == [0], "there is something before the first layer"
        for layer, replay in enumerate(self._replay_layer):
            before_layer(layer)
            replay(ctypes.addressof(step))


def step_memory(num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return memory [num_tokens, width]; only what steps really use becomes resident."""
    pages = zero_pages(
        num_tokens * width * dtype.itemsize, "the activations of a step", "Lower --max-num-batched-tokens."
    )
    return pages.view(dtype).view(num_tokens, width)
