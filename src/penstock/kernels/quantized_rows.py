"""The matrices of 8- and 4-bit weights before they are packed, and the kernel's rounding of activations.

A weight is scale * (q - zero) with an unsigned q; outputs are rows, and `group_size` inputs of a row share
a scale and a zero. Checkpoints are read into `QuantizedRows`; `quantize_rows` makes one of any other matrix.
The kernel (`cpu/csrc/quantized.h`) multiplies them with activations rounded as `round_activations` does it,
so that `round_activations(x, group_size) @ dequantize(rows, float32).T` is its result up to the order of
float sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.distributed.share import Share
from penstock.kernels.quantized_groups import activation_group

_SMALLEST = 1e-36  # a group of activations with a smaller absmax counts as zeros: 127 / absmax must be finite
_CHUNK = 1 << 18  # numbers that are worked on at a time: they stay in cache through all steps of a search
_STEPS = (8.0, 7.7, 7.4, 8.3, 7.1, 6.8, 6.4)  # the largest weight of a group lies that many steps from zero


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """A quantised matrix, w = scale * (q - zero).

    Attributes:
        q: uint8 [n, in_size], one value a byte: 0 to 255, or 0 to 15.
        scales: [n, groups] float32, bfloat16 or float16; of either sign.
        zeros: uint8 [n, groups], or None: 128 or 8 everywhere.
        group_size: inputs that share a scale, a multiple of 8 or at least in_size; the last group may be
            short.
        bits: 8 or 4.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    bits: int

    @property
    def middle(self) -> int:
        """The zero of a symmetric matrix."""
        return 1 << (self.bits - 1)

    def cut(self, rows: slice, columns: Share | None) -> QuantizedRows:
        """Return some rows, and some or all of their columns, which must be whole groups."""
        groups = slice(None)
        values = slice(None)
        if columns is not None:
            values = slice(columns.start, columns.end)
        if columns is not None and self.scales.shape[1] > 1:
            assert columns.start % self.group_size == 0, (columns, self.group_size)
            groups = slice(columns.start // self.group_size, -(-columns.end // self.group_size))
        return QuantizedRows(
            q=self.q[rows, values],
            scales=self.scales[rows, groups],
            zeros=None if self.zeros is None else self.zeros[rows, groups],
            group_size=self.group_size,
            bits=self.bits,
        )


def quantize_rows(rows: Tensor, bits: int, group_size: int) -> QuantizedRows:
    """Quantise a matrix symmetrically: zeros is None, scales are bfloat16.

    8 bits: the largest magnitude of a group becomes 127. 4 bits: several scales are tried, each moved to its
    least-squares optimum, and the one with the least squared error is taken. The sign of a scale is such that
    the largest weight is on the longer side of the range, where -8 is.

    Args:
        rows: [n, in_size] of any float dtype, finite.
        group_size: a multiple of 8, or >= in_size.
    """
    n, in_size = rows.shape
    group_size = min(group_size, in_size)
    groups = -(-in_size // group_size)
    q = torch.empty(n, in_size, dtype=torch.uint8)
    scales = torch.empty(n, groups, dtype=torch.bfloat16)
    scale_of = _absmax_scale if bits == 8 else _searched_scale
    at_once = max(1, _CHUNK // max(1, in_size))
    for start in range(0, n, at_once):
        at = slice(start, start + at_once)
        grouped = _grouped(rows[at].float(), group_size)
        scale = scale_of(grouped).bfloat16()
        scales[at] = scale.squeeze(-1)
        q[at] = _rounded(grouped, scale.float(), bits).flatten(1)[:, :in_size]
    return QuantizedRows(q, scales, None, group_size, bits)


def dequantize(rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """Return [n, in_size] of `dtype`: scale * (q - zero) in float32, rounded once."""
    zeros = rows.middle if rows.zeros is None else rows.zeros.unsqueeze(-1).short()
    whole = _grouped(rows.q, rows.group_size).short() - zeros
    weights = whole.float() * rows.scales.float().unsqueeze(-1)
    return weights.flatten(1)[:, : rows.q.shape[1]].to(dtype)


def round_activations(x: Tensor, group_size: int) -> Tensor:
    """Return activations as the kernel rounds them: multiples of a 127th of their group's largest magnitude.

    Args:
        x: [..., in_size] of any float dtype. A group with a NaN or an infinity comes out NaN.
        group_size: group size of the weights; see `quantized_groups.activation_group`.

    Returns:
        float32 [..., in_size].
    """
    in_size = x.shape[-1]
    grouped = _grouped(x.float(), activation_group(group_size, in_size))
    absmax = grouped.abs().amax(-1, keepdim=True)
    # A tensor is divided: torch computes `127 / absmax` as 127 times the rounded 1 / absmax, the kernel not.
    inverse = torch.where(absmax < _SMALLEST, 0.0, torch.full_like(absmax, 127.0) / absmax)
    scale = torch.where(absmax < _SMALLEST, 0.0, absmax / torch.full_like(absmax, 127.0))
    rounded = (grouped * inverse).round() * scale
    rounded = torch.where(absmax.isfinite(), rounded, torch.nan)
    return rounded.flatten(-2)[..., :in_size]


def _grouped(rows: Tensor, group_size: int) -> Tensor:
    """Reshape [..., in_size] -> [..., groups, group_size], the last group filled up with zeros."""
    missing = -rows.shape[-1] % group_size
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // group_size, group_size)


def _absmax_scale(grouped: Tensor) -> Tensor:
    return grouped.abs().amax(-1, keepdim=True) / 127


def _searched_scale(grouped: Tensor) -> Tensor:
    """Return the 4-bit scale of each group, [..., 1].

    For fixed q the best scale is sum(w q) / sum(q q); it saves sum(w q)^2 / sum(q q) of the squared error.
    """
    highest, lowest = grouped.amax(-1, keepdim=True), grouped.amin(-1, keepdim=True)
    largest = torch.where(highest > -lowest, highest, lowest)  # in magnitude; signed
    inverse = torch.where(largest == 0, 0.0, -1 / largest)
    best_saving = torch.full_like(largest, -1.0)
    best_scale = torch.zeros_like(largest)
    for steps in _STEPS:
        q = (grouped * (inverse * steps)).round_().clamp_(-8, 7)
        products = torch.linalg.vecdot(grouped, q).unsqueeze(-1)
        squares = torch.linalg.vecdot(q, q).unsqueeze(-1).clamp_min_(1)
        saving = products * products / squares
        is_better = saving > best_saving
        best_saving = torch.where(is_better, saving, best_saving)
        best_scale = torch.where(is_better, products / squares, best_scale)
    return best_scale


def _rounded(grouped: Tensor, scale: Tensor, bits: int) -> Tensor:
    middle = 1 << (bits - 1)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (grouped * inverse).round_().clamp_(-middle, middle - 1).add_(middle).to(torch.uint8)
