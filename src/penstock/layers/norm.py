"""The RMSNorm in three forms: after adding the residual stream [A11], without that, and for each head.

The mean square is taken in float32 whatever the dtype of the stream (arXiv 1910.07467; the order of casts is
that of transformers, so that bfloat16 agrees as well).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.distributed.group import TensorGroup
from penstock.distributed.share import Share
from penstock.families.kinds import NormKind
from penstock.kernels.cpu import abi
from penstock.layers.compute import Compute

_KERNEL_KINDS: dict[NormKind, int] = {
    "plain": abi.PLAIN_NORM,
    "wide": abi.WIDE_NORM,
    "one_plus": abi.ONE_PLUS_NORM,
}


class AddRMSNorm(nn.Module):
    """Adds the branch (output of attention or MLP) to the residual stream, and normalises the sum."""

    def __init__(self, size: int, eps: float, *, compute: Compute, kind: NormKind = "plain") -> None:
        super().__init__()
        self.weight = compute.parameter(size)
        self.eps = eps
        self._kind: NormKind = kind
        self._kernels = compute.kernels_for("norm")

    def forward(
        self, hidden_states: Tensor, residual: Tensor, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (normalised sum, sum) of two [num_tokens, hidden]; our kernel overwrites `residual`.

        Args:
            selected: [num_selected] int64, rising: the indices of the only tokens that are wanted. The
                normalised sum has only their rows, and the sum means nothing.
        """
        if self._kernels is not None:
            kind = _KERNEL_KINDS[self._kind]
            normed = self._kernels.add_rms_norm(
                hidden_states, residual, self.weight, self.eps, selected, kind
            )
            return normed, residual
        if selected is not None and len(selected) != len(hidden_states):
            hidden_states, residual = hidden_states[selected], residual[selected]
        residual = hidden_states + residual
        wide = residual.float()
        mean = wide.square().mean(-1, keepdim=True)
        return _normed(wide, mean, self.weight, self.eps, self._kind), residual


class Add:
    """The addition of branch and residual stream alone, in place of `AddRMSNorm` where no norm follows.

    It is not a module: it holds no weights.
    """

    def __init__(self, *, compute: Compute) -> None:
        self._kernels = compute.kernels_for("norm")

    def __call__(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of two [num_tokens, hidden], twice; our kernel writes it over `residual`."""
        if self._kernels is None:
            residual = hidden_states + residual
        else:
            self._kernels.add(hidden_states, residual)
        return residual, residual


class RMSNorm(nn.Module):
    """Normalises each group of `share.size` columns by itself, all with the same weight.

    Args:
        share: the part of the checkpoint's weight that this rank has.
    """

    def __init__(self, share: Share, eps: float, *, compute: Compute, kind: NormKind) -> None:
        super().__init__()
        self.weight = compute.parameter(share.size)
        self.eps = eps
        self._share = share
        self._kind: NormKind = kind
        self._kernels = compute.kernels_for("norm")

    def forward(self, x: Tensor, squares: Tensor | None = None, squared_size: int = 0) -> Tensor:
        """Normalise [num_tokens, n * size] -> the same; our kernel writes over `x`.

        Args:
            squares: [num_tokens] float32, the sum of the squares of more numbers than those of `x`, by which
                all groups are normalised; None: each group by its own mean square.
            squared_size: how many numbers that sum has.
        """
        if self._kernels is not None:
            kind = _KERNEL_KINDS[self._kind]
            self._kernels.group_norm(x, self.weight, self.eps, kind, squares, squared_size)
            return x
        wide = x.float().reshape(len(x), x.shape[1] // self._share.size, self._share.size)
        if squares is None:
            mean = wide.square().mean(-1, keepdim=True)
        else:
            mean = (squares / squared_size)[:, None, None]
        return _normed(wide, mean, self.weight, self.eps, self._kind).flatten(-2)

    def shares(self, part: str, rows: int) -> tuple[Share, Share | None]:
        """Return which rows of the checkpoint's tensor the weight is."""
        return self._share, None


class HeadNorms:
    """The norms of this rank's queries and keys, which lie side by side. It owns no weights."""

    def __init__(self, query: RMSNorm, key: RMSNorm, sizes: tuple[int, int], *, compute: Compute) -> None:
        self._query, self._key, self._sizes = query, key, sizes
        self._kernels = compute.kernels_for("norm")

    def __call__(self, qkv: Tensor) -> Tensor:
        """Normalise [num_tokens, qkv_size] -> the same, values as they are; our kernel writes over `qkv`."""
        query, key = _parts(qkv, self._sizes)
        return self._together(qkv, self._query(query), self._key(key))

    def _together(self, qkv: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self._kernels is not None:
            return qkv
        return torch.cat((query, key, qkv[:, sum(self._sizes) :]), dim=-1)


class SharedHeadNorms(HeadNorms):
    """The norms that are taken over the heads of all ranks: first the ranks' squares are summed.

    If several ranks hold the same keys, these count several times both in the sum and in the number of
    summands, so that the mean is right.
    """

    def __init__(
        self,
        query: RMSNorm,
        key: RMSNorm,
        sizes: tuple[int, int],
        *,
        compute: Compute,
    ) -> None:
        super().__init__(query, key, sizes, compute=compute)
        self._group: TensorGroup = compute.group

    def __call__(self, qkv: Tensor) -> Tensor:
        query, key = _parts(qkv, self._sizes)
        squares = self._group.all_reduce(self._squares(query, key))
        query_count, key_count = (size * self._group.size for size in self._sizes)
        query = self._query(query, squares[:, 0], query_count)
        return self._together(qkv, query, self._key(key, squares[:, 1], key_count))

    def _squares(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the sums of squares, [num_tokens, 2] float32."""
        if self._kernels is not None:
            return self._kernels.sums_of_squares(query, key)
        return torch.stack([part.float().square().sum(-1) for part in (query, key)], dim=-1)


def _parts(qkv: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return views of the queries and of the keys."""
    query_size, key_size = sizes
    return qkv[:, :query_size], qkv[:, query_size : query_size + key_size]


def _normed(wide: Tensor, mean: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Normalise [..., size] float32 by their mean squares [..., 1]; return the dtype of the weight."""
    normed = wide * torch.rsqrt(mean + eps)
    if kind == "plain":
        return weight * normed.to(weight.dtype)
    factor = weight.float() + 1.0 if kind == "one_plus" else weight.float()
    return (normed * factor).to(weight.dtype)
