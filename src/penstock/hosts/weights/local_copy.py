"""The copy of the head's model on a worker's own disk, whose tensors are compared with the head's."""

from __future__ import annotations

from typing import Protocol

from penstock.errors import CheckpointError
from penstock.hosts.weights.needed_tensors import TensorGroup
from penstock.hosts.weights.tensor_digests import Check, TensorDigests
from penstock.weights.checkpoint import TensorEntry
from penstock.weights.tensor_files import TensorFiles


class LocalCopy(Protocol):
    """The interface of a host's own copy of the head's model."""

    def has(self, group: TensorGroup) -> bool:
        """Return whether the copy has all tensors of a group, by their names, types and shapes."""
        ...

    def unread_bytes(self, group: TensorGroup) -> int:
        """Return how many bytes must be read before the digests of a group's tensors are known."""
        ...

    def digests(self, group: TensorGroup) -> list[bytes]:
        """Return the digest of each tensor of a group; empty if one is missing or cannot be read."""
        ...

    def entries(self, group: TensorGroup) -> dict[str, TensorEntry]:
        """Return for each tensor of a group, by name, in which file and at which bytes it is."""
        ...


class NoCopy:
    """The stand-in for `LocalCopy` on a host that has no copy of the model."""

    def has(self, group: TensorGroup) -> bool:
        return False

    def unread_bytes(self, group: TensorGroup) -> int:
        return 0

    def digests(self, group: TensorGroup) -> list[bytes]:
        return []

    def entries(self, group: TensorGroup) -> dict[str, TensorEntry]:
        return {}


class ModelCopy:
    """A copy of the head's model in a directory of the worker's own. Implements `LocalCopy`.

    Args:
        tensors: the tensors in the model's files.
        digests: digests of tensors, as far as they are known.
        check: called between the pieces that are read; raises if the work was cancelled.
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
