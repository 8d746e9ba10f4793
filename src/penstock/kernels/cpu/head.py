"""The vocabulary head on the CPU: logits and their best candidates in one pass over the packed weight.

A model's `compute_candidates` calls `head`; the work is done by `csrc/head.cpp`. Answers like
`candidates.head_output_of`, whose values it uses.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.candidates import Candidates, HeadOutput, HeadRequest
from penstock.kernels.cpu.abi import BFLOAT16, FLOAT32, HeadArgs, LinearArgs, QuantizedLinearArgs

_TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_FLOAT32_BYTES = 4


def dense_product(x: Tensor, weight: int, vocab_size: int) -> LinearArgs:
    """The product of rows [num_rows, hidden] with a packed weight of their type, for `head`.

    The caller keeps `x` and the weight alive.

    Args:
        weight: address of the panels of [vocab_size, hidden] (csrc/panels.h).
    """
    assert x.stride(1) == 1, "a row of hidden states must be contiguous"
    return LinearArgs(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=weight,
        in_size=x.shape[1],
        out_size=vocab_size,
        dtype=_TYPES[x.dtype],
    )


def head(library: ctypes.CDLL, product: LinearArgs | QuantizedLinearArgs, request: HeadRequest) -> HeadOutput:
    """Candidates and whole logits of rows of hidden states.

    Args:
        library: the kernels.
        product: rows and weight, one row per row of the request. Its y, bias and gate are not used.
    """
    num_rows, width = len(request), max([1, *request.num_candidates.tolist()])
    logits_rows = request.wants_logits.nonzero()[0]
    logits = torch.empty(len(logits_rows), product.out_size)
    candidates = Candidates(
        values=np.empty((num_rows, width), dtype=np.float32),
        ids=np.empty((num_rows, width), dtype=np.int64),
        is_finite=np.empty(num_rows, dtype=np.bool_),
    )
    places = np.zeros(num_rows, dtype=np.int64)
    if len(logits_rows):
        row_bytes = product.out_size * _FLOAT32_BYTES
        places[logits_rows] = logits.data_ptr() + np.arange(len(logits_rows)) * row_bytes
    bias, allowed, address = request.bias, request.allowed, ctypes.addressof(product)
    is_quantized = isinstance(product, QuantizedLinearArgs)
    args = HeadArgs(  # in the order of its fields
        None if is_quantized else address,
        address if is_quantized else None,
        num_rows,
        _address(request.num_candidates),
        _address(places),
        _address(bias.starts),
        _address(bias.ids),
        _address(bias.values),
        None if allowed is None else _address(allowed),
        0 if allowed is None else allowed.shape[1],
        _address(candidates.values),
        _address(candidates.ids),
        width,
        _address(candidates.is_finite),
    )
    library.penstock_head(ctypes.byref(args), None)
    return HeadOutput(candidates=candidates, logits=logits, logits_rows=logits_rows)


def _address(values: NDArray[Any]) -> int:
    interface = values.__array_interface__
    assert interface["strides"] is None, "the kernel takes contiguous arrays"
    address: int = interface["data"][0]
    return address
