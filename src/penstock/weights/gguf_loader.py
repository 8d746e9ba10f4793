"""Reads a model's weights from GGUF files into the memory of its parameters.

Called by a rank once, in place of `weights.loader`, with the same promises: only the bytes of the rank's own
tensors are read, nothing is mapped or kept, numbers that are not finite are refused. Weights in block formats
stay as the file quantised them where the layer can hold them so (`layers.block_matrix`), else they are
dequantised, those that our kernels do not know by `weights.gguf_package`. What a converter reordered,
transposed or cut is put back into the form of the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from penstock.distributed.share import Share
from penstock.errors import CheckpointError
from penstock.families.gguf_names import StoredTensor
from penstock.families.gguf_shapes import require_stored
from penstock.kernels.block_formats import BLOCK_FORMATS, BlockFormat
from penstock.kernels.block_rows import BlockRows, dequantize
from penstock.weights.checkpoint import TensorEntry
from penstock.weights.gguf_blocks import decode_rows
from penstock.weights.gguf_package import decode_floats
from penstock.weights.loader import PANEL_ROWS, LoadReport, held_bytes
from penstock.weights.mapping import (
    RowSink,
    RowTarget,
    Target,
    projections_elsewhere,
    tensor_targets,
    unexpected_names,
    unused_names,
)
from penstock.weights.read_digests import ReadDigests
from penstock.weights.tensor_bytes import TORCH_DTYPES, opened, read_exactly
from penstock.weights.tensor_files import gguf_entry

PIECE_VALUES = 1 << 20  # of a piece that is read and decoded at once, about: it stays in a cache


@runtime_checkable
class BlockSink(RowSink, Protocol):
    """A weight that takes rows in block formats."""

    def put_blocks(self, first_row: int, rows: BlockRows, role: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A tensor to read, or a share of it, and its destination."""

    stored: StoredTensor
    target: Target

    @property
    def block_format(self) -> BlockFormat | None:
        """The format of its blocks; None: it is stored in floats."""
        return BLOCK_FORMATS.get(self.stored.tensor.type.name)

    @property
    def own_columns(self) -> range:
        """The columns of the share."""
        own = self.target.read_columns
        return range(self.stored.columns) if own is None else range(own.start, own.end)

    @property
    def read_columns(self) -> range:
        """The columns that are read: the share's, and all others in their blocks."""
        own, inputs = self.own_columns, self.stored.tensor.type.block_values
        return range(own.start // inputs * inputs, -(-own.stop // inputs) * inputs)

    @property
    def columns(self) -> int:
        """The number of values that are read of a row."""
        return len(self.read_columns)

    def bytes_of(self, num_values: int) -> int:
        """Return the bytes of values of a row, which are whole blocks."""
        return self.stored.tensor.type.num_bytes(num_values)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are read."""
        return self.target.rows.size * self.bytes_of(self.columns)

    @property
    def takes_blocks(self) -> bool:
        """Whether the weight holds blocks, and not floats."""
        is_sink = isinstance(self.target, RowTarget) and isinstance(self.target.sink, BlockSink)
        return is_sink and self.block_format is not None

    @property
    def entry(self) -> TensorEntry:
        """The tensor's place, as other readers have it."""
        return gguf_entry(self.stored.tensor)

    @property
    def rows_at_once(self) -> int:
        """The rows of a piece: whole panels, and whole heads if rows are reordered; all if it is turned."""
        if self.stored.is_transposed:
            return max(1, self.target.rows.size)
        unit = math.lcm(PANEL_ROWS, self.stored.head_rows or 1)
        return max(1, PIECE_VALUES // max(self.columns, 1) // unit) * unit


def load_gguf(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    progress: Callable[[int, int], None],
    *,
    digests: ReadDigests,
    left_out: frozenset[str] = frozenset(),
) -> LoadReport:
    """Fill every weight of `model`.

    Args:
        stored: the tensors of the file, by the names of the model's weights.
        progress: called with (bytes done, bytes in all) after each tensor.
        digests: digests of the bytes read.
        left_out: names of tensors that are filled elsewhere.

    Raises:
        CheckpointError: a tensor is missing, surplus, of another shape, cut short, or not finite.
        ModelChangedError: a tensor is not that of the first load.
    """
    started = time.perf_counter()
    targets = tensor_targets(model)
    _check_surplus(model, targets, stored)
    absent = left_out - stored.keys()
    loads = [load for target in targets if target.name not in absent for load in _loads(target, stored)]
    loads = [load for load in loads if load.target.name not in left_out]
    loads.sort(key=lambda load: (load.stored.tensor.path, load.stored.tensor.start, load.stored.first_row))
    total, done = sum(load.num_bytes for load in loads), 0
    missing = Counter(id(load.target.sink) for load in loads if isinstance(load.target, RowTarget))
    for load in loads:
        _fill(load, digests)
        if isinstance(load.target, RowTarget):
            missing[id(load.target.sink)] -= 1
            if not missing[id(load.target.sink)]:
                load.target.sink.finish()
        done += load.num_bytes
        progress(done, total)
    return LoadReport(
        bytes_read=done,
        tensor_bytes=held_bytes(model),
        seconds=time.perf_counter() - started,
        digests=digests.finish(),
    )


def _check_surplus(model: nn.Module, targets: list[Target], stored: Mapping[str, StoredTensor]) -> None:
    known = unused_names(model, stored) | {f"{name}.weight" for name in projections_elsewhere(model)}
    surplus = unexpected_names(targets, [name for name in stored if name not in known])
    surplus += [name for name in stored if not name.startswith(("model.", "lm_head."))]  # of an unknown name
    if surplus:
        tensor = stored[surplus[0]].tensor
        raise CheckpointError(
            file=tensor.path.name,
            tensor=tensor.name,
            expected="no such tensor in a model of this architecture",
            found=f"{tensor.type.name} of {list(tensor.shape)}",
            remedy="Use the Hugging Face checkpoint that the file was made from.",
        )


def _loads(target: Target, stored: Mapping[str, StoredTensor]) -> list[_Load]:
    """Return what is to be read for a target: a tensor, or those pieces of one that the share has."""
    file = next(iter(stored.values())).tensor.path.name if stored else "the GGUF file"
    found = require_stored(stored, target.name, target.shape, file)
    if not found.pieces:
        return [_checked(_Load(stored=found, target=target))]
    loads, first = [], 0
    for piece in found.pieces:
        end = first + piece.checkpoint_rows
        if target.rows.start <= first and end <= target.rows.end:
            loads.append(
                _checked(_Load(stored=piece, target=_rows_of(target, first - target.rows.start, piece)))
            )
        first = end
    assert sum(load.stored.checkpoint_rows for load in loads) == target.rows.size, "shares are whole pieces"
    return loads


def _rows_of(target: Target, first: int, piece: StoredTensor) -> Target:
    """Return the place of a piece within its tensor's, from this row on."""
    rows = Share.all(piece.shape[0])
    if isinstance(target, RowTarget):
        return replace(target, first_row=target.first_row + first, rows=rows)
    return replace(target, memory=target.memory[first : first + piece.checkpoint_rows], rows=rows)


def _checked(load: _Load) -> _Load:
    """Return a load if its share ends at borders of blocks, or is dequantised; else raise."""
    tensor = load.stored.tensor
    inputs = tensor.type.block_values
    if load.takes_blocks and load.own_columns != load.read_columns:
        raise CheckpointError(
            file=tensor.path.name,
            tensor=tensor.name,
            expected=f"shares of whole blocks of {inputs} inputs",
            found=f"{len(load.own_columns)} from {load.own_columns.start} on",
            remedy="Use fewer ranks per stage and more stages (--pp).",
        )
    return load


def _fill(load: _Load, digests: ReadDigests) -> None:
    """Read one tensor piece by piece, and put its rows where they belong."""
    with opened(load.stored.tensor.path) as descriptor:
        for first, raw in _pieces(load, descriptor, digests):
            _put(load, first, raw)


def _put(load: _Load, first: int, raw: Tensor) -> None:
    """Put rows of the share, from `first` on. raw: uint8 [n, bytes of a row]."""
    target, block_format, head_rows = load.target, load.block_format, load.stored.head_rows
    name = load.stored.tensor.type.name
    if block_format is not None:
        rows = decode_rows(block_format, raw, load.columns)
        _check_finite(load, rows.d, first)
        if rows.m is not None:
            _check_finite(load, rows.m, first)
        if isinstance(target, RowTarget) and isinstance(target.sink, BlockSink):
            own = rows.cut(_checkpoint_order(len(rows), head_rows), None) if head_rows else rows
            target.sink.put_blocks(target.first_row + first, own, target.role)
            return
        numbers = dequantize(rows)
    elif name in TORCH_DTYPES:
        numbers = raw.view(TORCH_DTYPES[name])
    else:
        numbers = decode_floats(name, raw)
    if load.own_columns != load.read_columns:
        before = load.own_columns.start - load.read_columns.start
        numbers = numbers[:, before : before + len(load.own_columns)]
    _check_finite(load, numbers, first)
    if load.stored.is_one_plus:
        numbers = numbers.float() - 1.0
    if head_rows:
        numbers = numbers[_checkpoint_order(len(numbers), head_rows)]
    converted = numbers.to(target.sink.dtype if isinstance(target, RowTarget) else target.memory.dtype)
    _check_finite(load, converted, first, "numbers within the range of the model's dtype")
    shape = (
        (target.sink.in_size if target.columns is None else len(load.own_columns),)
        if isinstance(target, RowTarget)
        else target.memory.shape[1:]
    )
    if load.stored.is_transposed:
        converted = converted.view(len(converted), load.columns).T.contiguous()
    target.put(first, converted.reshape(len(converted), *shape))


def _pieces(load: _Load, descriptor: int, digests: ReadDigests) -> Iterator[tuple[int, Tensor]]:
    """Read the share's rows; yield the number of the first, and uint8 [n, bytes of a row]."""
    entry, row_bytes = load.entry, load.bytes_of(load.columns)
    whole_row_bytes = load.bytes_of(load.stored.columns)
    start = load.bytes_of(load.read_columns.start)
    first_row = load.stored.first_row + load.target.rows.start
    columns = load.read_columns
    band = "" if load.target.read_columns is None else f"{columns.start}:{columns.stop}"
    for first in range(0, load.target.rows.size, load.rows_at_once):
        count = min(load.rows_at_once, load.target.rows.size - first)
        raw = torch.empty(count, row_bytes, dtype=torch.uint8)
        memory = memoryview(raw.view(-1).numpy())  # type: ignore[arg-type]
        if row_bytes == whole_row_bytes:
            read_exactly(memory, descriptor, entry, (first_row + first) * whole_row_bytes)
        else:
            for row in range(count):
                own = memory[row * row_bytes : (row + 1) * row_bytes]
                read_exactly(own, descriptor, entry, (first_row + first + row) * whole_row_bytes + start)
        digests.add(entry.path.name, entry.name, (first_row + first) * row_bytes, memory, band)
        yield first, raw


def _checkpoint_order(count: int, head_rows: int) -> Tensor:
    """Return which stored row each row of the checkpoint is, in groups of `head_rows`."""
    assert count % head_rows == 0, "shares are whole heads"
    order = torch.arange(count).view(-1, head_rows // 2, 2)
    return order.transpose(1, 2).reshape(-1)


def _check_finite(load: _Load, numbers: Tensor, first: int, expected: str = "finite numbers") -> None:
    """Raise `CheckpointError` at the first NaN or infinity.

    Args:
        first: row of the share that `numbers` begin at.
    """
    low, high = numbers.aminmax()  # both propagate NaN
    if torch.isfinite(low) and torch.isfinite(high):
        return
    bad = torch.isfinite(numbers).logical_not().nonzero()[0].tolist()
    row = load.stored.first_row + load.target.rows.start + first + bad[0]
    raise CheckpointError(
        file=load.stored.tensor.path.name,
        tensor=load.stored.tensor.name,
        expected=expected,
        found=f"{numbers[tuple(bad)].item()} in row {row}",
    )
