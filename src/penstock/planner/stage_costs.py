"""The measured needs of one rank: seconds and bytes, as values on a wire and in the cache.

Made by `planner.step_timing` on the rank's own device, read by `planner.performance`. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec

from penstock.bounds import Count, Seconds

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of the parts of one step of `num_tokens` tokens, as this rank runs them.

    Attributes:
        layer_s: one layer.
        fixed_s: the inputs of the step, whatever the number of layers.
        embed_s: the embedding; 0 on all stages but the first.
        head_s: final norm, output head and sampling; 0 on all stages but the last.
        link_s: sending to the next stage and receiving from the one before, as far as there are such.
    """

    num_tokens: _AtLeastOne
    layer_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    fixed_s: Seconds
    embed_s: Seconds
    head_s: Seconds
    link_s: Seconds

    def step_s(self, num_layers: int) -> float:
        """Return the seconds of the whole step on a stage with so many layers."""
        return self.fixed_s + self.embed_s + self.head_s + self.link_s + num_layers * self.layer_s


class StageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The measured costs of a stage, or of its first rank where several share it.

    Attributes:
        decode: steps of one token a row, by rising number of rows.
        prefill: a step that is one chunk of one prompt.
        layer_bytes: weights of one layer as this rank holds them.
        end_bytes: bytes of embedding, norm and head, as far as they are here.
        kv_block_bytes: bytes of one block of the KV cache, of one layer.
        block_size: tokens of a block.
        available_bytes: free memory of the rank's device before anything was loaded.
        num_sharers: ranks that share this memory.
        num_ranks: those of this stage among them.
        has_kernels: whether our kernels ran, and not torch.
        peak_bytes: bytes of the largest plan beside weights and KV cache; None: not measured.
    """

    decode: Annotated[list[StepCosts], msgspec.Meta(min_length=1, max_length=1024)]
    prefill: StepCosts
    layer_bytes: Count
    end_bytes: Count
    kv_block_bytes: Count
    block_size: _AtLeastOne
    available_bytes: Count
    num_sharers: _AtLeastOne
    has_kernels: bool
    num_ranks: _AtLeastOne = 1
    peak_bytes: Count | None = None

    def decode_step_s(self, num_layers: int, num_rows: int) -> float:
        """Return the seconds of a decode step: linear between and beyond the measured numbers of rows."""
        points = [(costs.num_tokens, costs.step_s(num_layers)) for costs in self.decode]
        return max(0.0, interpolate(points, num_rows))

    def prefill_token_s(self, num_layers: int) -> float:
        """Return the seconds that one prompt token takes."""
        return self.prefill.step_s(num_layers) / self.prefill.num_tokens

    def weight_bytes(self, num_layers: int) -> int:
        """Return the bytes of weights of a rank with so many layers."""
        return self.end_bytes + num_layers * self.layer_bytes


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Return the value on the line through the two points around `x`; beyond the ends, through the last two.

    Args:
        points: at least one, by rising first coordinate; of two with the same one the second counts.
    """
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y1 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
