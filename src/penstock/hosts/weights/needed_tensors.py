"""Finds which tensors of a checkpoint a rank reads, in groups that are kept together.

The head says which tensors there are. Those of the rank's layers are needed, and of the others those of the
model's ends, where the rank has an end. For models that transformers runs the names of the ends are not
known here, and the first and the last stage get all that belongs to no layer. What a rank lacks all the same
is an error of its loader and never a guess.

A group is a layer, or a module outside the layers: hosts that hold other layers than before need only what
is new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from penstock.config.hosts import SAME_VERSION
from penstock.errors import ProtocolError
from penstock.families.spec import ModelSpec
from penstock.gguf.block_types import TYPES
from penstock.hosts.weights.weight_wire import TensorShape
from penstock.process.config import RankConfig
from penstock.weights.checkpoint import DTYPE_BYTES, TensorEntry

# Modules outside the layers: of our own families, and as GGUF files name them (`families.gguf_names`).
_EMBEDDING = ("model.embed_tokens", "token_embd")
_NORM_AND_HEAD = ("model.norm", "output_norm", "lm_head", "output")
_OF_CONFIG = ("rope_freqs", "rope_factors_short")  # of GGUF files: read with the configuration, on all ranks
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # of `mtp_copies` in GGUF files
_BLOCK_TYPES = {kind.name: kind for kind in TYPES.values()}  # of GGUF files
_MAX_NAME = 1024
_MAX_DIMENSIONS = 8
_MAX_BYTES = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """A group of tensors that are kept in one file, in the form of safetensors.

    Attributes:
        name: such as "model.layers.3"; for error messages.
        tensors: in the order of their names.
        header: of the file: length and JSON. Types of tensors from GGUF files are called as ggml calls them.
    """

    name: str
    tensors: tuple[TensorShape, ...]
    header: bytes

    @classmethod
    def of(cls, name: str, tensors: Iterable[TensorShape]) -> TensorGroup:
        """Return the group of these tensors, in the order of their names."""
        ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
        return cls(name=name, tensors=ordered, header=_header(ordered))

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors of the group."""
        return sum(map(num_bytes, self.tensors))

    def entries(self, path: Path) -> dict[str, TensorEntry]:
        """Return where each tensor is in the file of the group at `path`, by the tensor's name."""
        entries: dict[str, TensorEntry] = {}
        begin = len(self.header)
        for tensor in self.tensors:
            end = begin + num_bytes(tensor)
            entries[tensor.name] = TensorEntry(
                name=tensor.name, path=path, dtype=tensor.dtype, shape=tensor.shape, begin=begin, end=end
            )
            begin = end
        return entries

    @property
    def shape_key(self) -> str:
        """A hash of the tensors' names, types and shapes; it does not depend on the values in them."""
        return xxhash.xxh3_128_hexdigest(self.header)

    def content_key(self, digests: Iterable[bytes]) -> str:
        """Return a hash of the tensors' names, types, shapes and values, given the digest of each tensor."""
        return xxhash.xxh3_128_hexdigest(self.header + b"".join(digests))


def num_bytes(tensor: TensorShape) -> int:
    """Return the size of a tensor in bytes."""
    num_values = math.prod(tensor.shape)
    if tensor.dtype in DTYPE_BYTES:
        return num_values * DTYPE_BYTES[tensor.dtype]
    return _BLOCK_TYPES[tensor.dtype].num_bytes(num_values)


def tensor_groups(tensors: Iterable[TensorShape], spec: ModelSpec, rank: RankConfig) -> list[TensorGroup]:
    """Return the groups of tensors that a rank needs.

    Args:
        tensors: of the whole checkpoint, as the head describes it.
        spec: of the model.

    Raises:
        ProtocolError: the description is not one of a checkpoint.
    """
    described = _checked(tensors)
    layer_of = _layers(described, spec.num_layers)
    groups: dict[str, list[TensorShape]] = {}
    for name, tensor in described.items():
        if name in layer_of:
            prefix, layer = layer_of[name]
            is_own = rank.start_layer <= layer < rank.end_layer
            is_mtp = rank.has_mtp and layer == spec.num_layers and not _is_copy(name, spec)
            if is_own or is_mtp:
                groups.setdefault(f"{prefix}{layer}", []).append(tensor)
        elif _is_of_end(name, spec, rank):
            groups.setdefault(_module(name) or name, []).append(tensor)
    return [TensorGroup.of(name, group) for name, group in groups.items()]


