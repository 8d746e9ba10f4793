"""The index of a model's tensors in either format: which bytes of which file hold which tensor.

`open_tensors` chooses by the model's path. Called by `hosts.weights`, which compares, sends and fetches
tensors without knowing what their bytes mean; ranks read through `rank.stored_weights`. Torch-free; reads no
tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import CheckpointError
from penstock.told_text import printable
from penstock.weights.checkpoint import Checkpoint, TensorEntry

if TYPE_CHECKING:
    from penstock.gguf.file import GgufFile
    from penstock.gguf.part import GgufTensor


class TensorFiles(Protocol):
    """The tensors of a model's files; `weights.checkpoint.Checkpoint` is one."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        ...

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor is; raises `CheckpointError` where there is none of this name."""
        ...


class GgufTensors:
    """The tensors of a GGUF file, by the names that the file has for them; implements `TensorFiles`.

    Keeps nothing else of the file, whose vocabulary may be large.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file.path.name
        self._tensors: Mapping[str, GgufTensor] = file.tensors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def entry(self, name: str) -> TensorEntry:
        tensor = self._tensors.get(name)
        if tensor is None:
            shown = printable(name)
            raise CheckpointError(file=self._file, tensor=shown, expected="this tensor", found="no such name")
        return gguf_entry(tensor)


def gguf_entry(tensor: GgufTensor) -> TensorEntry:
    """Return the place of a tensor of a GGUF file; the dtype is ggml's name of its type."""
    return TensorEntry(
        name=tensor.name,
        path=tensor.path,
        dtype=tensor.type.name,
        shape=tensor.shape,
        begin=tensor.start,
        end=tensor.end,
    )


def open_tensors(model: Path) -> TensorFiles:
    """Return the tensors of a model.

    Args:
        model: a directory with safetensors, or a GGUF file.

    Raises:
        CheckpointError: its files are missing, or not sound.
    """
    if model.is_dir():
        return Checkpoint(model)
    from penstock.gguf.file import GgufFile  # here: numpy is slow to import

    return GgufTensors(GgufFile.open(model))
