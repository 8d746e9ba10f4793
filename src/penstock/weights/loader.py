"""Reads a model's weights from safetensors straight into the memory of its parameters.

Called by a rank once, before it serves. Reads only the byte ranges of tensors that the model holds [A12]
[d8], keeps no mapping and no copy: beside the weights themselves it needs one small buffer, and that only
where bytes must be converted, packed, quantised or moved to a GPU. Refuses NaN and infinity. Projections that
the checkpoint holds quantised come from `weights.quantized_formats`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.kernels.pages import zero_pages
from penstock.weights.checkpoint import Checkpoint, TensorEntry
from penstock.weights.mapping import (
    QuantizedSink,
    RowTarget,
    Target,
    TensorTarget,
    projections_elsewhere,
    row_sinks,
    tensor_targets,
    unexpected_names,
    unused_names,
)
from penstock.weights.quantized_formats import QuantizedCheckpoint
from penstock.weights.read_digests import ReadDigests
from penstock.weights.tensor_bytes import TORCH_DTYPES, opened, read_exactly

CHUNK_BYTES = 4 << 20
PANEL_ROWS = 32  # pieces of a packed weight begin at multiples of it

_FLOAT_DTYPES = {name: TORCH_DTYPES[name] for name in ("F32", "BF16", "F16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The time and bytes that loading took."""

    bytes_read: int  # tensor data; headers are not counted
    tensor_bytes: int  # of the weights as held
    seconds: float
    digests: bytes  # of the bytes read: a table of `weights.read_digests`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A tensor or share to read, and its destination. Elements count within the share, row by row."""

    entry: TensorEntry
    target: Target

    @property
    def num_bytes(self) -> int:
        return self.target.rows.size * self.columns * self.itemsize

    @property
    def itemsize(self) -> int:
        return _FLOAT_DTYPES[self.entry.dtype].itemsize

    @property
    def columns(self) -> int:
        """The number of elements of a row of the share."""
        return self.whole_columns if self.target.read_columns is None else self.target.read_columns.size

    @property
    def whole_columns(self) -> int:
        return math.prod(self.entry.shape[1:])

    def place(self, element: int) -> int:
        """Return where an element is in the tensor."""
        row, column = divmod(element, self.columns)
        start = 0 if self.target.read_columns is None else self.target.read_columns.start
        return (self.target.rows.start + row) * self.whole_columns + start + column

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield elements `[first, end)` in pieces that lie side by side in the file."""
        if self.target.read_columns is None:
            yield first, end
            return
        while first < end:
            run_end = min(end, (first // self.columns + 1) * self.columns)
            yield first, run_end
            first = run_end

    @property
    def band(self) -> str:
        """The name of the columns that are read, where they are not all."""
        columns = self.target.read_columns
        return "" if columns is None else f"{columns.start}:{columns.end}"

    def place_in_band(self, element: int) -> int:
        """Return where an element is in the tensor, the columns that are not read left out."""
        return self.target.rows.start * self.columns + element

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are the weight's bytes."""
        if isinstance(self.target, RowTarget):
            return False
        memory = self.target.memory
        return memory.device.type == "cpu" and memory.dtype == _FLOAT_DTYPES[self.entry.dtype]


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None],
    *,
    left_out: frozenset[str] = frozenset(),
    quantized: QuantizedCheckpoint | None = None,
) -> LoadReport:
    """Fill every weight of `model`.

    Args:
        progress: called with (bytes done, bytes in all) after each tensor.
        left_out: checkpoint names of tensors that are filled elsewhere; checked like the others where they
            are there, but not read.
        quantized: the checkpoint's quantised projections, if it has any.

    Raises:
        CheckpointError: a tensor is missing, surplus, of another shape or dtype, cut short, or not finite.
        ModelChangedError: a tensor is not that of the first load (`Checkpoint.digests`).
    """
    started = time.perf_counter()
    targets = tensor_targets(model)
    packed = [target for target in targets if quantized is not None and quantized.holds(_projection(target))]
    known = _tensors_elsewhere(model, packed, quantized) | unused_names(model, checkpoint.names)
    _check_surplus(targets, known, checkpoint)
    others = set(map(id, packed))
    absent = left_out - checkpoint.names
    plain = [target for target in targets if id(target) not in others and target.name not in absent]
    loads = [load for load in _plan(plain, checkpoint) if load.entry.name not in left_out]
    total = sum(load.num_bytes for load in loads)
    if quantized is not None:
        total += sum(quantized.num_bytes(_projection(target)) for target in packed)
    done = 0
    for num_bytes in _filled(loads, packed, quantized, checkpoint.digests):
        done += num_bytes
        progress(done, total)
    digests = checkpoint.digests.finish()
    seconds = time.perf_counter() - started
    return LoadReport(bytes_read=done, tensor_bytes=held_bytes(model), seconds=seconds, digests=digests)


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of memory of all weights of a module, in the form in which they are held."""
    parameters = sum(
        target.memory.nbytes for target in tensor_targets(module) if isinstance(target, TensorTarget)
    )
    return parameters + sum(sink.nbytes for sink in row_sinks(module))


def _filled(
    loads: list[_Load], packed: list[Target], quantized: QuantizedCheckpoint | None, digests: ReadDigests
) -> Iterator[int]:
    """Fill all tensors; yield the bytes read after each. A weight that is complete is finished at once."""
    targets = (*(load.target for load in loads), *packed)
    missing = Counter(id(target.sink) for target in targets if isinstance(target, RowTarget))
    # Pages of its own, which go back to the system; a freed block of the heap would stay.
    buffer = zero_pages(max(map(_buffer_bytes, loads), default=0), "reading weights", "Free memory.")
    for path, of_file in _by_file(loads):
        with opened(path) as descriptor:
            for load in of_file:
                _fill(load, descriptor, buffer, digests)
                _finish(load.target, missing)
                yield load.num_bytes
    for target in packed:
        assert quantized is not None
        _fill_quantized(target, quantized)
        _finish(target, missing)
        yield quantized.num_bytes(_projection(target))


def _finish(target: Target, missing: Counter[int]) -> None:
    if isinstance(target, RowTarget):
        missing[id(target.sink)] -= 1
        if not missing[id(target.sink)]:
            target.sink.finish()


def _projection(target: Target) -> str:
    """Return the name of the projection whose weight this is; empty for a bias."""
    name, _, kind = target.name.rpartition(".")
    return name if kind == "weight" else ""


def _fill_quantized(target: Target, quantized: QuantizedCheckpoint) -> None:
    """Fill a target with integers where the weight can hold them so; else with dequantised rows."""
    projection = _projection(target)
    out_size, in_size = target.shape
    if isinstance(target, RowTarget) and isinstance(target.sink, QuantizedSink):
        for first, rows in quantized.rows(projection, out_size, in_size):
            for own_first, own in _own_rows(target, first, len(rows.q)):
                cut = rows.cut(own, target.columns)
                target.sink.put_quantized(target.first_row + own_first, cut, target.role)
        return
    dtype = target.sink.dtype if isinstance(target, RowTarget) else target.memory.dtype
    columns = slice(None) if target.columns is None else slice(target.columns.start, target.columns.end)
    for first, dense in quantized.dense_rows(projection, out_size, in_size, dtype):
        for own_first, own in _own_rows(target, first, len(dense)):
            target.put(own_first, dense[own, columns])


def _own_rows(target: Target, first: int, count: int) -> Iterator[tuple[int, slice]]:
    """Yield the target's rows of a piece of the tensor's: where they go, and which they are. None or one."""
    start, end = max(first, target.rows.start), min(first + count, target.rows.end)
    if start < end:
        yield start - target.rows.start, slice(start - first, end - first)


def _plan(targets: list[Target], checkpoint: Checkpoint) -> list[_Load]:
    """Make all checks that need no tensor data; return the loads in the order of the files' bytes."""
    loads = [_checked(target, checkpoint.entry(target.name)) for target in targets]
    return sorted(loads, key=lambda load: (load.entry.path, load.entry.begin))


