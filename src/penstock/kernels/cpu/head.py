"""The output head on the CPU: logits and their best candidates in one pass over the packed weight.

A model's `compute_candidates` asks `Head`; the work is done by `csrc/head.cpp`. It gives the same answers as
`candidates.head_output_of`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.candidates import STRAIGHT, Candidates, HeadOutput, HeadRequest, LogitCurve
from penstock.kernels.cpu.abi import HeadArgs, LinearArgs, QuantizedLinearArgs
from penstock.kernels.cpu.ops import DTYPES

_FLOAT32_BYTES = 4


def dense_product(weight: int, in_size: int, vocab_size: int, dtype: torch.dtype) -> LinearArgs:
    """Return the product with a packed weight, for `Head`. The caller keeps the weight alive.

    Args:
        weight: address of the panels of [vocab_size, in_size] (csrc/panels.h).
    """
    return LinearArgs(weight=weight, in_size=in_size, out_size=vocab_size, dtype=DTYPES[dtype])


class Head:
    """Answers requests about logits.

    The arguments of a call are kept until another request comes. Under a steady load the same request comes
    at every step.

    Args:
        library: the kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call: _Call | None = None
        self._rows: Tensor | None = None  # the newest input, and where it lies
        self._rows_at = 0, 0

    def answer(
        self,
        x: Tensor,
        product: LinearArgs | QuantizedLinearArgs,
        request: HeadRequest,
        curve: LogitCurve = STRAIGHT,
    ) -> HeadOutput:
        """Return candidates and whole logits of rows of hidden states.

        Args:
            x: [num_rows, in_size], one row per row of the request.
            product: the product with the weight. Its x is filled in here; its y, bias and gate are not used.
            curve: from the product to logits; always the same.

        Returns:
            The answer. Its candidates lie in memory that the next answer to the same request overwrites.
        """
        if self._call is None or self._call.request is not request:
            self._call = _Call(request, product.out_size, curve)
        if x is not self._rows:
            assert x.stride(1) == 1, "a row of hidden states must be contiguous"
            assert DTYPES[x.dtype] == product.dtype
            self._rows, self._rows_at = x, (x.data_ptr(), x.stride(0))
        product.x, product.x_stride = self._rows_at
        return self._call.run(self._library, product)


class _Call:
    """The arguments of a request, and the memory of its answer."""

    def __init__(self, request: HeadRequest, vocab_size: int, curve: LogitCurve) -> None:
        self.request, self._vocab_size = request, vocab_size
        num_rows, width = len(request), int(request.num_candidates.max(initial=1))
        self._candidates = Candidates(
            values=np.empty((num_rows, width), dtype=np.float32),
            ids=np.empty((num_rows, width), dtype=np.int64),
            is_finite=np.empty(num_rows, dtype=np.bool_),
        )
        self._logits_rows = np.flatnonzero(request.wants_logits)
        self._no_logits = torch.empty(0, vocab_size)
        self._places = np.zeros(num_rows, dtype=np.int64)
        bias, allowed = request.bias, request.allowed
        self._args = HeadArgs(
            num_rows=num_rows,
            num_candidates=_address(request.num_candidates),
            logits=_address(self._places),
            bias_starts=_address(bias.starts),
            bias_ids=_address(bias.ids),
            bias_values=_address(bias.values),
            bias_scales=None if bias.scales is None else _address(bias.scales),
            allowed=None if allowed is None else _address(allowed),
            allowed_stride=0 if allowed is None else allowed.shape[1],
            values=_address(self._candidates.values),
            ids=_address(self._candidates.ids),
            width=width,
            is_finite=_address(self._candidates.is_finite),
            multiplier=curve.multiplier,
            soft_cap=curve.soft_cap,
        )

    def run(self, library: ctypes.CDLL, product: LinearArgs | QuantizedLinearArgs) -> HeadOutput:
        logits, rows = self._no_logits, self._logits_rows
        if len(rows):
            logits = torch.empty(len(rows), self._vocab_size)
            row_bytes = self._vocab_size * _FLOAT32_BYTES
            self._places[rows] = logits.data_ptr() + np.arange(len(rows)) * row_bytes
        address, is_dense = ctypes.addressof(product), isinstance(product, LinearArgs)
        self._args.dense, self._args.quantized = (address, None) if is_dense else (None, address)
        library.penstock_head(ctypes.addressof(self._args), None)
        return HeadOutput(candidates=self._candidates, logits=logits, logits_rows=rows)


def _address(values: NDArray[Any]) -> int:
    interface = values.__array_interface__
    assert interface["strides"] is None, "the kernel takes contiguous arrays"
    address: int = interface["data"][0]
    return address
