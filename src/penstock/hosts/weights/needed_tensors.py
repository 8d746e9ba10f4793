"""Finds which tensors of a checkpoint a rank reads, in groups that a host's cache keeps together.

The head says which tensors there are. A rank needs those of its layers. The first and the last stage also
need modules outside the layers, such as embedding, norm and output layer. For models that transformers runs,
the names of these modules are not known here, so both stages get all tensors that are in no layer. If a rank
still lacks a tensor, its loader raises an error, and guesses nothing.

A group is a layer, or a module outside the layers. A host that gets other layers than before therefore
fetches only the new ones.
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

# Modules outside the layers, by their names in our own families and in GGUF files (`families.gguf_names`).
_EMBEDDING = ("model.embed_tokens", "token_embd")
_NORM_AND_HEAD = ("model.norm", "output_norm", "lm_head", "output")
_OF_CONFIG = ("rope_freqs", "rope_factors_short")  # in GGUF files: read with the configuration, by all ranks
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # `mtp_copies` in GGUF files
_BLOCK_TYPES = {kind.name: kind for kind in TYPES.values()}  # types of tensors in GGUF files
_MAX_NAME = 1024
_MAX_DIMENSIONS = 8
_MAX_BYTES = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """A group of tensors that are kept in one file, in the form of safetensors.

    Attributes:
        name: name of the group for error messages, such as "model.layers.3".
        tensors: the tensors, in the order of their names.
        header: header of the file, its length and then JSON. Types of tensors from GGUF files have ggml's
            names in it.
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
        tensors: all tensors of the checkpoint, as the head describes them.
        spec: what the model is.
        rank: configuration of the rank.

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
    """Return the tensors by name, after checking that names differ and sizes are possible."""
    described: dict[str, TensorShape] = {}
    for tensor in tensors:
        if (
            tensor.name in described
            or tensor.name == "__metadata__"  # in a header this name stands for something else than a tensor
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
    """Return, for each tensor that is in a layer, the name of the list of layers and the layer's number.

    A numbered list of modules is a list of layers if it has an entry for every layer of the model. Only the
    first number in a name counts: that of an expert comes behind that of its layer.
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
    """Return whether a rank needs a tensor outside the layers."""
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
    """Return the header of a safetensors file: its length, and JSON that says where each tensor is."""
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
