"""Decodes blocks with the Python package `gguf` (extra `gguf`), into the exact numbers that they stand for.

For the types whose tables of values are large and which our kernels do not multiply
(`gguf.block_types.PACKAGE_TYPES`). The package is imported here, when the first of its types is met. Called
by `weights.gguf_loader` for pieces that fit a cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError
from penstock.families.gguf_types import EXTRA

_Dequantize = Callable[[np.ndarray], np.ndarray]


def decode_floats(type_name: str, raw: Tensor) -> Tensor:
    """Return the numbers of some rows, float32 [n, values of a row].

    Args:
        type_name: type of the blocks, as ggml spells it.
        raw: uint8 [n, bytes of a row].

    Raises:
        UnsupportedModelError: the package is not installed, or too old for the type.
    """
    with np.errstate(all="ignore"):  # numbers that are not finite are the loader's to refuse
        numbers = _dequantize_of(type_name)(raw.numpy())
    return torch.from_numpy(numbers.astype(np.float32, copy=False))


def _dequantize_of(type_name: str) -> _Dequantize:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise _unusable(type_name, f"the Python package gguf cannot be imported ({error})") from error
    try:
        kind = GGMLQuantizationType[type_name]
    except KeyError as error:
        raise _unusable(type_name, "the installed package gguf is older than the type") from error

    def dequantize(raw: np.ndarray) -> np.ndarray:
        try:
            numbers: np.ndarray = quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise _unusable(type_name, "the installed package gguf does not decode it") from error
        return numbers

    return dequantize


def _unusable(type_name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tensors of type {type_name} cannot be dequantised: {reason}.",
        remedy=f"Run `pip install --upgrade {EXTRA}`.",
        param="model",
    )
