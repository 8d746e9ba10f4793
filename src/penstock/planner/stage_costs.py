"""The measured costs of one rank, in seconds and bytes: its measuring process sends them, a cache keeps them.

`planner.step_timing` measures them on the rank's own device. From them `planner.performance` and
`planner.memory` predict how fast a split is and whether it fits, and `layouts.stage_times` the times of a
layout. No torch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec

from penstock.bounds import Count, Seconds

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that the parts of one step of `num_tokens` tokens take on this rank.

    Attributes:
        layer_s: one layer.
        fixed_s: preparing the inputs of the step; it does not depend on the number of layers.
        embed_s: the embedding; 0 on all stages but the first.
        head_s: final norm, output head and sampling, and the guesses of an MTP layer (multi-token prediction)
            if the rank has one; 0 on all stages but the last.
        link_s: receiving from the stage before and sending to the next one; on the first and the last stage
            only one of the two.
    """

    num_tokens: _AtLeastOne
    layer_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    fixed_s: Seconds
    embed_s: Seconds
    head_s: Seconds
    link_s: Seconds

    def step_s(self, num_layers: int) -> float:
        """Return the seconds that the whole step takes on a stage with so many layers."""
        return self.fixed_s + self.embed_s + self.head_s + self.link_s + num_layers * self.layer_s


class StageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The measured costs of a rank; those of a stage's first rank count as the costs of the stage.

    Attributes:
        decode: costs of decode steps, which have one token a row, by rising number of rows.
        prefill: costs of a step that computes one chunk of one prompt.
        layer_bytes: bytes of the weights of the rank's first layer, as the rank holds them; all its layers
            are taken to be as large.
        end_bytes: bytes of all other weights: those of embedding, final norm, output head and MTP layer, as
            far as the rank has them.
        kv_block_bytes: bytes of one block of the KV cache, for one layer.
        block_size: tokens of a block.
        available_bytes: free memory of the rank's device, or of its host if that is a CPU, before anything
            was loaded.
        num_sharers: number of ranks that share this memory.
        num_ranks: how many of the `num_sharers` ranks belong to this stage.
        has_kernels: whether Penstock's CPU kernels ran, and not plain torch.
        peak_bytes: bytes that the rank's largest step takes in addition to weights and KV cache; None: not
            measured.
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
        """Return the seconds of a decode step with so many rows, never less than 0.

        They follow straight lines through the measured numbers of rows. If only one number was measured, a
        step takes as long with any other.
        """
        points = [(costs.num_tokens, costs.step_s(num_layers)) for costs in self.decode]
        return max(0.0, interpolate(points, num_rows))

    def prefill_token_s(self, num_layers: int) -> float:
        """Return the seconds that each token of the measured chunk takes."""
        return self.prefill.step_s(num_layers) / self.prefill.num_tokens

    def weight_bytes(self, num_layers: int) -> int:
        """Return the bytes of weights of a rank with so many layers."""
        return self.end_bytes + num_layers * self.layer_bytes


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Return the value at `x` of the straight line through the two points around it.

    Beyond the first or the last point, the line goes through the two points that are nearest. A single point
    has the same value everywhere.

    Args:
        points: at least one, by rising first coordinate. Two may have the same one only in a faulty report;
            then there is a result too, but it means nothing.
    """
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y1 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