def _tensors_elsewhere(
    model: nn.Module, packed: list[Target], quantized: QuantizedCheckpoint | None
) -> set[str]:
    """Return the stage's tensors that no target names: other ranks' projections, and quantised tensors."""
    others = projections_elsewhere(model)
    names = {f"{projection}.weight" for projection in others}
    if quantized is not None:
        held = [projection for projection in others if quantized.holds(projection)]
        for projection in (*map(_projection, packed), *held):
            names.update(quantized.tensor_names(projection))
    return names


def _check_surplus(targets: list[Target], known: set[str], checkpoint: Checkpoint) -> None:
    """Raise for a tensor that the model should have a place for, and does not have."""
    surplus = unexpected_names(targets, [name for name in checkpoint.names if name not in known])
    if surplus:
        entry = checkpoint.entry(surplus[0])
        raise CheckpointError(
            file=entry.path.name,
            tensor=entry.name,
            expected="no such tensor by config.json",
            found=f"{entry.dtype} of {list(entry.shape)}",
            remedy="config.json and the weights belong to different models.",
        )


def _checked(target: Target, entry: TensorEntry) -> _Load:
    if entry.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            file=entry.path.name,
            tensor=entry.name,
            expected=f"a dtype of {', '.join(_FLOAT_DTYPES)}",
            found=entry.dtype,
            remedy="Use the original checkpoint, or one whose config.json says how it is quantised.",
        )
    if entry.shape != target.shape:
        raise CheckpointError(
            file=entry.path.name,
            tensor=entry.name,
            expected=f"shape {list(target.shape)} by config.json",
            found=f"{list(entry.shape)}",
        )
    return _Load(entry=entry, target=target)


