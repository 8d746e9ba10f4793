"""The mapping of checkpoint tensors to the memory of a model [A12] [A13] [A14].

A parameter keeps its checkpoint name; a module with `parts` (`layers.linear.FusedLinear`) takes several
checkpoint tensors, one below the other. The model asks for what it holds, so a stage never looks at another
stage's tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from penstock.distributed.share import Share
from penstock.kernels.quantized_rows import QuantizedRows

# Left over in old checkpoints: `layers.rope` works it out, the tied head is the embedding.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_TIED_HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_AFTER_LAYERS = "model.norm.weight"  # held by the last stage


@runtime_checkable
class Fused(Protocol):
    """A module whose weight and bias are several checkpoint tensors, stacked by rows."""

    parts: Mapping[str, tuple[int, int]]

    def role(self, part: str) -> int: ...


@runtime_checkable
class StoredTogether(Fused, Protocol):
    """A fused module whose parts may be one tensor in the checkpoint already: its name, or empty."""

    stored_as: str


@runtime_checkable
class Shared(Protocol):
    """A module whose weight may be a share of the checkpoint's tensor."""

    def shares(self, part: str, rows: int) -> tuple[Share, Share | None]:
        """Return the rows and columns that it has; None: all columns.

        Args:
            part: one of `Fused.parts`, or empty.
            rows: rows of its own weight.
        """
        ...


@runtime_checkable
class SharedOut(Protocol):
    """A module of which other ranks of the stage have parts that this one does not have."""

    elsewhere: Sequence[str]  # projections, from the module


@runtime_checkable
class LeavesOut(Protocol):
    """A model whose checkpoint has tensors that are not read: of layers after the last, and others."""

    unused_layers: range
    unused_tensors: frozenset[str]


@runtime_checkable
class RowSink(Protocol):
    """A weight that is not plain memory: it takes rows and holds them in its own form (`layers.matrix`)."""

    out_size: int
    in_size: int
    dtype: torch.dtype
    nbytes: int

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        """Put rows [first_row, first_row + n) of the plain, gate or up part: [n, in_size] of `dtype`."""
        ...

    def finish(self) -> None: ...


@runtime_checkable
class QuantizedSink(RowSink, Protocol):
    """A weight that takes rows which are quantised already, or quantises them."""

    def put_quantized(self, first_row: int, rows: QuantizedRows, role: int) -> None:
        """Put rows [first_row, first_row + n) of the plain, gate or up part, with q of [n, in_size]."""
        ...

    def put_columns(self, first_row: int, rows: Tensor, columns: Share, role: int) -> None:
        """Put some columns of rows that are quantised here as a whole: [n, columns.whole]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTarget:
    """The contiguous memory of a parameter, and the checkpoint tensor, or the share, that belongs there.

    Attributes:
        rows, columns: those of the tensor; None: all columns, or a tensor of one dimension.
    """

    name: str
    memory: Tensor
    rows: Share
    columns: Share | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        rest = list(self.memory.shape[1:])
        if self.columns is not None:
            rest[0] = self.columns.whole
        return (self.rows.whole, *rest)

    @property
    def read_columns(self) -> Share | None:
        """The columns that `put` wants."""
        return self.columns

    def put(self, first_row: int, rows: Tensor) -> None:
        """Put rows [first_row, first_row + n) of a weight, converted to its dtype.

        Args:
            rows: [n, ...], with the other dimensions of `memory`.
        """
        self.memory[first_row : first_row + len(rows)] = rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTarget:
    """The rows of a weight in a form of its own, and the checkpoint tensor, or the share, that belongs there.

    Attributes:
        rows, columns: those of the tensor; None: all columns.
    """

    name: str
    sink: RowSink
    first_row: int
    role: int
    rows: Share
    columns: Share | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return (self.rows.whole, self.sink.in_size if self.columns is None else self.columns.whole)

    @property
    def read_columns(self) -> Share | None:
        """The columns that `put` wants.

        They are all columns for a weight that quantises, so that its scales, and with them the tokens, do not
        depend on how many ranks share it.
        """
        return None if isinstance(self.sink, QuantizedSink) else self.columns

    def put(self, first_row: int, rows: Tensor) -> None:
        """Put rows from `first_row` of the tensor on, of the sink's dtype.

        Args:
            rows: [n, columns], where the columns are those of `read_columns`, or all.
        """
        if self.columns is not None and isinstance(self.sink, QuantizedSink):
            self.sink.put_columns(self.first_row + first_row, rows, self.columns, self.role)
        else:
            self.sink.put(self.first_row + first_row, rows, self.role)


Target = TensorTarget | RowTarget


def tensor_targets(model: nn.Module) -> list[Target]:
    """Return all weights of the model, each piece once; together they cover everything that it holds."""
    return [target for path, module in model.named_modules() for target in _module_targets(path, module)]


def row_sinks(model: nn.Module) -> list[RowSink]:
    """Return all weights that are not plain memory."""
    return [module for module in model.modules() if isinstance(module, RowSink)]


def projections_elsewhere(model: nn.Module) -> list[str]:
    """Return the projections in the checkpoint that are other ranks' of this stage."""
    modules = (pair for pair in model.named_modules() if isinstance(pair[1], SharedOut))
    return [f"{path}.{name}" for path, module in modules for name in module.elsewhere]