def config_groups(tensors: Iterable[TensorShape]) -> list[TensorGroup]:
    """Return groups of the tensors that are read with the model's configuration, on all ranks.

    Raises `ProtocolError` as `tensor_groups`.
    """
    return [
        TensorGroup.of(_module(name), [tensor])
        for name, tensor in _checked(tensors).items()
        if _module(name) in _OF_CONFIG
    ]


def _is_copy(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor of the MTP layer is a copy of the model's own, which no rank reads."""
    return name in spec.mtp_copies or name.endswith(_COPIES)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _checked(tensors: Iterable[TensorShape]) -> dict[str, TensorShape]:
    """Return the tensors by name; no two have the same, and their sizes are not absurd."""
    described: dict[str, TensorShape] = {}
    for tensor in tensors:
        if (
            tensor.name in described
            or tensor.name == "__metadata__"  # no tensor, in a header
            or len(tensor.name) > _MAX_NAME
            or len(tensor.shape) > _MAX_DIMENSIONS
            or any(size < 0 for size in tensor.shape)
            or not _is_storable(tensor)
            or num_bytes(tensor) > _MAX_BYTES
        ):
            raise ProtocolError(
                f"the head describes an impossible tensor: {tensor.name[:80]!r}.",
                remedy=SAME_VERSION,
            )
        described[tensor.name] = tensor
    return described


def _is_storable(tensor: TensorShape) -> bool:
    """Return whether the type is known, and its rows are whole blocks."""
    kind = _BLOCK_TYPES.get(tensor.dtype)
    if kind is None:
        return tensor.dtype in DTYPE_BYTES
    row = tensor.shape[-1] if tensor.shape else 1
    return row % kind.block_values == 0


def _layers(names: Iterable[str], num_layers: int) -> dict[str, tuple[str, int]]:
    """Return the layer of each tensor that is in one: the name of the list, and the number.

    A list of modules is one of layers if it has an entry for every layer of the model; experts, which are in
    layers, have their number behind that of the layer.
    """
    numbered: dict[str, tuple[str, int]] = {}
    numbers: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        index = next((place for place, part in enumerate(parts) if part.isdecimal() and len(part) < 7), None)
        if index is None:
            continue
        prefix, number = "".join(f"{part}." for part in parts[:index]), int(parts[index])
        numbered[name] = prefix, number
        numbers.setdefault(prefix, set()).add(number)
    lists = {prefix for prefix, found in numbers.items() if found.issuperset(range(num_layers))}
    return {name: place for name, place in numbered.items() if place[0] in lists}


def _is_of_end(name: str, spec: ModelSpec, rank: RankConfig) -> bool:
    """Return whether a tensor outside the layers is one of an end that the rank has."""
    if spec.implementation != "penstock":
        return rank.is_first or rank.is_last
    module = _module(name)
    if module in _OF_CONFIG:
        return True
    if module in _EMBEDDING:
        loads_tied_head = spec.tie_word_embeddings and rank.tied_head == "load"
        return rank.is_first or rank.has_mtp or (rank.is_last and loads_tied_head)
    if module in _NORM_AND_HEAD:
        return rank.is_last
    return rank.is_first or rank.is_last


def _header(tensors: Iterable[TensorShape]) -> bytes:
    """Return the header of a safetensors file: its length, and where which tensor is."""
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for tensor in tensors:
        end = offset + num_bytes(tensor)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    content = msgspec.json.encode(entries)
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def total_bytes(groups: Iterable[TensorGroup]) -> int:
    """Return the bytes that all tensors of these groups take in the checkpoint's files."""
    return sum(group.num_bytes for group in groups)
