"""Reads a model's weights from safetensors straight into the memory of its parameters.

Called by a rank once, before it serves. Reads only the byte ranges of tensors that the model holds (row A12,
d8), keeps no mapping and no copy: beside the parameters themselves it needs one small buffer, and that only
where the bytes must be converted or moved to a GPU. Refuses NaN and infinity.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.weights.checkpoint import Checkpoint, TensorEntry
from penstock.weights.mapping import TensorSlot, tensor_slots, unexpected_names

CHUNK_BYTES = 4 << 20

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What loading took."""

    bytes_read: int  # tensor data; headers are not counted
    tensor_bytes: int  # of the parameters as held
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One tensor to read, and where to."""

    entry: TensorEntry
    target: Tensor  # [numel], contiguous


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None],
    *,
    left_out: frozenset[str] = frozenset(),
) -> LoadReport:
    """Fill every parameter of `model`.

    Args:
        progress: called with (bytes done, bytes in all) after each tensor.
        left_out: checkpoint names of tensors that somebody else fills; checked like the others, but not read.

    Raises:
        CheckpointError: a tensor is missing, surplus, of another shape or dtype, cut short, or not finite.
    """
    started = time.perf_counter()
    slots = _plan(tensor_slots(model), checkpoint)
    loads = [load for load in slots if load.entry.name not in left_out]
    total = sum(load.entry.end - load.entry.begin for load in loads)
    buffer = torch.empty(CHUNK_BYTES if _needs_buffer(loads) else 0, dtype=torch.uint8)
    done = 0
    for path, of_file in _by_file(loads):
        with _opened(path) as descriptor:
            for load in of_file:
                _fill(load, descriptor, buffer)
                done += load.entry.end - load.entry.begin
                progress(done, total)
    tensor_bytes = sum(slot.target.nbytes for slot in slots)
    return LoadReport(bytes_read=done, tensor_bytes=tensor_bytes, seconds=time.perf_counter() - started)


def _plan(slots: list[TensorSlot], checkpoint: Checkpoint) -> list[_Load]:
    """All checks that need no tensor data, then the loads in the order of the files' bytes."""
    loads = [_checked(slot, checkpoint.entry(slot.name)) for slot in slots]
    if surplus := unexpected_names(slots, checkpoint.names):
        entry = checkpoint.entry(surplus[0])
        raise CheckpointError(
            file=entry.path.name,
            tensor=entry.name,
            expected="no such tensor by config.json",
            found=f"{entry.dtype} of {list(entry.shape)}",
            remedy="config.json and the weights are not of the same model.",
        )
    return sorted(loads, key=lambda load: (load.entry.path, load.entry.begin))


def _checked(slot: TensorSlot, entry: TensorEntry) -> _Load:
    if entry.dtype not in _TORCH_DTYPES:
        raise CheckpointError(
            file=entry.path.name,
            tensor=entry.name,
            expected=f"a dtype of {', '.join(_TORCH_DTYPES)}",
            found=entry.dtype,
            remedy="Quantised weights are not supported; use the original checkpoint.",
        )
    if entry.shape != tuple(slot.target.shape):
        raise CheckpointError(
            file=entry.path.name,
            tensor=entry.name,
            expected=f"shape {list(slot.target.shape)} by config.json",
            found=f"{list(entry.shape)}",
        )
    return _Load(entry=entry, target=slot.target.view(-1))


def _needs_buffer(loads: list[_Load]) -> bool:
    return not all(_is_direct(load) for load in loads)


def _is_direct(load: _Load) -> bool:
    """Whether the file's bytes are the parameter's bytes."""
    return load.target.device.type == "cpu" and load.target.dtype == _TORCH_DTYPES[load.entry.dtype]


def _by_file(loads: list[_Load]) -> Iterator[tuple[Path, list[_Load]]]:
    for path in dict.fromkeys(load.entry.path for load in loads):
        yield path, [load for load in loads if load.entry.path == path]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            file=path.name, expected="a readable file", found=error.strerror or "an error"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(load: _Load, descriptor: int, buffer: Tensor) -> None:
    """Read one tensor chunk by chunk, so that the check for NaN finds the bytes still in the cache."""
    source_dtype = _TORCH_DTYPES[load.entry.dtype]
    step = CHUNK_BYTES // source_dtype.itemsize
    for first in range(0, load.target.numel(), step):
        target = load.target[first : first + step]
        staged = target
        if not _is_direct(load):
            staged = buffer[: target.numel() * source_dtype.itemsize].view(source_dtype)
        _read_exactly(descriptor, staged, load.entry, first * source_dtype.itemsize)
        _check_finite(staged, load.entry, first)
        if staged is not target:
            target.copy_(staged)
            _check_representable(target, load.entry)


def _read_exactly(descriptor: int, into: Tensor, entry: TensorEntry, offset: int) -> None:
    """Fill `into` from `offset` bytes after the tensor's begin."""
    memory = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
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


def _check_finite(chunk: Tensor, entry: TensorEntry, first: int) -> None:
    """Raise at the first NaN or infinity. `first` is the chunk's place in the tensor, for the message."""
    low, high = chunk.aminmax()  # both propagate NaN
    if torch.isfinite(low) and torch.isfinite(high):
        return
    bad = int(torch.isfinite(chunk).logical_not().nonzero()[0])
    raise CheckpointError(
        file=entry.path.name,
        tensor=entry.name,
        expected="finite numbers",
        found=f"{chunk[bad].item()} at element {first + bad}",
    )


def _check_representable(chunk: Tensor, entry: TensorEntry) -> None:
    """After a conversion: float16 ends at 65504, where float32 and bfloat16 go on."""
    low, high = chunk.aminmax()
    if torch.isfinite(low) and torch.isfinite(high):
        return
    raise CheckpointError(
        file=entry.path.name,
        tensor=entry.name,
        expected=f"numbers within the range of {str(chunk.dtype).removeprefix('torch.')}",
        found="a larger one",
        remedy="Use --dtype bfloat16 or float32.",
    )
