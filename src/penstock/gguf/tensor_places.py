"""The places of the tensors of a GGUF model, on a host that has only some of its tensors.

    model.gguf               the header of the whole file, and nothing else
    model.gguf.index.json    for each tensor that is here: a file in the same folder, and a range of its bytes

A host that runs some layers of a model gets only the tensors of these layers, and `hosts.weights` writes such
an index. Called by `gguf.file`. Reads no tensor data; knows nothing of where the files come from.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import CheckpointError, unreadable
from penstock.told_text import printable

if TYPE_CHECKING:
    from penstock.gguf.part import GgufTensor  # slow to import, with numpy

INDEX_SUFFIX = ".index.json"  # behind the name of the file, or of the first part
MAX_INDEX_BYTES = 100 << 20


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """The bytes `[begin, end)` of a file, which is named without its folder."""

    file: str
    begin: int
    end: int


class _Index(msgspec.Struct):
    tensors: dict[str, TensorPlace]


def index_content(places: Mapping[str, TensorPlace]) -> bytes:
    """Return an index of these tensors."""
    return msgspec.json.encode(_Index(tensors=dict(places)))


def read_places(header: Path) -> dict[str, TensorPlace] | None:
    """Return where tensors are, by their names; None: there is no index, and the file or its parts have all.

    Args:
        header: path of the file, or of its first part.

    Raises:
        CheckpointError: there is an index that cannot be read.
    """
    path = header.with_name(header.name + INDEX_SUFFIX)
    try:
        _require_regular(path, os.stat(path))
        with path.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path.name, error) from error
    if len(content) > MAX_INDEX_BYTES:
        raise _refusal(path, f"at most {MAX_INDEX_BYTES} bytes", "more")
    try:
        return msgspec.json.decode(content, type=_Index).tensors
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(path, "a file and two numbers for each tensor", printable(str(error))) from error


def at_places(
    tensors: Mapping[str, GgufTensor], places: Mapping[str, TensorPlace], header: Path
) -> dict[str, GgufTensor]:
    """Return the tensors of a model with the places that they have here.

    A tensor without a place keeps its place in the file of the header. That file ends before it, so that the
    tensor cannot be read.

    Args:
        tensors: tensors of the model, as the header has them.
        places: the content of the index (`read_places`).
        header: path of the file, or of its first part.

    Raises:
        CheckpointError: a place does not hold the bytes of its tensor, or the model does not have the tensor.
    """
    index = header.with_name(header.name + INDEX_SUFFIX)
    sizes = {file: _file_size(index, file) for file in {place.file for place in places.values()}}
    placed = dict(tensors)
    for name, place in places.items():
        tensor, shown = tensors.get(name), printable(name)
        if tensor is None:
            raise _refusal(index, "tensors of the model's header", "a tensor that is not in it", shown)
        if place.begin < 0 or place.end - place.begin != tensor.num_bytes:
            expected = f"{tensor.num_bytes} bytes of {tensor.type.name} {list(tensor.shape)}"
            raise _refusal(index, expected, f"bytes {place.begin} to {place.end} of {place.file}", shown)
        if place.end > sizes[place.file]:
            found = f"{sizes[place.file]} bytes (truncated)"
            raise _refusal(header.with_name(place.file), f"at least {place.end} bytes", found, shown)
        path = header.with_name(place.file)
        placed[name] = dataclasses.replace(tensor, path=path, start=place.begin)
    return placed


def _file_size(index: Path, name: str) -> int:
    """Return the size of a file beside an index."""
    if Path(name).name != name or not name.isprintable():
        raise _refusal(index, "names of files beside it", printable(name))
    path = index.with_name(name)
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path.name, error) from error
    _require_regular(path, status)
    return status.st_size


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):  # anything else could block for ever
        raise _refusal(path, "a regular file", "something else")


def _refusal(path: Path, expected: str, found: str, tensor: str = "") -> CheckpointError:
    return CheckpointError(file=path.name, tensor=tensor, expected=expected, found=found)