def _buffer_bytes(load: _Load) -> int:
    """Return the bytes staged at a time: none, a chunk, or rows of some panels and those converted."""
    if load.is_direct:
        return 0
    if isinstance(load.target, TensorTarget):
        return CHUNK_BYTES
    return _rows_at_once(load) * (_row_bytes(load) + load.columns * load.target.sink.dtype.itemsize)


def _row_bytes(load: _Load) -> int:
    return load.columns * load.itemsize


def _rows_at_once(load: _Load) -> int:
    return max(1, CHUNK_BYTES // _row_bytes(load) // PANEL_ROWS) * PANEL_ROWS


def _by_file(loads: list[_Load]) -> Iterator[tuple[Path, list[_Load]]]:
    for path in dict.fromkeys(load.entry.path for load in loads):
        yield path, [load for load in loads if load.entry.path == path]


def _fill(load: _Load, descriptor: int, buffer: Tensor, digests: ReadDigests) -> None:
    """Read one tensor chunk by chunk, so that digest and check for NaN find the bytes still in the cache."""
    if isinstance(load.target, RowTarget):
        _fill_rows(load, load.target, descriptor, buffer, digests)
        return
    source_dtype = _FLOAT_DTYPES[load.entry.dtype]
    step = CHUNK_BYTES // source_dtype.itemsize
    memory = load.target.memory.view(-1)
    for first in range(0, memory.numel(), step):
        chunk = memory[first : first + step]
        staged = chunk
        if not load.is_direct:
            staged = buffer[: chunk.numel() * source_dtype.itemsize].view(source_dtype)
        with _read(descriptor, staged, load, first, digests):
            _check_finite(staged, load, first)
            if staged is not chunk:
                chunk.copy_(staged)
                _check_representable(chunk, load.entry)


def _fill_rows(load: _Load, target: RowTarget, descriptor: int, buffer: Tensor, digests: ReadDigests) -> None:
    """Do `_fill` for a weight that takes rows."""
    source_dtype, num_rows, in_size = _FLOAT_DTYPES[load.entry.dtype], target.rows.size, load.columns
    step, row_bytes = _rows_at_once(load), _row_bytes(load)
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        staged = buffer[: count * row_bytes].view(source_dtype)
        with _read(descriptor, staged, load, first * in_size, digests):
            _check_finite(staged, load, first * in_size)
            rows = staged
            if target.sink.dtype != source_dtype:
                converted = buffer[step * row_bytes :].view(target.sink.dtype)
                rows = converted[: len(staged)].copy_(staged)
                _check_representable(rows, load.entry)
            target.put(first, rows.view(count, in_size))


def _read(
    descriptor: int, into: Tensor, load: _Load, first: int, digests: ReadDigests
) -> AbstractContextManager[None]:
    """Fill `into` with the elements from `first` on. Within the context their bytes are digested."""
    memory = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
    size = load.itemsize
    for begin, end in load.runs(first, first + into.numel()):
        piece = memory[(begin - first) * size : (end - first) * size]
        read_exactly(piece, descriptor, load.entry, load.place(begin) * size)
    entry = load.entry
    return digests.beside(entry.path.name, entry.name, load.place_in_band(first) * size, memory, load.band)


def _check_finite(chunk: Tensor, load: _Load, first: int) -> None:
    """Raise at the first NaN or infinity. `first`: the chunk's first element."""
    low, high = chunk.aminmax()  # both propagate NaN
    if torch.isfinite(low) and torch.isfinite(high):
        return
    bad = int(torch.isfinite(chunk).logical_not().nonzero()[0])
    raise CheckpointError(
        file=load.entry.path.name,
        tensor=load.entry.name,
        expected="finite numbers",
        found=f"{chunk[bad].item()} at element {load.place(first + bad)}",
    )


def _check_representable(chunk: Tensor, entry: TensorEntry) -> None:
    """Refuse infinity after a conversion: float16 ends at 65504, where float32 and bfloat16 go on."""
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
