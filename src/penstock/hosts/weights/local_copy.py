"""The copy of the head's model on a worker's own disk, as far as its tensors are those of the head."""

from __future__ import annotations

from typing import Protocol

from penstock.errors import CheckpointError
from penstock.hosts.weights.needed_tensors import TensorGroup
from penstock.hosts.weights.tensor_digests import Check, TensorDigests
from penstock.weights.checkpoint import TensorEntry
from penstock.weights.tensor_files import TensorFiles


class LocalCopy(Protocol):
    """The interface of what a host has of a model without the head."""

    def has(self, group: TensorGroup) -> bool:
        """Return whether there are tensors of these names and shapes."""
        ...

    def unread_bytes(self, group: TensorGroup) -> int:
        """Return how many bytes must be read before the digests of the tensors are known."""
        ...

    def digests(self, group: TensorGroup) -> list[bytes]:
        """Return the digests of the tensors; empty where they are not there, or cannot be read."""
        ...

    def entries(self, group: TensorGroup) -> dict[str, TensorEntry]:
        """Return where each tensor is."""
        ...


class NoCopy:
    """The copy of a host that has none."""

    def has(self, group: TensorGroup) -> bool:
        return False

    def unread_bytes(self, group: TensorGroup) -> int:
        return 0

    def digests(self, group: TensorGroup) -> list[bytes]:
        return []

    def entries(self, group: TensorGroup) -> dict[str, TensorEntry]:
        return {}


class ModelCopy:
    """A model below the worker's own directories.

    Args:
        tensors: of its files.
        digests: of the tensors, as far as they are known.
        check: called between the pieces that are read.
    """

    def __init__(self, tensors: TensorFiles, digests: TensorDigests, check: Check) -> None:
        self._tensors = tensors
        self._digests = digests
        self._check = check

    def has(self, group: TensorGroup) -> bool:
        try:
            entries = [self._tensors.entry(name) for name in group.names]
        except CheckpointError:
            return False
        return all(
            (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
            for entry, tensor in zip(entries, group.tensors, strict=True)
        )

    def unread_bytes(self, group: TensorGroup) -> int:
        if not self.has(group):
            return 0
        entries = [self._tensors.entry(name) for name in group.names]
        try:
            return sum(entry.end - entry.begin for entry in entries if not self._digests.has(entry))
        except CheckpointError:
            return 0

    def digests(self, group: TensorGroup) -> list[bytes]:
        if not self.has(group):
            return []
        try:
            return [self._digests.of(self._tensors.entry(name), self._check) for name in group.names]
        except CheckpointError:
            return []

    def entries(self, group: TensorGroup) -> dict[str, TensorEntry]:
        return {name: self._tensors.entry(name) for name in group.names}