def unused_names(model: nn.Module, checkpoint_names: Iterable[str]) -> set[str]:
    """Return the names of tensors that are never read."""
    if not isinstance(model, LeavesOut):
        return set()
    layers, names = model.unused_layers, model.unused_tensors
    return {name for name in checkpoint_names if _layer(name) in layers or name in names}


def _module_targets(path: str, module: nn.Module) -> Iterator[Target]:
    parent = path.rpartition(".")[0]
    for kind, parameter in module.named_parameters(recurse=False):
        if not isinstance(module, Fused):
            rows, columns = _shares(module, "", len(parameter), kind)
            yield TensorTarget(name=f"{path}.{kind}", memory=parameter.data, rows=rows, columns=columns)
            continue
        for part, (start, end) in module.parts.items():
            rows, columns = _shares(module, part, end - start, kind)
            memory = parameter.data[start:end]
            name = f"{parent}.{_stored_name(module, part)}.{kind}"
            yield TensorTarget(name=name, memory=memory, rows=rows, columns=columns)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, RowSink):
        return
    if not isinstance(module, Fused):
        rows, columns = _shares(module, "", weight.out_size)
        yield RowTarget(name=f"{path}.weight", sink=weight, first_row=0, role=0, rows=rows, columns=columns)
        return
    for part, (start, end) in module.parts.items():
        role = module.role(part)
        rows, columns = _shares(module, part, end - start)
        yield RowTarget(
            name=f"{parent}.{_stored_name(module, part)}.weight",
            sink=weight,
            first_row=start if role == 0 else 0,
            role=role,
            rows=rows,
            columns=columns,
        )


def _stored_name(module: Fused, part: str) -> str:
    return (isinstance(module, StoredTogether) and module.stored_as) or part


def _shares(module: nn.Module, part: str, num_rows: int, kind: str = "weight") -> tuple[Share, Share | None]:
    """Return the rows and columns of the checkpoint's tensor that belong in so many rows of the module."""
    if not isinstance(module, Shared):
        return Share.all(num_rows), None
    rows, columns = module.shares(part, num_rows)
    return rows, None if kind != "weight" or columns is None or columns.is_whole else columns


def unexpected_names(targets: Iterable[Target], checkpoint_names: Iterable[str]) -> list[str]:
    """Return the tensors that this stage should have a place for, and does not have.

    Such a tensor means that configuration and weights are not of the same model: a bias that would silently
    be left out, or layers after the last one. Tensors of other stages are not considered.
    """
    wanted = {target.name for target in targets}
    components = {_component(name) for name in wanted}
    last_layer = max(map(_layer, wanted)) if _AFTER_LAYERS in wanted else sys.maxsize
    return sorted(
        name
        for name in checkpoint_names
        if name not in wanted
        and (_component(name) in components or _layer(name) > last_layer)
        and not _DERIVED.search(name)
        and name != _TIED_HEAD
    )


def _component(name: str) -> str:
    """Return the layer, or the module outside the layers, that a tensor belongs to."""
    match = _LAYER.match(name)
    return match.group() if match else name.rpartition(".")[0]


def _layer(name: str) -> int:
    """Return the number of the layer that a tensor belongs to; -1 outside the layers."""
    match = _LAYER.match(name)
    return int(match.group(1)) if match else -1
