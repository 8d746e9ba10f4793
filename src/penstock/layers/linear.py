"""The projections: `Linear` is one checkpoint tensor, `FusedLinear` several that are multiplied at once.

A rank may have a share of a projection:

- of its outputs (column parallel): what follows computes with this share alone
- of its inputs (row parallel): the results of all ranks are summed

An attention or an MLP has a column-parallel projection, then a row-parallel one, and costs one all-reduce
[B1] [B5].

The weights start empty, in the form that `layers.compute` chose: `weights.loader` fills them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.distributed.share import Share
from penstock.families.kinds import Activation
from penstock.layers.activation import gate_and_multiply
from penstock.layers.compute import Compute
from penstock.layers.matrix import GATE, PLAIN, UP, Matrix


class Linear(nn.Module):
    """A projection y = x W^T + b with W of [out_size, in_size], as checkpoints store it.

    Args:
        in_share: inputs that this rank has. If it does not have all, the results of all ranks are summed.
        parts: the projections in the checkpoint: name -> outputs on all ranks. `Compute.format_of` decides by
            them how the weight is quantised.
    """

    def __init__(
        self,
        in_share: Share,
        out_size: int,
        *,
        bias: bool,
        compute: Compute,
        parts: Mapping[str, int] | None = None,
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        self.weight = compute.weight(
            parts or {},
            out_size,
            in_share.size,
            gated=gated,
            activation=activation,
            whole_in_size=in_share.whole,
        )
        self.bias = compute.parameter(out_size) if bias else None
        self._in_share = in_share
        self._group = compute.group

    def forward(self, x: Tensor) -> Tensor:
        """Return y: [num_tokens, inputs of this rank] -> [num_tokens, out_size], summed over the ranks."""
        y = self.product(x)
        return y if self._in_share.is_whole else self._group.all_reduce(y)

    def product(self, x: Tensor) -> Tensor:
        """Return y for the inputs that this rank has, not summed over the ranks.

        Args:
            x: [num_tokens, inputs of this rank].

        Returns:
            [num_tokens, out_size]; half as wide if the weight is a gated `Matrix`.
        """
        # If the ranks' results are summed, each rank holds the bias, and only the first adds it.
        bias = self.bias if self._in_share.start == 0 else None
        if isinstance(self.weight, Matrix):
            return self.weight.multiply(x, bias)
        return F.linear(x, self.weight, bias)

    def shares(self, part: str, rows: int) -> tuple[Share, Share]:
        """Return which rows and columns of the checkpoint's tensor the weight of a part is."""
        return Share.all(rows), self._in_share


class FusedLinear(Linear):
    """A group of projections of the same input, stacked by output rows [A13].

    Args:
        out_shares: name of each projection -> outputs that this rank has.
        stored_as: name of the one projection in the checkpoint that has all of these, in their order; empty:
            the checkpoint has them one by one.

    Attributes:
        parts: name of each projection -> its rows `[start, end)` of weight and bias.
    """

    def __init__(
        self,
        in_size: int,
        out_shares: Mapping[str, Share],
        *,
        bias: bool,
        compute: Compute,
        parent: str = "",
        stored_as: str = "",
        gated: bool = False,
        activation: Activation = "silu",
    ) -> None:
        parts = {f"{parent}.{name}": share.whole for name, share in out_shares.items()}
        if stored_as:
            parts = {f"{parent}.{stored_as}": sum(parts.values())}
        out_sizes = [share.size for share in out_shares.values()]
        super().__init__(
            Share.all(in_size),
            sum(out_sizes),
            bias=bias,
            compute=compute,
            parts=parts,
            gated=gated,
            activation=activation,
        )
        self.out_sizes, self.stored_as = out_sizes, stored_as
        self.parts: dict[str, tuple[int, int]] = {}
        self._out_shares = _one_after_another(out_shares) if stored_as else dict(out_shares)
        start = 0
        for name, share in out_shares.items():
            self.parts[name] = (start, start + share.size)
            start += share.size

    def role(self, part: str) -> int:
        """Return how the rows of a part lie in a packed weight: `PLAIN`, `GATE` or `UP` (`layers.matrix`)."""
        return PLAIN

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return views of the parts of a result of `forward`: [..., sum of out_sizes] -> [..., size] each."""
        return torch.split(output, self.out_sizes, dim=-1)

    def shares(self, part: str, rows: int) -> tuple[Share, Share]:
        return self._out_shares[part], self._in_share


class GatedLinear(FusedLinear):
    """A gate, activation(gate(x)) * up(x), with both projections in one matrix.

    Args:
        names: the checkpoint's names of gate and up.
    """

    def __init__(
        self,
        in_size: int,
        out_share: Share,
        *,
        bias: bool,
        compute: Compute,
        parent: str = "",
        names: tuple[str, str] = ("gate_proj", "up_proj"),
        stored_as: str = "",
        activation: Activation = "silu",
    ) -> None:
        out_shares = dict.fromkeys(names, out_share)
        super().__init__(
            in_size,
            out_shares,
            bias=bias,
            compute=compute,
            parent=parent,
            stored_as=stored_as,
            gated=True,
            activation=activation,
        )
        self._gate_name = names[0]
        self._activation: Activation = activation

    def role(self, part: str) -> int:
        return GATE if part == self._gate_name else UP

    def forward(self, x: Tensor) -> Tensor:
        """Return activation(gate) * up: [num_tokens, in_size] -> [num_tokens, outputs of one projection]."""
        output = super().forward(x)
        if isinstance(self.weight, Matrix):
            return output
        gate, up = self.split(output)
        return gate_and_multiply(gate, up, self._activation)


def _one_after_another(shares: Mapping[str, Share]) -> dict[str, Share]:
    """Return the same shares of projections, as rows of one tensor that has all projections in order."""
    placed, start = {}, 0
    whole = sum(share.whole for share in shares.values())
    for name, share in shares.items():
        placed[name] = Share(start=start + share.start, end=start + share.end, whole=whole)
        start += share.whole
    return placed
