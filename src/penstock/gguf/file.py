"""A model in GGUF as a whole: one file, or the parts that it was split into.

Parts are called `NAME-00001-of-0000N.gguf`. The metadata of each part have its number, and those of the first
part are the model's. Whichever part is named, all are opened, and their tensors form one mapping. On a host
that has only some tensors of the model, the files are headers alone, and an index says where these tensors
are (`gguf.tensor_places`). Called to load weights, a vocabulary or a configuration from GGUF.
Torch-free; reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.gguf.metadata import GgufMetadata
from penstock.gguf.part import GgufPart, GgufTensor, read_part
from penstock.gguf.part_names import part_paths
from penstock.gguf.tensor_places import at_places, read_places
from penstock.told_text import printable

_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A model in GGUF, in one file or several.

    Attributes:
        path: path of the file that has the metadata: the only one, or the first part.
        parts: all files, in order.
        version: version of the format.
        metadata: metadata of the model.
        tensors: tensors of all files, by name, in the order of the files.
        header_bytes: number of bytes that were read, of all files together.
        data_starts: position in each file where its header ends and the tensors' bytes begin.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    metadata: GgufMetadata
    tensors: Mapping[str, GgufTensor]
    header_bytes: int
    data_starts: tuple[int, ...]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Return the model that this file, which may be any part of several, belongs to.

        Raises:
            CheckpointError: a file is missing or cannot be read, a header is not sound, or the parts are not
                those of one model.
        """
        paths = part_paths(path)
        places = read_places(paths[0])
        parts = [read_part(each, is_header_alone=places is not None) for each in paths]
        _require_one_model(parts)
        tensors = _joined(parts)
        return cls(
            path=paths[0],
            parts=tuple(paths),
            version=parts[0].version,
            metadata=parts[0].metadata,
            tensors=tensors if places is None else at_places(tensors, places, paths[0]),
            header_bytes=sum(part.header_bytes for part in parts),
            data_starts=tuple(part.data_start for part in parts),
        )


def _require_one_model(parts: Sequence[GgufPart]) -> None:
    for index, part in enumerate(parts):
        metadata = part.metadata
        if len(parts) > 1 or _COUNT in metadata:
            _require(metadata, _COUNT, len(parts))
            _require(metadata, _NUMBER, index)
    if _NUM_TENSORS in parts[0].metadata:
        _require(parts[0].metadata, _NUM_TENSORS, sum(len(part.tensors) for part in parts))


def _require(metadata: GgufMetadata, key: str, expected: int) -> None:
    found = metadata.integer(key)
    if found != expected:
        raise CheckpointError(
            file=metadata.file,
            key=key,
            expected=f"{expected}, as the names of the files and tensors require",
            found=str(found),
            remedy="Keep all parts of one model in one directory, under their published names.",
        )


def _joined(parts: Sequence[GgufPart]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    file=part.path.name,
                    tensor=printable(name),
                    expected="each tensor in one part",
                    found=f"it also in {tensors[name].path.name}",
                )
            tensors[name] = tensor
    return tensors
