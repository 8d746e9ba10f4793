"""Reads a tensor, or some of its rows, from where `weights.checkpoint` says that it is.

For tensors that are unpacked or converted on their way; `weights.loader` reads the others straight into the
model's memory, through `read_exactly` too. Keeps no file open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CheckpointError, unreadable
from penstock.weights.checkpoint import TensorEntry
from penstock.weights.read_digests import ReadDigests

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def read_tensor(entry: TensorEntry, digests: ReadDigests) -> Tensor:
    """Read a tensor in its own dtype and shape, which may be any, and digest its bytes.

    Raises `CheckpointError` if the file ends too early, `ModelChangedError` as `ReadDigests` says.
    """
    return _read(entry, entry.shape, 0, digests)


def read_rows(entry: TensorEntry, first: int, last: int, digests: ReadDigests) -> Tensor:
    """Read rows `[first, last)` of the first dimension, otherwise like `read_tensor`."""
    row_bytes = math.prod(entry.shape[1:]) * _dtype(entry).itemsize
    return _read(entry, (last - first, *entry.shape[1:]), first * row_bytes, digests)


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        expected = f"a dtype of {', '.join(TORCH_DTYPES)}"
        raise CheckpointError(file=entry.path.name, tensor=entry.name, expected=expected, found=entry.dtype)
    return dtype


def _read(entry: TensorEntry, shape: tuple[int, ...], offset: int, digests: ReadDigests) -> Tensor:
    values = torch.empty(shape, dtype=_dtype(entry))
    memory = memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    with opened(entry.path) as descriptor:
        read_exactly(memory, descriptor, entry, offset)
    digests.add(entry.path.name, entry.name, offset, memory)
    return values


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a descriptor to read from. Raises `CheckpointError` if the file cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path.name, error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(memory: memoryview, descriptor: int, entry: TensorEntry, offset: int) -> None:
    """Fill `memory` from `offset` bytes after the tensor's begin; `CheckpointError` if the file ends."""
    filled = 0
    while filled < len(memory):
        try:
            count = os.preadv(descriptor, [memory[filled:]], entry.begin + offset + filled)
        except OSError as error:
            count, reason = 0, error.strerror
        else:
            reason = "the end of the file"
        if count == 0:
            raise CheckpointError(
                file=entry.path.name,
                tensor=entry.name,
                expected=f"{entry.end - entry.begin} bytes",
                found=f"{reason} after {offset + filled}",
            )
        filled += count
